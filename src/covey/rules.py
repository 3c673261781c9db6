"""The rules of a configuration: ranges, choices, what a setting needs, what a function takes.

Most are tables of dotted setting names; a setting that is null obeys every range. Each rule raises ValueError with one
line that names the settings involved.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

from covey.answer_rules import check_answers
from covey.bounds import check_bounds, check_texts
from covey.code_rules import check_code
from covey.config import Config, DataConfig, DeadlinesConfig
from covey.curriculum_config import group_sizes
from covey.environment_config import (
    ENVIRONMENT_SETTINGS,
    READS_DATA,
    CodeConfig,
    CustomConfig,
    InfillConfig,
    MachinesConfig,
    MathConfig,
    MixtureConfig,
    RewardFunctionsConfig,
)
from covey.environment_needs import check_custom
from covey.environments import ENVIRONMENTS
from covey.infill_rules import check_infill, check_kind
from covey.machine_rules import check_machines
from covey.needs import check_needs, read, shown
from covey.option_rules import check_option_needs, check_parts
from covey.stream_rules import check_curriculum, check_group_sizes, check_mixture
from covey.tables import check_options, near, one_of, resolve

BASELINE_FREE = ("none", "role_ema", "reinforce_plus_plus")
"""Advantages that mean something for a single completion."""


def check_ranges(config: Config) -> None:
    for name, low in AT_LEAST.items():
        value = read(config, name)
        if value is not None and value < low:
            raise ValueError(f"{name} must be >= {low}, got {value}")
    for name, low in ABOVE.items():
        value = read(config, name)
        if value is not None and not value > low:
            raise ValueError(f"{name} must be > {low}, got {value}")
    for name, high in AT_MOST.items():
        value = read(config, name)
        if value is not None and value > high:
            raise ValueError(f"{name} must be <= {high}, got {value}")


def check_choices(config: Config) -> None:
    for name, choices in CHOICES.items():
        values = read(config, name)
        for value in values if isinstance(values, list) else [values]:
            if value not in choices:
                known = ", ".join(choices)
                raise ValueError(f"{name} must be one of {known}, got {value or 'nothing'}{near(value, choices)}")


def check_data(config: Config) -> None:
    """Some rows are always held out, or the run would be measured on what it trains on."""
    fraction = config.data.test_fraction
    if not 0 < fraction <= 0.9:
        raise ValueError(
            f"data.test_fraction must be above 0 and at most 0.9, got {fraction:g}: a run is measured on "
            "rows that it does not train on; to train on all rows of a file, give a test split: data.path=FOLDER with "
            "train.* and test.* files"
        )


def check_extras(config: Config) -> None:
    """A package that a setting needs must be installed before hours of work, not after."""
    for (name, value), (package, extra) in EXTRAS.items():
        chosen = read(config, name)
        used = value in chosen if isinstance(chosen, list) else chosen == value
        if used and find_spec(package) is None:
            raise ValueError(f"{name}={shown(chosen)} needs {package}: pip install 'covey[{extra}]'")


def check_model(config: Config) -> None:
    model = config.model
    if not model.name.strip():
        raise ValueError("model.name is empty: a directory, a hub name, nano or nano-masked")
    if model.load_in_4bit and model.lora_rank == 0:
        raise ValueError("model.load_in_4bit=true needs model.lora_rank > 0, got model.lora_rank=0")
    if model.lora_rank > 0 and not model.lora_targets:
        raise ValueError(f"model.lora_rank={model.lora_rank} needs model.lora_targets, got an empty list")


def check_environment(config: Config) -> None:
    name, schema = config.environment.name, type(config.environment)
    if name not in ENVIRONMENTS:
        raise ValueError(f"environment.name must be one of {', '.join(ENVIRONMENTS)}, got {name or 'none'}")
    if schema in ENVIRONMENT_SETTINGS.values() and schema is not ENVIRONMENT_SETTINGS.get(name):
        raise ValueError(f"environment.name={name} needs the settings of that environment: environment={name}")
    if schema is MixtureConfig:
        check_mixture(config, (check_environment, check_deadlines, check_needs))
        return
    if config.rewards and name != "reward_functions":
        raise ValueError(f"rewards={shown(config.rewards)} needs environment=reward_functions, got environment={name}")
    if name == "reward_functions" and not config.rewards:
        raise ValueError("environment=reward_functions needs rewards=[module:function], got rewards=[]")
    if config.rewards and config.reward_weights and len(config.reward_weights) != len(config.rewards):
        raise ValueError(
            f"reward_weights must have one weight for each of {len(config.rewards)} rewards, "
            f"got {len(config.reward_weights)}"
        )
    if name in READS_DATA and config.data.path is None:
        raise ValueError(f"environment={name} needs data.path (a file, a folder or a hub name), got data.path=null")
    if name in OWN_DATA:
        _refuse_data(config, f"an environment that reads rows, got environment={name}")
    elif name in MAY_READ_DATA and config.data.path is None:
        _refuse_data(config, "data.path set, got data.path=null")
    elif name != "reward_functions":
        _refuse_data(config, f"environment=reward_functions, got environment={name}", PROMPT_SETTINGS)
    else:
        _check_prompts(config.data)
    check_answers(config)
    OWN_RULES.get(schema, lambda config: None)(config)


def _check_prompts(data: DataConfig) -> None:
    """What the assistant's message at the end of a conversation is, it is alone."""
    if data.answer_column is not None and data.prefill:
        raise ValueError(
            f"data.answer_column={data.answer_column} needs data.prefill=false: an answer at the end of a prompt is "
            "moved into a column or gone on from, not both"
        )
    if data.answer_column == data.prompt_column:
        raise ValueError(f"data.answer_column must be another column than data.prompt_column={data.prompt_column}")


def check_rewards(config: Config) -> None:
    """Names and arguments of ready-made rewards; your own modules are imported when the run begins."""
    from covey.environments.reward_specs import check_reward

    for entry in config.rewards:
        check_reward(entry)


def check_deadlines(config: Config) -> None:
    """A worker is given up before the environment is, so that what hangs is named."""
    environment = config.environment
    if isinstance(environment, MathConfig) and config.deadlines.scoring <= environment.timeout:
        raise ValueError(
            f"environment.timeout={environment.timeout:g} needs deadlines.scoring > that, "
            f"got {config.deadlines.scoring:g}"
        )
    if not isinstance(environment, RewardFunctionsConfig):
        return
    for name in ("timeout", "start_timeout", "worker_calls", "worker_bytes"):
        if not vars(environment)[name] > 0:
            raise ValueError(f"environment.{name} must be > 0, got {vars(environment)[name]}")
    longest = environment.timeout + (0 if environment.in_process else environment.start_timeout)
    if config.deadlines.scoring <= longest:
        names = "environment.timeout" + ("" if environment.in_process else " + environment.start_timeout")
        raise ValueError(f"{names}={longest:g} needs deadlines.scoring > that, got {config.deadlines.scoring:g}")


def _refuse_data(config: Config, needs: str, names: Collection[str] = tuple(vars(DataConfig()))) -> None:
    """Refuse the first of these settings of `data` that differs from its default."""
    defaults = vars(DataConfig())
    for name, value in vars(config.data).items():
        if name in names and value != defaults[name]:
            raise ValueError(f"data.{name}={shown(value)} needs {needs}")


def check_schedule(config: Config) -> None:
    """Steps, groups and staleness."""
    advantage = config.algorithm.advantage
    check_group_sizes(config, least=1 if advantage in BASELINE_FREE or ":" in advantage else 2)
    if config.source != "local":
        raise ValueError(f"source must be local, got {config.source}")
    if config.max_staleness > 0:
        how = "source=local (groups are sampled between updates)"
        raise ValueError(f"max_staleness must be 0 with {how}, got {config.max_staleness}")
    if config.micro_batch_tokens < config.sampling.max_tokens:
        raise ValueError(
            f"micro_batch_tokens={config.micro_batch_tokens} needs sampling.max_tokens <= that, "
            f"got sampling.max_tokens={config.sampling.max_tokens}"
        )
    too_large = [k for k in config.evaluation.k if k > config.evaluation.num_samples]
    if too_large:
        raise ValueError(
            f"evaluation.k={too_large[0]} needs evaluation.num_samples >= that, "
            f"got evaluation.num_samples={config.evaluation.num_samples}"
        )
    if len(config.optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in config.optimizer.betas):
        raise ValueError(f"optimizer.betas must be two numbers in [0, 1), got {config.optimizer.betas}")


def check_distribution(config: Config) -> None:
    """What cannot be sharded."""
    if config.distribution.strategy != "fsdp":
        return
    impossible = {
        "optimizer.name=adamw8bit": config.optimizer.name == "adamw8bit",
        "model.load_in_4bit=true": config.model.load_in_4bit,
        "model.precision=float16": config.model.precision == "float16",
    }
    for setting, chosen in impossible.items():
        if chosen:
            raise ValueError(f"{setting} needs distribution.strategy=ddp, got distribution.strategy=fsdp")


def check_lengths(config: Config) -> None:
    """A constant length that no aggregation divides by would be ignored."""
    algorithm = config.algorithm
    modes = [algorithm.aggregation, algorithm.kl_aggregation or ""]
    if algorithm.norm_length is not None and not any(mode.endswith("_norm") or ":" in mode for mode in modes):
        raise ValueError(
            f"algorithm.norm_length={algorithm.norm_length} needs algorithm.aggregation to end in _norm, "
            f"got algorithm.aggregation={algorithm.aggregation}"
        )


def check_reference(config: Config) -> None:
    """What a KL penalty and its reference need of each other."""
    algorithm = config.algorithm
    if algorithm.target_kl is not None and algorithm.kl_coef == 0:
        raise ValueError(
            f"algorithm.target_kl={algorithm.target_kl} needs algorithm.kl_coef > 0, got algorithm.kl_coef=0"
        )
    if algorithm.kl_in == "reward" and algorithm.kl_estimator == "full":
        raise ValueError("algorithm.kl_in=reward needs a sampled algorithm.kl_estimator such as k1, got full")
    if algorithm.reference_refresh_every is None:
        return
    every = f"algorithm.reference_refresh_every={algorithm.reference_refresh_every}"
    if algorithm.kl_coef == 0 and algorithm.ratio_denominator != "reference":
        raise ValueError(f"{every} needs algorithm.kl_coef > 0, got algorithm.kl_coef=0")
    if config.model.lora_rank > 0 and algorithm.reference_refresh_alpha != 1:
        raise ValueError(
            f"algorithm.reference_refresh_alpha={algorithm.reference_refresh_alpha} needs model.lora_rank=0 "
            f"(adapters can only be copied), got model.lora_rank={config.model.lora_rank}"
        )


def check_curriculum_class(config: Config) -> None:
    """A built-in order, or a class of a module that takes the options."""
    name = config.curriculum.name
    if ":" not in name:
        one_of("curriculum.name", name, (*CURRICULA, "module:Class"))
        return
    check_options(resolve(name, {}), config.curriculum.options, setting="curriculum.options")


def check_functions(config: Config) -> None:
    """Names and options of the functions an algorithm is made of. Imports torch, so it comes last."""
    from covey.advantages import ADVANTAGES
    from covey.kl import KLController
    from covey.losses import LOSSES
    from covey.objective import build_objective
    from covey.selection import GROUP_FILTERS, SELECTION
    from covey.shaping import SHAPING

    algorithm = config.algorithm
    _check_name("loss", algorithm.loss, LOSSES)
    _check_function("advantage", algorithm.advantage, ADVANTAGES, algorithm.advantage_options)
    for name, options in algorithm.shaping.items():
        _check_function(f"shaping.{name}", name, SHAPING, options)
    if algorithm.selection is not None:
        _check_function("selection", algorithm.selection, SELECTION, algorithm.selection_options)
    if algorithm.group_filter is not None:
        _check_function("group_filter", algorithm.group_filter, GROUP_FILTERS, algorithm.group_filter_options)
    _check_sizes(config)
    build_objective(algorithm, norm_length=config.sampling.max_tokens)
    if algorithm.target_kl is not None:
        KLController(
            coef=algorithm.kl_coef,
            rule=algorithm.kl_controller,
            target=algorithm.target_kl,
            horizon=algorithm.kl_horizon,
            coef_min=algorithm.kl_coef_min,
            coef_max=algorithm.kl_coef_max,
        )


def _check_name(setting: str, name: str, table: Collection[str]) -> None:
    if name not in table and ":" not in name:
        known = f"{', '.join(table)} or module:function"
        raise ValueError(f"algorithm.{setting} must be one of {known}, got {name}{near(name, table)}")


def _check_function(
    setting: str, name: str, table: Mapping[str, Callable[..., Any]], options: Mapping[str, Any]
) -> None:
    _check_name(setting, name, table)
    where = f"algorithm.{setting}" if setting.startswith("shaping.") else f"algorithm.{setting}_options"
    function = resolve(name, table)
    check_options(function, options, setting=where)
    check_option_needs(where, name, function, options)


def _check_sizes(config: Config) -> None:
    """Parts of a group must be smaller than the group."""
    algorithm, size = config.algorithm, min(group_sizes(config.group_size, config.group_size_schedule))
    k = algorithm.advantage_options.get("k")
    spare = algorithm.advantage == "passk" or algorithm.advantage_options.get("variant") == "loo"
    if algorithm.advantage in ("passk", "pkpo") and k is not None and not 1 <= k <= size - spare:
        raise ValueError(
            f"algorithm.advantage_options.k={k} needs group_size >= {k + spare} for {algorithm.advantage}, "
            f"got group_size={size}"
        )
    for option in ("k", "m", "group_size"):
        kept = algorithm.selection_options.get(option)
        if kept is not None and kept > size:
            raise ValueError(f"algorithm.selection_options.{option}={kept} needs group_size >= that, got {size}")


CURRICULA = ("none", "success", "difficulty")
OWN_RULES: Mapping[Any, Callable[[Config], None]] = {
    **{CodeConfig: check_code, MachinesConfig: check_machines, InfillConfig: check_infill, CustomConfig: check_custom}
}
OWN_DATA = ("arithmetic", "machines", "custom")
"""Environments that make their own problems; others may read `data`."""
PROMPT_SETTINGS = ("prompt_column", "answer_column", "prefill")
"""Settings of `data` about prompts that rows hold as they are."""
MAY_READ_DATA = ("countdown", "code", "ifeval", "infill")
"""Environments that make their own problems where data.path is null."""

AT_LEAST: dict[str, float] = {
    "num_steps": 1,
    "curriculum.promotion_groups": 1,
    "groups_per_step": 1,
    "group_size": 1,
    "updates_per_batch": 1,
    "micro_batch_tokens": 1,
    "logprob_chunk": 0,
    "max_staleness": 0,
    "model.lora_rank": 0,
    "model.lora_dropout": 0,
    "data.max_rows": 1,
    "engine.max_rows": 1,
    "sampling.top_k": 0,
    "sampling.min_p": 0,
    "sampling.max_tokens": 1,
    "sampling.num_passes": 1,
    "algorithm.group_filter_rounds": 0,
    "algorithm.norm_length": 1,
    "algorithm.kl_coef": 0,
    "algorithm.sampler_kl_coef": 0,
    "algorithm.reference_refresh_every": 1,
    "optimizer.weight_decay": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.min_lr_ratio": 0,
    "optimizer.max_grad_norm": 0,
    "optimizer.max_nonfinite_steps": 1,
    "cold_start.num_steps": 1,
    "cold_start.check_every": 1,
    "cold_start.num_check_prompts": 1,
    "cold_start.batch_size": 1,
    "cold_start.warmup_steps": 0,
    "cold_start.target_accuracy": 0,
    "evaluation.every": 0,
    "evaluation.num_prompts": 1,
    "evaluation.num_samples": 1,
    "output.save_every": 0,
    "preflight.num_prompts": 1,
    "preflight.max_tokens": 1,
    "output.keep_last": 1,
    "output.rollouts_per_step": 0,
    "output.answers_per_evaluation": 0,
    "output.show_rollouts": 0,
    "output.max_rollout_rows": 0,
}
ABOVE: dict[str, float] = {
    "engine.cache_bytes": 0,
    "sampling.temperature": 0,
    "sampling.top_p": 0,
    "algorithm.advantage_clip": 0,
    "algorithm.kl_clamp": 0,
    "algorithm.max_kl": 0,
    "algorithm.max_mismatch": 0,
    "algorithm.reference_refresh_alpha": 0,
    "optimizer.lr": 0,
    "optimizer.eps": 0,
    "cold_start.lr": 0,
    "evaluation.confidence": 0,
    "output.grace_seconds": 0,
    **{f"deadlines.{field.name}": 0 for field in fields(DeadlinesConfig)},
    "preflight.logprob_tolerance": 0,
    "preflight.gradient_tolerance": 0,
}
AT_MOST: dict[str, float] = {
    "evaluation.num_samples": 100_000,
    "model.lora_dropout": 0.99,
    "sampling.top_p": 1,
    "sampling.min_p": 0.99,
    "algorithm.reference_refresh_alpha": 1,
    "optimizer.min_lr_ratio": 1,
    "cold_start.target_accuracy": 1,
    "evaluation.confidence": 0.9999,
}
CHOICES: dict[str, tuple[str, ...]] = {
    "packing": ("shared", "packed", "padded"),
    "curriculum.per": ("prompt", "difficulty"),
    "model.precision": ("float32", "bfloat16", "float16", "float64"),
    "model.attention": ("auto", "blocks", "compiled", "flex"),
    "model.linear": ("auto", "onednn", "torch"),
    "model.kernels": ("auto", "compiled", "torch"),
    "model.kind": ("causal", "masked"),
    "model.nano_architecture": ("qwen2", "qwen3", "llama", "mistral", "modernbert", "bert", "roberta"),
    "data.bad_rows": ("error", "skip"),
    "engine.name": ("native", "fill", "fake"),
    "engine.kernels": ("auto", "compiled", "torch"),
    "sampling.likelihood": ("trajectory", "one_step"),
    "algorithm.correction": ("none", "truncate", "mask"),
    "optimizer.name": ("adamw", "adamw8bit", "sgd"),
    "distribution.strategy": ("ddp", "fsdp"),
    "optimizer.schedule": ("constant", "linear", "cosine"),
    "output.trackers": ("tensorboard", "wandb"),
    "output.on_write_error": ("stop", "continue"),
}
EXTRAS: dict[tuple[str, Any], tuple[str, str]] = {
    ("optimizer.name", "adamw8bit"): ("bitsandbytes", "quantization"),
    ("model.load_in_4bit", True): ("bitsandbytes", "quantization"),
    ("output.trackers", "tensorboard"): ("tensorboard", "tensorboard"),
    ("output.trackers", "wandb"): ("wandb", "wandb"),
}
"""(setting, value) -> (package, extra of covey that installs it)."""


RULES: tuple[Callable[[Config], None], ...] = (
    check_bounds,
    check_texts,
    check_ranges,
    check_choices,
    check_data,
    check_extras,
    check_model,
    check_kind,
    check_environment,
    check_rewards,
    check_deadlines,
    check_schedule,
    check_curriculum,
    check_distribution,
    check_lengths,
    check_reference,
    check_needs,
    check_curriculum_class,
    check_parts,
)
"""In this order: what is cheap and plain first. `check_functions` is the last."""
