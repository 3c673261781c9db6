"""Find earlier probes, and the length of prompts."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from covey.config.schema import Config
from covey.environments import registry as environments
from covey.environments.base import Environment, close_environment
from covey.policy.settings import NANO, ModelConfig
from covey.system.disk import cache_folder
from covey.system.hub import HUB_NAME
from covey.system.jsonl import read_object
from covey.types import Prompt
from covey_report.plan.hardware import Hardware
from covey_report.plan.kept import keep
from covey_report.plan.plan import Measured

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_PROMPTS = 64
"""Prompts whose tokens are counted."""


def prompt_tokens_of(config: Config) -> float | None:
    """Count mean prompt tokens; None if that takes a fetch or long."""
    if not _is_here(config.model, config.data.path) or config.environment.slow_to_build:
        return None
    from covey.policy.models.loading import load_tokenizer  # transformers, for which another plan need not wait

    # Rows are drawn over all of the file, which may be sorted
    some = replace(config.data, max_rows=min(NUM_PROMPTS, config.data.max_rows or NUM_PROMPTS))
    try:
        tokenizer, environment = load_tokenizer(config.model), environments.build(replace(config, data=some))
    except (ValueError, ImportError, OSError):  # a plan needs no rows: training says what is missing
        return None
    try:
        return mean_tokens(tokenizer, environment, environment.prompts("train"))
    except ValueError:
        return None
    finally:
        close_environment(environment)


def mean_tokens(tokenizer: "PreTrainedTokenizerBase", environment: Environment, prompts: Sequence[Prompt]) -> float:
    """Return the mean tokens of some prompts, with the tools shown."""
    from covey.rollouts.encoding import encode_prompt
    from covey.run.build_stream import spread

    some = spread(prompts, NUM_PROMPTS)
    return fmean(len(encode_prompt(tokenizer, prompt, environment.tool_schemas(prompt))) for prompt in some)


def _is_here(model: ModelConfig, path: str | None) -> bool:
    """Return True if tokenizer and rows are on this machine."""
    from huggingface_hub import try_to_load_from_cache

    def is_local(name: str) -> bool:
        return not HUB_NAME.fullmatch(name) or Path(name).exists()

    cached = partial(try_to_load_from_cache, model.name, "tokenizer_config.json", revision=model.revision)
    has_tokenizer = model.name in NANO or is_local(model.name) or isinstance(cached(), str)
    return has_tokenizer and (path is None or is_local(path))


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
