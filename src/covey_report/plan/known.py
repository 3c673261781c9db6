"""Find earlier probes, and the length of prompts."""

from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from covey.config.schema import Config
from covey.environments import registry as environments
from covey.environments.base import close_environment
from covey.system.disk import cache_folder
from covey.system.jsonl import read_object
from covey_report.plan.hardware import Hardware
from covey_report.plan.kept import keep
from covey_report.plan.plan import Measured

NUM_PROMPTS = 64
"""Prompts whose tokens are counted."""


def prompt_tokens_of(config: Config) -> float | None:
    """Count mean prompt tokens, None if a tokenizer must be fetched."""
    if config.model.name != "nano":
        return None
    # Both import transformers, for which the plan of another model need not wait
    from covey.policy.models.loading import load_tokenizer
    from covey.rollouts.encoding import encode_prompt

    try:
        tokenizer, environment = load_tokenizer(config.model), environments.build(config)
    except (ValueError, ImportError, OSError):  # a plan needs no rows: training says what is missing
        return None
    try:
        prompts = environment.prompts("train")[:NUM_PROMPTS]
        return fmean(len(encode_prompt(tokenizer, prompt)) for prompt in prompts)
    finally:
        close_environment(environment)


def kept_probe(config: Config, on: Hardware) -> Measured | None:
    found = read_object(_path(config, on))
    try:
        return Measured(**found) if found else None
    except TypeError:  # of another version
        return None


def keep_probe(config: Config, on: Hardware, found: Measured) -> None:
    keep(_path(config, on), asdict(found))


def _path(config: Config, on: Hardware) -> Path:
    model, environment = config.model, config.environment.name
    words = (model.name, model.nano_hidden_size, model.nano_num_layers, model.lora_rank, environment, on.name)
    name = "".join(c if c.isalnum() else "-" for c in "_".join(map(str, words)))
    return Path(cache_folder()) / "plans" / f"{name}.json"
