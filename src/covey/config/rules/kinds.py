"""The rule of masked policies."""

from covey.config.schema import Config
from covey.policy.settings import NANO

ARCHITECTURES = ("modernbert", "bert", "roberta")
"""Of nano-masked."""


def check_kind(config: Config) -> None:
    """Require that masked policies, their engine and their environment come together."""
    model, engine = config.model, config.engine.name
    # The embedded models have one kind and one list of architectures
    masked = model.kind == "masked"
    if model.name in NANO and masked != (model.name == "nano-masked"):
        wanted = "masked" if model.name == "nano-masked" else "causal"
        raise ValueError(f"model.name={model.name} needs model.kind={wanted}, got model.kind={model.kind}")
    if model.name in NANO and masked != (model.nano_architecture in ARCHITECTURES):
        raise ValueError(f"model.nano_architecture={model.nano_architecture} is none of model.name={model.name}")
    if masked != (engine == "fill") and (masked or engine != "fake"):
        wanted = "masked" if engine == "fill" else "causal"
        way = "masked; engine=fill environment=infill fills gaps" if masked else "causal"
        raise ValueError(f"engine.name={engine} needs model.kind={wanted}, got model.kind={way}")
    environment = config.environment
    if masked and environment.masked_prompts == "never":
        raise ValueError(f"model.kind=masked needs prompts with masked tokens, got environment={environment.name}")
    if not masked and environment.masked_prompts == "always":
        raise ValueError(f"environment={environment.name} needs model.kind=masked, got model.kind=causal")
