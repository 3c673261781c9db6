"""Rules of masked policies and of environment=infill."""

from covey.config.schema import Config
from covey.environments.infill.settings import InfillConfig
from covey.policy.settings import NANO

FILLS = ("infill", "reward_functions", "mixture", "custom")
"""Environments whose prompts may have masked tokens."""
ARCHITECTURES = ("modernbert", "bert", "roberta")
"""Of nano-masked."""


def check_kind(config: Config) -> None:
    """Require that masked policies, their engine and their environment come together."""
    model, engine = config.model, config.engine.name
    masked = model.kind == "masked"
    if model.name in NANO and masked != (model.name == "nano-masked"):
        wanted = "masked" if model.name == "nano-masked" else "causal"
        raise ValueError(f"model.name={model.name} needs model.kind={wanted}, got model.kind={model.kind}")
    if model.name in NANO and masked != (model.nano_architecture in ARCHITECTURES):
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
    """Check shares of masked tokens, and what can be watched. ValueError names the setting."""
    settings = config.environment
    assert isinstance(settings, InfillConfig), "check_environment calls this"
    if not settings.mask_ratios or not all(0 < ratio < 1 for ratio in settings.mask_ratios):
        raise ValueError(f"environment.mask_ratios must be numbers between 0 and 1, got {settings.mask_ratios}")
    if config.data.path is not None and "grammar" in settings.watch:
        raise ValueError(f"environment.watch=[grammar] needs data.path = null, got data.path={config.data.path}")
