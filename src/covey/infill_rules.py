"""Rules of masked policies and of environment=infill."""

from covey.config import Config
from covey.environment_config import InfillConfig

FILLS = ("infill", "reward_functions", "mixture", "custom")
"""Environments whose prompts may have masked tokens."""
WATCHES = ("grammar", "second_judge", "ngram")
ARCHITECTURES = ("modernbert", "bert", "roberta")
"""Of nano-masked."""


def check_kind(config: Config) -> None:
    """A masked policy, its engine and its environment belong together."""
    model, engine = config.model, config.engine.name
    masked = model.kind == "masked"
    if model.name in ("nano", "nano-masked") and masked != (model.name == "nano-masked"):
        wanted = "masked" if model.name == "nano-masked" else "causal"
        raise ValueError(f"model.name={model.name} needs model.kind={wanted}, got model.kind={model.kind}")
    if model.name in ("nano", "nano-masked") and masked != (model.nano_architecture in ARCHITECTURES):
        raise ValueError(f"model.nano_architecture={model.nano_architecture} is none of model.name={model.name}")
    if masked != (engine == "fill") and (masked or engine != "fake"):
        wanted = "masked" if engine == "fill" else "causal"
        raise ValueError(f"engine.name={engine} needs model.kind={wanted}, got model.kind={model.kind}")
    environment = config.environment.name
    if masked and environment not in FILLS:
        raise ValueError(f"model.kind=masked needs prompts with masked tokens, got environment={environment}")
    if not masked and environment == "infill":
        raise ValueError("environment=infill needs model.kind=masked, got model.kind=causal")


def check_infill(config: Config) -> None:
    """Ranges and choices. ValueError names the setting."""
    settings = config.environment
    assert isinstance(settings, InfillConfig), "check_environment calls this"
    _one_of("masking", settings.masking, ("random", "spans"))
    _one_of("judge_output", settings.judge_output, ("probability", "logit"))
    for name in settings.watch:
        _one_of("watch", name, WATCHES)
    if not settings.mask_ratios or not all(0 < ratio < 1 for ratio in settings.mask_ratios):
        raise ValueError(f"environment.mask_ratios must be numbers between 0 and 1, got {settings.mask_ratios}")
    for name, least in LEAST.items():
        if vars(settings)[name] < least:
            raise ValueError(f"environment.{name} must be >= {least}, got {vars(settings)[name]}")
    if not settings.judge_lr > 0:
        raise ValueError(f"environment.judge_lr must be > 0, got {settings.judge_lr}")
    if settings.judge_floor > 1:
        raise ValueError(f"environment.judge_floor must be <= 1, got {settings.judge_floor}")
    if config.data.path is not None and "grammar" in settings.watch:
        raise ValueError(f"environment.watch=[grammar] needs data.path = null, got data.path={config.data.path}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"environment.{name} must be one of {', '.join(allowed)}, got {value}")


LEAST = {
    "window": 2,
    "span_length": 1,
    "num_train": 1,
    "num_test": 1,
    "judge_floor": 0,
    "judge_batch_size": 1,
    "judge_label": 0,
    "judge_num_steps": 1,
    "judge_pairs": 1,
    "judge_hidden_size": 8,
    "judge_num_layers": 1,
}
"""Smallest value of each."""
