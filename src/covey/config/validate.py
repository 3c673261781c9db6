"""Check a whole configuration: names, types, and every rule between settings."""

from collections.abc import Callable, Collection, Mapping
from inspect import signature
from typing import Any

from covey.algorithm.settings import AlgorithmConfig
from covey.config.budget import resolve_budget
from covey.config.checks import (
    check_bounds,
    check_choices,
    check_needs,
    check_packages,
    check_ranges,
    check_texts,
    format_value,
)
from covey.config.rules.devices import check_devices
from covey.config.rules.options import check_option_needs, check_option_values, check_parts
from covey.config.rules.stream import check_curriculum, check_group_sizes, check_mixture
from covey.config.rules.teacher import check_teacher
from covey.config.schema import Config
from covey.environments.data.settings import DataConfig
from covey.environments.registry import environment_class
from covey.environments.settings import EnvironmentConfig, MixtureConfig
from covey.policy.settings import FOLDER, NANO
from covey.rollouts.settings import group_sizes
from covey.system.lookup import check_options, function_path_of_file, hint_of_file, is_function_path, one_of, resolve
from covey.system.section import check_section


def validate(config: Config, meanwhile: Callable[[Config], None] | None = None) -> None:
    """Check names, types and all `RULES`. ValueError names the settings to change.

    `meanwhile` is called after the plain rules, before those that import torch.
    """
    check_section(config)
    if not isinstance(config.environment, EnvironmentConfig):
        raise ValueError(f"environment must be settings, such as ArithmeticConfig(), got {config.environment!r:.60}")
    for rule in RULES:
        rule(config)
    if meanwhile is not None:
        meanwhile(config)
    check_functions(config)


BASELINE_FREE = ("none", "role_ema", "reinforce_plus_plus")
"""Advantages that mean something for a single completion."""
NANO_MASKED_ARCHITECTURES = ("modernbert", "bert", "roberta")


def check_data(config: Config) -> None:
    """Require held-out rows, so that training prompts are not measured."""
    fraction = config.data.test_fraction
    if not 0 < fraction <= 0.9:
        raise ValueError(
            f"data.test_fraction must be above 0 and at most 0.9, got {fraction:g}: a run is measured on "
            "rows that it does not train on; to train on all rows of a file, give a test split: data.path=FOLDER with "
            "train.* and test.* files"
        )


def check_model(config: Config) -> None:
    model = config.model
    if not model.name.strip():
        raise ValueError("model.name is empty: a directory, a hub name, nano or nano-masked")
    if model.code is not None and model.code != FOLDER and not is_function_path(model.code):
        hint = hint_of_file(model.code) if is_function_path(function_path_of_file(model.code)) else ""
        raise ValueError(f"model.code must be module:function, or folder (code beside weights), got {model.code}{hint}")
    needs_files = {
        "model.load_in_4bit=true": model.load_in_4bit,
        "model.load_in_8bit=true": model.load_in_8bit,
        "model.kind=masked": model.kind == "masked",
        "engine.name=vllm": config.engine.name == "vllm",
    }
    if model.code not in (None, FOLDER) and any(needs_files.values()):
        name = next(name for name, is_set in needs_files.items() if is_set)
        raise ValueError(f"{name} needs a model that transformers saved, got model.code={model.code}")
    if model.lora_rank > 0 and not model.lora_targets:
        raise ValueError(f"model.lora_rank={model.lora_rank} needs model.lora_targets, got an empty list")


def check_kind(config: Config) -> None:
    """Require that masked policies, their engine and their environment come together."""
    model, engine = config.model, config.engine.name
    # The embedded models have one kind and one list of architectures
    masked = model.kind == "masked"
    if model.name in NANO and masked != (model.name == "nano-masked"):
        wanted = "masked" if model.name == "nano-masked" else "causal"
        raise ValueError(f"model.name={model.name} needs model.kind={wanted}, got model.kind={model.kind}")
    if model.name in NANO and masked != (model.nano_architecture in NANO_MASKED_ARCHITECTURES):
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


def check_environment(config: Config) -> None:
    name, schema = config.environment.name, type(config.environment)
    if not isinstance(config.environment, environment_class(name)):
        raise ValueError(f"environment.name={name} needs the settings of that environment: environment={name}")
    if schema is MixtureConfig:
        check_mixture(config, (check_ranges, check_choices, check_environment, check_needs))
        return
    if name == "reward_functions" and not config.rewards and config.algorithm.teacher is None:
        raise ValueError("environment=reward_functions needs rewards=[module:function], or a teacher, got rewards=[]")
    if config.rewards and config.reward_weights and len(config.reward_weights) != len(config.rewards):
        got = len(config.reward_weights)
        raise ValueError(f"reward_weights must have one weight for each of {len(config.rewards)} rewards, got {got}")
    if schema.reads_rows == "always" and config.data.path is None:
        raise ValueError(
            f"environment={name} needs data.path (a file, a folder or a hub name; any will do for covey plan), "
            "got data.path=null"
        )
    _check_prompts(config.data)
    config.environment.check(config)


def _check_prompts(data: DataConfig) -> None:
    """Check the handling of an assistant message at a conversation's end."""
    if data.answer_column is not None and data.prefill:
        raise ValueError(
            f"data.answer_column={data.answer_column} needs data.prefill=false: an answer at the end of a prompt is "
            "moved into a column or gone on from, not both"
        )
    if data.answer_column == data.prompt_column:
        raise ValueError(f"data.answer_column must be another column than data.prompt_column={data.prompt_column}")


def check_rewards(config: Config) -> None:
    """Check names and arguments of built-in rewards; custom modules are imported later."""
    if not config.rewards:
        return
    from covey.environments.reward_functions.specs import check_reward  # imports asyncio

    for entry in config.rewards:
        check_reward(entry)


def check_schedule(config: Config) -> None:
    advantage = config.algorithm.advantage
    check_group_sizes(config, least=1 if advantage in BASELINE_FREE or ":" in advantage else 2)
    budget, longest = config.micro_batch_tokens, config.sampling.max_tokens
    if budget < longest:
        raise ValueError(f"sampling.max_tokens must be <= micro_batch_tokens={budget}, got {longest}")
    _check_mini_batches(config)
    attempts, most = config.evaluation.k, config.evaluation.num_samples
    if any(k < 1 for k in attempts):
        raise ValueError(f"evaluation.k must be >= 1 each, got {format_value(attempts)}")
    if too_large := [k for k in attempts if k > most]:
        raise ValueError(f"evaluation.k must be <= evaluation.num_samples={most}, got {too_large[0]}")
    if len(config.optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in config.optimizer.betas):
        raise ValueError(f"optimizer.betas must be two numbers in [0, 1), got {config.optimizer.betas}")


def _check_mini_batches(config: Config) -> None:
    groups, rollouts, size = config.mini_batch_groups, config.mini_batch_rollouts, config.group_size
    of_step = config.groups_per_step * size
    if groups is not None and groups > config.groups_per_step:
        raise ValueError(f"mini_batch_groups must be <= groups_per_step={config.groups_per_step}, got {groups}")
    if rollouts is not None and rollouts % size:
        needed = f"a multiple of group_size={size}: a group is never split"
        raise ValueError(f"mini_batch_rollouts={rollouts} must be {needed}")
    if rollouts is not None and rollouts > of_step:
        raise ValueError(f"mini_batch_rollouts={rollouts} needs a step of as many rollouts, got {of_step}")


def check_curriculum_class(config: Config) -> None:
    """Require a built-in order, or a class that takes the options."""
    name = config.curriculum.name
    if ":" not in name:
        one_of("curriculum.name", name, (*CURRICULA, "module:Class"))
        return
    check_options(resolve(name, {}), config.curriculum.options, setting="curriculum.options")


def check_functions(config: Config) -> None:
    """Check names and options of the algorithm's functions. Imports torch."""
    from covey.algorithm.credit.advantages import ADVANTAGES
    from covey.algorithm.credit.selection import GROUP_FILTERS, SELECTION
    from covey.algorithm.credit.shaping import SHAPING
    from covey.algorithm.credit.turns import TURN_CREDIT, chosen_turn_credit
    from covey.algorithm.losses import LOSSES
    from covey.algorithm.teacher.terms import TERMS, choose_lessons

    algorithm = config.algorithm
    if algorithm.loss in LOSSES:
        for function in filter(None, (LOSSES[algorithm.loss].function, LOSSES[algorithm.loss].selector)):
            check_option_values("algorithm.loss_options", function, algorithm.loss_options)
    _check_function("advantage", algorithm.advantage, ADVANTAGES, algorithm.advantage_options)
    for name, options in algorithm.shaping.items():
        _check_function(f"shaping.{name}", name, SHAPING, options)
    if algorithm.turn_credit != "episode":
        chosen_turn_credit(algorithm.turn_credit, algorithm.turn_credit_options)
        _check_function("turn_credit", algorithm.turn_credit, TURN_CREDIT, algorithm.turn_credit_options)
    if algorithm.selection is not None:
        _check_function("selection", algorithm.selection, SELECTION, algorithm.selection_options)
    if algorithm.group_filter is not None:
        _check_function("group_filter", algorithm.group_filter, GROUP_FILTERS, algorithm.group_filter_options)
    if algorithm.teacher is not None:
        check_option_values("algorithm.teacher_options", TERMS[algorithm.teacher_term], algorithm.teacher_options)
        check_option_values("algorithm.teacher_selection", choose_lessons, algorithm.teacher_selection)
    _check_sizes(config)
    _check_objective(config)


def _check_objective(config: Config) -> None:
    """Build objective and controller, and try the functions."""
    from covey.algorithm.build import build_objective
    from covey.algorithm.controllers import kl_controller
    from covey.config.rules.trials import try_functions

    algorithm = config.algorithm
    objective = build_objective(algorithm, norm_length=config.sampling.max_tokens)
    largest = max(group_sizes(config.group_size, config.group_size_schedule))
    try_functions(algorithm, objective, largest)
    if config.streaming and (objective.needs_batch_selection or len(objective.divisors) > 1):
        raise ValueError(
            f"streaming=true needs a loss that looks at a group alone and is divided by one count, got algorithm.loss="
            f"{algorithm.loss} with {_over_the_batch(algorithm, objective.divisors)}"
        )
    if config.devices.reference > 0 and not objective.needs_reference:
        raise ValueError(
            f"devices.reference={config.devices.reference} needs an algorithm that compares with a reference, such as "
            f"algorithm.kl_coef > 0, got algorithm.kl_coef={algorithm.kl_coef:g}"
        )
    # A large step moves the coefficient by error_clip x completions / horizon
    steered = kl_controller(algorithm)
    reach = steered.error_clip * config.groups_per_step * largest
    if steered.rule == "proportional" and steered.coef_min == 0 and steered.horizon <= reach:
        raise ValueError(
            f"algorithm.kl_horizon must be > {reach:g}, a fifth of the completions of a step, or "
            f"algorithm.kl_coef_min > 0, got {algorithm.kl_horizon}: one step could drive kl_coef to 0"
        )


def _over_the_batch(algorithm: AlgorithmConfig, divisors: Collection[str]) -> str:
    """Name the setting by which the loss reads the whole batch."""
    if algorithm.correction_self_normalize:
        return "algorithm.correction_self_normalize=true"
    if algorithm.m2po_threshold is not None:
        return f"algorithm.m2po_threshold={algorithm.m2po_threshold:g}"
    if algorithm.high_entropy_fraction < 1:
        return f"algorithm.high_entropy_fraction={algorithm.high_entropy_fraction:g}"
    if len(divisors) > 1:
        return f"terms divided by {' and '.join(sorted(divisors))}"
    return "a choice among all tokens"


def _check_function(
    setting: str, name: str, table: Mapping[str, Callable[..., Any]], options: Mapping[str, Any]
) -> None:
    where = f"algorithm.{setting}" if setting.startswith("shaping.") else f"algorithm.{setting}_options"
    function = resolve(name, table)
    check_options(function, options, setting=where)
    if name in table:
        check_option_values(where, function, options)
    check_option_needs(where, name, function, options)


def _check_sizes(config: Config) -> None:
    algorithm, size = config.algorithm, min(group_sizes(config.group_size, config.group_size_schedule))
    for option in ("k", "m", "group_size"):
        kept = algorithm.selection_options.get(option)
        if kept is not None and kept > size:
            raise ValueError(f"algorithm.selection_options.{option} must be <= group_size={size}, got {kept}")
    # A baseline needs two completions, pass@k needs k, leave-one-out one more
    compared, options = _num_compared(algorithm, size), algorithm.advantage_options
    got = f"group_size={size}" if compared == size else f"{compared} that algorithm.selection keeps and compares"
    k = options.get("k")
    spare = algorithm.advantage == "passk" or options.get("variant") == "loo"
    if algorithm.advantage in ("passk", "pkpo") and k is not None and not 1 <= k <= compared - spare:
        raise ValueError(
            f"algorithm.advantage_options.k={k} needs group_size >= {k + spare} for {algorithm.advantage}, got {got}"
        )
    has_baseline = algorithm.advantage not in BASELINE_FREE and ":" not in algorithm.advantage
    is_compared = algorithm.loss != "nll" and has_baseline and options.get("singleton", "zero") == "zero"
    if is_compared and compared < min(2, size):
        raise ValueError(f"algorithm.advantage={algorithm.advantage} needs 2 completions to compare, got {got}")


def _num_compared(algorithm: AlgorithmConfig, size: int) -> int:
    """Count the completions of a group that its baseline compares."""
    from covey.algorithm.credit.selection import SELECTION

    options = algorithm.selection_options
    if algorithm.selection not in SELECTION:
        return size
    default = signature(SELECTION[algorithm.selection]).parameters["baseline_over"].default
    if options.get("baseline_over", default) != "selected":
        return size
    return min(size, *(options.get(option, size) for option in ("k", "m", "group_size")))


CURRICULA = ("none", "success", "difficulty")
RULES: tuple[Callable[[Config], None], ...] = (
    check_bounds,
    check_texts,
    check_ranges,
    check_choices,
    check_data,
    check_packages,
    check_model,
    check_kind,
    check_environment,
    check_rewards,
    check_schedule,
    check_devices,
    check_curriculum,
    check_needs,
    check_curriculum_class,
    check_parts,
    check_teacher,
)
"""Rules in this order: cheap and plain ones first. `check_functions` is the last."""


def with_steps(config: Config, num_prompts: int) -> Config:
    """Return the settings with the number of steps that their budget comes to. ValueError where others do not fit it.

    >>> with_steps(Config(num_epochs=2, groups_per_step=4), num_prompts=22).num_steps
    11
    """
    found = resolve_budget(config, num_prompts)
    if found is not config:
        try:
            validate(found)
        except ValueError as error:
            epochs, rollouts = config.num_epochs, config.total_rollouts
            told = f"num_epochs={epochs:g}" if epochs else f"total_rollouts={rollouts}"
            raise ValueError(f"{told} of {num_prompts} prompts is num_steps={found.num_steps}: {error}") from error
    return found
