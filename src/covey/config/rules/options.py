"""Options of the algorithm's functions: values, and conditions among them."""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, get_origin, get_type_hints

from covey.config.schema import Config
from covey.system.section import RANGES, convert
from covey.system.setting import Bounds

OPTION_NEEDS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "leave_one_out": dict.fromkeys(("ddof", "eps"), ("post_normalize", "batch_zscore")),
    "pairwise": {"temperature": ("form", "bradley_terry"), **dict.fromkeys(("ddof", "eps"), ("post", "group_zscore"))},
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
    """Refuse an option that the function would not read, from `setting`."""
    for option in sorted(unread_options(name, function, options)):
        other, needed = OPTION_NEEDS[name][option]
        got = options.get(other, signature(function).parameters[other].default)
        raise ValueError(
            f"{setting}.{option}={options[option]} needs {setting}.{other}={needed} for {name}, got {other}={got}"
        )


OPTION_BOUNDS: Mapping[str, Bounds] = {
    **dict.fromkeys(("k", "top_k"), Bounds(ge=1)),
    **dict.fromkeys(("ddof", "discount"), Bounds(ge=0, le=1)),
    "cov_ratio": Bounds(gt=0, le=1),
    **dict.fromkeys(("dual_clip", "two_sided_delta"), Bounds(gt=1)),  # below 1 a token on the policy has no gradient
    **dict.fromkeys(("clip", "tau_pos", "tau_neg", "temperature", "ratio_max", "ratio_cap", "f_norm"), Bounds(gt=0)),
    **dict.fromkeys(("eps", "eps_low", "eps_high", "atol", "ratio_min", "prefix_gamma"), Bounds(ge=0)),
    **dict.fromkeys(("div", "div_low", "div_high", "adv_tau", "kl_tau", "kl_coef", "beta"), Bounds(ge=0)),
}
"""Bounds of an option of this name, of any built-in function."""


def check_option_values(setting: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse option values of the wrong type or range.

    Options that the function does not take are checked elsewhere.
    """
    kinds = get_type_hints(function)
    for option, value in options.items():
        if option not in kinds:
            continue
        name = f"{setting}.{option}"
        _check_type(name, value, kinds[option])
        for sign, limit, holds in RANGES:
            bound = getattr(OPTION_BOUNDS.get(option, Bounds()), limit)
            if bound is not None and isinstance(value, int | float) and not holds(value, bound):
                raise ValueError(f"{name} must be {sign} {bound}, got {value}")


def _check_type(name: str, value: Any, kind: Any) -> None:
    if kind == float | str:  # which words there are, the function says
        convert(value, str if isinstance(value, str) else float, name)
    elif get_origin(kind) is not Sequence:
        convert(value, kind, name)
    else:
        pair = convert(value, list[float], name)
        if len(pair) != 2 or pair[0] > pair[1]:
            raise ValueError(f"{name} must be two numbers, the smaller one first, got {value}")


def check_parts(config: Config) -> None:
    """Refuse functions that change only the sum of a reward, under GDPO."""
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
