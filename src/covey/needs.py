"""Settings that only mean something beside another one: nothing that is set is ignored."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from covey.config import AlgorithmConfig, ColdStartConfig, Config, ModelConfig, OptimizerConfig, PreflightConfig
from covey.curriculum_config import CurriculumConfig
from covey.environment_config import MachinesConfig
from covey.environment_needs import ENVIRONMENT_NEEDS
from covey.need import Needs, is_set, names_of
from covey.tables import names_function


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


def check_needs(config: Config) -> None:
    """Refuse a setting that differs from its default while nothing would read it."""
    defaults = Config(environment=type(config.environment)())
    for rule in (*NEEDS, *ENVIRONMENT_NEEDS.get(config.environment.name, ())):
        partners = {name: read(config, name) for name in rule.partners}
        if rule.holds(*partners.values()):
            continue
        got = ", ".join(f"{name}={shown(value)}" for name, value in partners.items())
        for name in rule.settings:
            value = read(config, name)
            if value != read(defaults, name):
                remedy = f"; {rule.remedy}" if rule.remedy else ""
                raise ValueError(f"{name}={shown(value)} needs {rule.condition}, got {got}{remedy}")


def check_typed(verb: str, config: Config, typed: Iterable[str], num_processes: int) -> list[str]:
    """Which of the settings named on the command line the verb does not read.

    ValueError for one of a cold start that is off: a recipe may hold some, but who types one means it.
    """
    names = [word.lstrip("+").partition("=")[0] for word in typed]
    idle = [name for name in names if name in COLD_START_SETTINGS]
    if verb not in ("evaluate", "cold-start", "judge") and idle and not config.cold_start.enabled:
        value = shown(read(config, idle[0]))
        raise ValueError(f"{idle[0]}={value} needs cold_start.enabled=true, got cold_start.enabled=false")
    unread = (*UNREAD.get(verb, ()), *(RANK_SETTINGS if num_processes == 1 else ()))
    return [name for name in names if any(name == other or name.startswith(f"{other}.") for other in unread)]


def _positive(value: float) -> bool:
    return value > 0


def _has_kl_in_loss(kl_coef: float, kl_in: str, sampler_kl_coef: float) -> bool:
    return (kl_coef > 0 and kl_in == "loss") or sampler_kl_coef > 0


def _exponentiates(kl_coef: float, estimator: str, gradient: str, sampler_kl_coef: float, sampler: str) -> bool:
    own = kl_coef > 0 and (estimator not in WITHOUT_CLAMP or gradient == "is_weighted")
    return own or (sampler_kl_coef > 0 and sampler == "k3")


def _reads_advantages(loss: str, off_policy_mask_delta: float | None) -> bool:
    return loss != "nll" or off_policy_mask_delta is not None


def _is_on_hub(name: str) -> bool:
    return name not in NANO and not Path(name).is_dir()


def _has_own_weights(name: str, cold_start: bool) -> bool:
    return name not in NANO or cold_start


def _samples(engine: str, cold_start: bool) -> bool:
    return engine != "fake" or cold_start


def _has_named_splits(path: str | None) -> bool:
    return path is None or not (Path(path).expanduser().is_file() or names_function(path))


NANO = ("nano", "nano-masked")
"""The embedded policies."""
WITHOUT_RATIO = ("reinforce", "reinforce_ratio", "nll")
"""Losses that compare the policy with no other."""
WITHOUT_EXPONENTIAL = (*WITHOUT_RATIO, "dro")
"""Losses that never form exp(log ratio)."""
WITHOUT_CLAMP = ("k1", "k2", "abs", "k1_forward", "full")
"""KL estimators without an exponential of the log ratio."""

KL_SETTINGS = tuple(f"algorithm.kl_{name}" for name in ("estimator", "gradient", "in"))
STEERING_SETTINGS = tuple(f"algorithm.kl_{name}" for name in ("controller", "horizon", "coef_min", "coef_max"))
CORRECTION_SETTINGS = names_of(AlgorithmConfig, "algorithm", "correction_")
ADVANTAGE_SETTINGS = (*names_of(AlgorithmConfig, "algorithm", "advantage"), "algorithm.length_normalizer")
REWARD_SETTINGS = ("algorithm.shaping", "algorithm.kl_in")
LORA_SETTINGS = names_of(ModelConfig, "model", "lora_alpha", "lora_dropout", "lora_targets")
PREFLIGHT_SETTINGS = tuple(name for name in names_of(PreflightConfig, "preflight", "") if name[10:] != "enabled")
COLD_START_SETTINGS = (
    *(name for name in names_of(ColdStartConfig, "cold_start", "") if name[11:] != "enabled"),
    "deadlines.cold_start",
    *names_of(MachinesConfig, "environment", "num_demonstrations", "family_share", "demonstration_cap"),
)

NEEDS: tuple[Needs, ...] = (
    Needs(KL_SETTINGS, "algorithm.kl_coef > 0", ("algorithm.kl_coef",), _positive),
    Needs(("algorithm.kl_gradient",), "algorithm.kl_in = loss", ("algorithm.kl_in",), lambda kl: kl == "loss"),
    Needs(
        ("algorithm.kl_gradient",),
        "a sampled algorithm.kl_estimator such as k3",
        ("algorithm.kl_estimator",),
        lambda estimator: estimator != "full",
    ),
    Needs(
        ("algorithm.kl_aggregation",),
        "a KL penalty in the loss",
        ("algorithm.kl_coef", "algorithm.kl_in", "algorithm.sampler_kl_coef"),
        _has_kl_in_loss,
    ),
    Needs(
        ("algorithm.kl_clamp",),
        "a KL penalty with an exponential (k3 or is_weighted)",
        (
            *("algorithm.kl_coef", "algorithm.kl_estimator", "algorithm.kl_gradient"),
            *("algorithm.sampler_kl_coef", "algorithm.sampler_kl_estimator"),
        ),
        _exponentiates,
    ),
    Needs(("algorithm.max_kl",), "algorithm.kl_coef > 0", ("algorithm.kl_coef",), _positive),
    Needs(STEERING_SETTINGS, "algorithm.target_kl set", ("algorithm.target_kl",), is_set),
    Needs(
        ("algorithm.kl_horizon",),
        "algorithm.kl_controller = proportional",
        ("algorithm.kl_controller",),
        lambda rule: rule == "proportional",
    ),
    Needs(
        ("algorithm.sampler_kl_estimator",), "algorithm.sampler_kl_coef > 0", ("algorithm.sampler_kl_coef",), _positive
    ),
    Needs(
        ("algorithm.reference_refresh_alpha",),
        "algorithm.reference_refresh_every set",
        ("algorithm.reference_refresh_every",),
        is_set,
    ),
    Needs(
        ("algorithm.ratio_denominator",),
        "a loss with an importance ratio",
        ("algorithm.loss",),
        lambda loss: loss not in WITHOUT_RATIO,
    ),
    Needs(
        ("algorithm.log_ratio_clamp",),
        "a loss with an importance ratio, or a correction",
        ("algorithm.loss", "algorithm.correction"),
        lambda loss, correction: loss not in WITHOUT_EXPONENTIAL or correction != "none",
    ),
    Needs(
        ADVANTAGE_SETTINGS,
        "a loss that reads advantages",
        ("algorithm.loss", "algorithm.off_policy_mask_delta"),
        _reads_advantages,
    ),
    Needs(
        REWARD_SETTINGS,
        "a loss that reads advantages, or a selection",
        ("algorithm.loss", "algorithm.off_policy_mask_delta", "algorithm.selection"),
        lambda loss, delta, selection: _reads_advantages(loss, delta) or selection is not None,
    ),
    Needs(
        ("algorithm.count_empty",),
        "an aggregation that is a mean over sequences",
        ("algorithm.aggregation", "algorithm.kl_aggregation"),
        lambda *modes: any((mode or "").startswith("seq_mean") or ":" in (mode or "") for mode in modes),
    ),
    Needs(
        CORRECTION_SETTINGS,
        "algorithm.correction = truncate or mask",
        ("algorithm.correction",),
        lambda mode: mode != "none",
    ),
    Needs(("algorithm.rejection_thresholds",), "algorithm.rejection set", ("algorithm.rejection",), is_set),
    Needs(("algorithm.selection_options",), "algorithm.selection set", ("algorithm.selection",), is_set),
    Needs(
        names_of(AlgorithmConfig, "algorithm", "group_filter_"),
        "algorithm.group_filter set",
        ("algorithm.group_filter",),
        is_set,
    ),
    Needs(("model.attention",), "packing = shared or packed", ("packing",), lambda packing: packing != "padded"),
    Needs(LORA_SETTINGS, "model.lora_rank > 0", ("model.lora_rank",), _positive),
    Needs(names_of(ModelConfig, "model", "nano_"), "model.name = nano", ("model.name",), lambda name: name in NANO),
    Needs(("model.revision",), "model.name = a hub name", ("model.name",), _is_on_hub),
    Needs(
        ("model.load_in_4bit",),
        "saved weights, or a cold start that saves some",
        ("model.name", "cold_start.enabled"),
        _has_own_weights,
    ),
    Needs(
        ("engine.cache_bytes", "engine.max_rows", "engine.kernels", "sampling.stop"),
        "an engine that samples",
        ("engine.name", "cold_start.enabled"),
        _samples,
    ),
    Needs(
        ("model.attention", "model.kernels", "engine.cache_bytes", "engine.kernels"),
        "model.kind = causal",
        ("model.kind",),
        lambda kind: kind == "causal",
    ),
    Needs(
        ("sampling.stop", "algorithm.mask_truncated"),
        "a policy that continues its prompts, model.kind = causal",
        ("model.kind",),
        lambda kind: kind == "causal",
    ),
    Needs(
        ("sampling.num_passes",),
        "a policy that fills in, model.kind = masked",
        ("model.kind",),
        lambda kind: kind == "masked",
    ),
    Needs(("sampling.likelihood",), "sampling.num_passes > 1", ("sampling.num_passes",), lambda passes: passes > 1),
    Needs(("data.shuffle_rows",), "data.max_rows set", ("data.max_rows",), is_set),
    Needs(
        ("data.subset", "data.train_split", "data.test_split"),
        "data.path = a folder or a hub name",
        ("data.path",),
        _has_named_splits,
    ),
    Needs(
        ("optimizer.min_lr_ratio",),
        "optimizer.schedule = linear or cosine",
        ("optimizer.schedule",),
        lambda name: name != "constant",
    ),
    Needs(
        ("optimizer.schedule",),
        "optimizer.warmup_steps < num_steps",
        ("optimizer.warmup_steps", "num_steps"),
        lambda warmup_steps, num_steps: warmup_steps < num_steps,
        remedy="a run this short takes optimizer.warmup_steps=0",
    ),
    Needs(
        ("optimizer.betas", "optimizer.eps"),
        "optimizer.name = adamw or adamw8bit",
        ("optimizer.name",),
        lambda name: name != "sgd",
    ),
    Needs(
        ("output.wandb_project",), "output.trackers with wandb", ("output.trackers",), lambda names: "wandb" in names
    ),
    Needs(("deadlines.tracker",), "output.trackers set", ("output.trackers",), bool),
    Needs(
        ("output.max_rollout_rows",),
        "output.rollouts_per_step > 0 or output.answers_per_evaluation > 0",
        ("output.rollouts_per_step", "output.answers_per_evaluation"),
        lambda rollouts, answers: rollouts > 0 or answers > 0,
    ),
    Needs(("reward_weights",), "rewards set", ("rewards",), bool),
    Needs(("resume_changes",), "resume set", ("resume",), is_set),
    Needs(("curriculum.options",), "curriculum.name = module:Class", ("curriculum.name",), lambda name: ":" in name),
    Needs(
        names_of(CurriculumConfig, "curriculum", "window", "per", "decay", "explore"),
        "curriculum.name = success",
        ("curriculum.name",),
        lambda name: name == "success",
    ),
    Needs(
        names_of(CurriculumConfig, "curriculum", "promot", "demote", "earlier"),
        "curriculum.name = difficulty",
        ("curriculum.name",),
        lambda name: name == "difficulty",
    ),
    Needs(PREFLIGHT_SETTINGS, "preflight.enabled = true", ("preflight.enabled",), bool),
)
"""Who reads a setting. One that nothing would read is refused, never ignored."""

RANK_SETTINGS = ("distribution", "deadlines.ranks")
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
        *("deadlines.cold_start", "deadlines.update"),
    ),
    "cold-start": (
        *(*TRAINING_SETTINGS, *ANSWER_SETTINGS),
        *("packing", "cold_start.enabled", "engine.name", *LORA_SETTINGS, "model.lora_rank", "model.load_in_4bit"),
        *("sampling.temperature", "sampling.top_k", "sampling.top_p", "sampling.min_p"),
        *("evaluation.num_prompts", "evaluation.num_samples", "evaluation.k", "evaluation.confidence"),
        *("deadlines.sampling", "deadlines.scoring", "deadlines.update", "preflight"),
    ),
}
"""Settings and sections that a verb besides train does not read; the same words may serve several verbs."""
