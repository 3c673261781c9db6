"""Settings that only mean something beside another one: nothing that is set is ignored."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from covey.config import AlgorithmConfig, Config, ModelConfig


def read(config: Config, name: str) -> Any:
    """The value of a dotted setting.

    >>> read(Config(), "sampling.top_k")
    0
    """
    value: Any = config
    for part in name.split("."):
        value = vars(value)[part]
    return value


def shown(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


@dataclass(frozen=True, slots=True)
class Needs:
    """Settings that only mean something under a condition, and are refused where it does not hold.

    >>> Needs(("output.wandb_project",), "output.trackers", "with wandb", lambda names: "wandb" in names)
    """

    settings: tuple[str, ...]
    partner: str
    """The setting the condition is about."""
    condition: str
    """In words: "> 0", "set", "= linear or cosine"."""
    holds: Callable[[Any], bool]


def check_needs(config: Config) -> None:
    """Refuse a setting that differs from its default while nothing would read it."""
    defaults = Config(environment=type(config.environment)())
    for rule in NEEDS:
        partner = read(config, rule.partner)
        if rule.holds(partner):
            continue
        for name in rule.settings:
            value = read(config, name)
            if value != read(defaults, name):
                raise ValueError(
                    f"{name}={shown(value)} needs {rule.partner} {rule.condition}, got {rule.partner}={shown(partner)}"
                )


def names_of(section: type, prefix: str, *chosen: str) -> tuple[str, ...]:
    """Dotted names of fields of a section whose names begin with one of `chosen`."""
    return tuple(f"{prefix}.{field.name}" for field in fields(section) if field.name.startswith(chosen))


def _positive(value: float) -> bool:
    return value > 0


def _is_set(value: Any) -> bool:
    return value is not None


KL_SETTINGS = tuple(f"algorithm.kl_{name}" for name in ("estimator", "gradient", "in", "aggregation", "clamp"))
STEERING_SETTINGS = tuple(f"algorithm.kl_{name}" for name in ("controller", "horizon", "coef_min", "coef_max"))
CORRECTION_SETTINGS = names_of(AlgorithmConfig, "algorithm", "correction_")

LORA_SETTINGS = names_of(ModelConfig, "model", "lora_alpha", "lora_dropout", "lora_targets")

NEEDS: tuple[Needs, ...] = (
    Needs(KL_SETTINGS, "algorithm.kl_coef", "> 0", _positive),
    Needs(("algorithm.kl_gradient", "algorithm.kl_aggregation"), "algorithm.kl_in", "= loss", lambda kl: kl == "loss"),
    Needs(STEERING_SETTINGS, "algorithm.target_kl", "set", _is_set),
    Needs(("algorithm.sampler_kl_estimator",), "algorithm.sampler_kl_coef", "> 0", _positive),
    Needs(("algorithm.reference_refresh_alpha",), "algorithm.reference_refresh_every", "set", _is_set),
    Needs(CORRECTION_SETTINGS, "algorithm.correction", "= truncate or mask", lambda mode: mode != "none"),
    Needs(("algorithm.rejection_thresholds",), "algorithm.rejection", "set", _is_set),
    Needs(("algorithm.selection_options",), "algorithm.selection", "set", _is_set),
    Needs(names_of(AlgorithmConfig, "algorithm", "group_filter_"), "algorithm.group_filter", "set", _is_set),
    Needs(
        names_of(ModelConfig, "model", "lora_alpha", "lora_dropout", "lora_targets"),
        "model.lora_rank",
        "> 0",
        _positive,
    ),
    Needs(names_of(ModelConfig, "model", "nano_"), "model.name", "= nano", lambda name: name == "nano"),
    Needs(("model.revision",), "model.name", "= a hub name", lambda name: name != "nano"),
    Needs(("optimizer.min_lr_ratio",), "optimizer.schedule", "= linear or cosine", lambda name: name != "constant"),
    Needs(("optimizer.betas", "optimizer.eps"), "optimizer.name", "= adamw or adamw8bit", lambda name: name != "sgd"),
    Needs(("output.wandb_project",), "output.trackers", "with wandb", lambda names: "wandb" in names),
    Needs(("output.max_rollout_rows",), "output.rollouts_per_step", "> 0", _positive),
    Needs(("reward_weights",), "rewards", "set", bool),
)
"""Who reads a setting. One that nothing would read is refused, never ignored."""
