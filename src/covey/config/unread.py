"""Which settings a verb does not read: the same words may serve several verbs."""

from collections.abc import Iterable
from dataclasses import fields

from covey.algorithm.settings import AlgorithmConfig
from covey.config.checks import format_value, read
from covey.config.schema import ColdStartConfig, Config
from covey.environments.machines.settings import MachinesConfig
from covey.rollouts.settings import CurriculumConfig
from covey.trainer.settings import OptimizerConfig


def check_typed(verb: str, config: Config, typed: Iterable[str], num_processes: int) -> list[str]:
    """Return which of the settings named on the command line the verb does not read.

    ValueError for one of a cold start that is off: a recipe may hold some, but who types one means it.
    """
    names = [word.lstrip("+").partition("=")[0] for word in typed]
    idle = [name for name in names if name in COLD_START_SETTINGS]
    if verb not in ("evaluate", "cold-start", "judge") and idle and not config.cold_start.enabled:
        value = format_value(read(config, idle[0]))
        raise ValueError(f"{idle[0]}={value} needs cold_start.enabled=true, got cold_start.enabled=false")
    unread = (*UNREAD.get(verb, ()), *(RANK_SETTINGS if num_processes == 1 else ()))
    return [name for name in names if any(name == other or name.startswith(f"{other}.") for other in unread)]


def names_of(section: type, prefix: str, *chosen: str) -> tuple[str, ...]:
    """Return the dotted names of the fields of a section that begin with one of `chosen`."""
    return tuple(f"{prefix}.{field.name}" for field in fields(section) if field.name.startswith(chosen))


ADVANTAGE_SETTINGS = (*names_of(AlgorithmConfig, "algorithm", "advantage"), "algorithm.length_normalizer")
LORA_SETTINGS = ("model.lora_alpha", "model.lora_dropout", "model.lora_targets")
COLD_START_SETTINGS = (
    *(name for name in names_of(ColdStartConfig, "cold_start", "") if name[11:] != "enabled"),
    "timeouts.cold_start",
    *names_of(MachinesConfig, "environment", "num_demonstrations", "family_share", "demonstration_cap"),
)
RANK_SETTINGS = ("parallel", "timeouts.ranks")
"""What a single process does not read."""
TRAINING_SETTINGS = (
    *("num_steps", "groups_per_step", "group_size", "group_size_schedule", "updates_per_batch", "max_staleness"),
    *("source", "shuffle", "curriculum"),
    *("algorithm", "optimizer", "evaluation.every"),
    *("output.save_every", "output.keep_last", "output.keep_best"),
    *("output.rollouts_per_step", "output.show_rollouts"),
)
ANSWER_SETTINGS = ("output.answers_per_evaluation", "output.max_rollout_rows")
CREDIT_SETTINGS = (
    *ADVANTAGE_SETTINGS,
    *names_of(AlgorithmConfig, "algorithm", "shaping", "selection", "group_filter"),
)
UNREAD: dict[str, tuple[str, ...]] = {
    "check": (
        *("num_steps", "max_staleness", "source", *CREDIT_SETTINGS),
        *names_of(CurriculumConfig, "curriculum", "window", "decay", "explore", "promot", "demote", "earlier"),
        *(name for name in names_of(OptimizerConfig, "optimizer", "") if name != "optimizer.name"),
        *("evaluation.every", "evaluation.num_samples", "evaluation.k", "evaluation.confidence"),
        *(name for name in (*TRAINING_SETTINGS, *ANSWER_SETTINGS) if name.startswith("output.")),
    ),
    "judge": (
        *("num_steps", "groups_per_step", "group_size", "updates_per_batch"),
        *("micro_batch_tokens", "packing", "logprob_chunk", "optimizer", "preflight"),
    ),
    "evaluate": (
        *TRAINING_SETTINGS,
        *("micro_batch_tokens", "packing", "model.attention", "logprob_chunk", "cold_start", "preflight"),
        *("timeouts.cold_start", "timeouts.update"),
    ),
    "cold-start": (
        *(*TRAINING_SETTINGS, *ANSWER_SETTINGS),
        *("packing", "cold_start.enabled", "engine.name", *LORA_SETTINGS, "model.lora_rank", "model.load_in_4bit"),
        *("sampling.temperature", "sampling.top_k", "sampling.top_p", "sampling.min_p"),
        *("evaluation.num_prompts", "evaluation.num_samples", "evaluation.k", "evaluation.confidence"),
        *("timeouts.sampling", "timeouts.scoring", "timeouts.update", "preflight"),
    ),
}
"""Settings and sections that a verb besides train does not read; the same words may serve several verbs."""
