"""Options of the functions of an algorithm that only mean something beside another option, or another setting."""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from covey.config.schema import Config

OPTION_NEEDS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "leave_one_out": dict.fromkeys(("ddof", "eps"), ("post_normalize", "batch_zscore")),
    "pairwise": {
        "temperature": ("form", "bradley_terry"),
        **dict.fromkeys(("ddof", "eps"), ("post", "group_zscore")),
    },
    "pkpo": {"loo_scale": ("variant", "loo")},
    **dict.fromkeys(("turn_mixed", "anchor_state"), dict.fromkeys(("ddof", "eps"), ("scale", "std"))),
    "best_minus_second": dict.fromkeys(("ddof", "eps"), ("scale", "group_std")),
}
"""Function -> option -> the other option, and the value with which the first is read."""


def unread_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> set[str]:
    """Return the options that the function would not read beside the others."""
    parameters = signature(function).parameters
    return {
        option
        for option, (other, needed) in OPTION_NEEDS.get(name, {}).items()
        if option in options and options.get(other, parameters[other].default) != needed
    }


def check_option_needs(setting: str, name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse an option that the function would not read. `setting` is where the options came from."""
    for option in sorted(unread_options(name, function, options)):
        other, needed = OPTION_NEEDS[name][option]
        got = options.get(other, signature(function).parameters[other].default)
        raise ValueError(
            f"{setting}.{option}={options[option]} needs {setting}.{other}={needed} for {name}, got {other}={got}"
        )


def check_parts(config: Config) -> None:
    """Refuse what changes only the sum of a reward under GDPO, which adds up its parts itself."""
    algorithm = config.algorithm
    if algorithm.advantage != "gdpo":
        return
    # gdpo normalises parts of the reward, so what changes their sum would be ignored
    ignored = {f"algorithm.shaping={','.join(algorithm.shaping)}": bool(algorithm.shaping)}
    ignored["algorithm.kl_in=reward"] = algorithm.kl_in == "reward" and algorithm.kl_coef > 0
    for setting, is_set in ignored.items():
        if is_set:
            raise ValueError(
                f"{setting} needs an advantage of the whole reward, got algorithm.advantage=gdpo, which standardises "
                "its parts: give the penalty as a reward function of its own"
            )
