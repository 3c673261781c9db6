"""The settings: dataclasses are the schema, YAML under conf/ chooses, `validate` checks.

Unknown keys fail. No key appears twice, no default depends on another field; derived numbers are computed and printed.
Components take plain parameters, not these objects (`train` and the builders in `build.py` are the exceptions).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from covey.algorithm.settings import AlgorithmConfig
from covey.cluster.settings import SAMPLED_APART, DevicesConfig
from covey.config import names
from covey.config.shelves import CONF, presets
from covey.engine.settings import EngineConfig, SamplingConfig
from covey.environments.data.settings import OF_REWARD_FUNCTIONS, DataConfig
from covey.environments.registry import environment_classes, environment_names
from covey.environments.settings import ArithmeticConfig
from covey.policy.settings import NANO, SAVED, WITH_LORA, ModelConfig
from covey.rollouts.settings import CurriculumConfig, GroupSizeStep
from covey.system import section
from covey.system.disk import cache_folder
from covey.system.section import Section, types_of
from covey.system.setting import Requires, choices_of, is_set, setting
from covey.trainer.settings import PER_GROUP, OptimizerConfig

AFTERWARDS = ("D18", "D20", "D31", "D32")
"""Findings that need the files of a run, or its end."""
IDS = tuple(f"D{number}" for number in range(1, 39))
STOPPERS = ("sick", *(name for name in IDS if name not in AFTERWARDS))
DOCTOR_ON = Requires("doctor.enabled = true", ("doctor.enabled",), bool)


@dataclass
class DoctorConfig(Section):
    """Diagnoses of `covey doctor` while the run trains."""

    enabled: bool = True
    """Look at the numbers while the run trains, and warn once of each finding."""
    stop_on: list[str] = setting([], choices=STOPPERS, needs=DOCTOR_ON)
    """Findings that end the run, by their number, such as D4; "sick" stands for any of that level."""


TRACED = Requires("output.traces = true", ("output.traces",), bool)
ENABLED = Requires("preflight.enabled = true", ("preflight.enabled",), bool)


@dataclass
class ParallelConfig(Section):
    """Training on several processes, which torchrun or accelerate launch starts."""

    strategy: str = setting("ddp", choices=("ddp", "fsdp"))
    """ddp (every rank holds all weights) or fsdp (FSDP2: weights, gradients and optimiser state are sharded)."""


@dataclass
class ColdStartConfig(Section):
    """Supervised warm-up on demonstrations before GRPO."""

    enabled: bool = False
    """Warm the policy up before GRPO (environments that demonstrate)."""
    num_steps: int = setting(200, ge=1)
    """Most optimiser steps."""
    target_accuracy: float | None = setting(None, ge=0, le=1)
    """Stop as soon as greedy accuracy on held-out prompts reaches this; null runs all steps."""
    check_every: int = setting(10, ge=1)
    """Steps between two looks at the accuracy."""
    num_check_prompts: int = setting(256, ge=1)
    """Demonstrated prompts that are held back to look at, half of them where there are no more than these."""
    batch_size: int = setting(128, ge=1)
    """Demonstrations a step."""
    all_weights: bool = setting(False, needs=(WITH_LORA, SAVED))
    """Train all weights, unquantised, where the run trains adapters; else the adapters themselves are warmed up, and
    the run continues with them. An embedded policy, whose weights are random, is always trained whole."""
    lr: float = setting(1e-3, gt=0)
    """Learning rate, constant after a short rise."""
    warmup_steps: int = setting(10, ge=0)
    """Steps over which the rate rises linearly from 0."""
    cache_dir: str = field(default_factory=cache_folder)
    """Content-addressed cache of cold-start policies; a second run takes it from there."""


@dataclass
class EvaluationConfig(Section):
    """Measuring on the held-out split: before, during and after."""

    every: int = setting(0, ge=0)
    """Steps between evaluations during the run; 0 evaluates only before and after."""
    num_prompts: int = setting(128, ge=1)
    """Held-out prompts, the same every time."""
    num_samples: int = setting(4, ge=1, le=100_000)
    """Completions per prompt for pass@k and the mean reward."""
    k: list[int] = field(default_factory=lambda: [1, 4])
    """The k of pass@k; each must be <= num_samples."""
    correct_above: float = 1.0
    """A completion with a reward of at least this counts as correct."""
    confidence: float = setting(0.95, gt=0, le=0.9999)
    """Level of the confidence intervals."""


@dataclass
class OutputConfig(Section):
    """Files of a run besides its config, summary and log."""

    save_every: int = setting(100, ge=0)
    """Most steps between checkpoints, at most half an hour apart; 0 saves only when the run ends or is stopped."""
    keep_last: int = setting(3, ge=1)
    """Number of latest checkpoints to keep."""
    keep_best: bool = True
    """Keep also the checkpoint of the best evaluation."""
    journal: bool = True
    """Write answers and verdicts to journal/ as they come: a resumed run does not sample them again."""
    rollouts_per_step: int = setting(8, ge=0)
    """Rollouts written to rollouts.jsonl each step."""
    answers_per_evaluation: int = setting(256, ge=0)
    """Answers written to evaluations.jsonl at each evaluation, greedy ones first."""
    show_rollouts: int = setting(0, ge=0)
    """Rollouts of each step shown in the terminal, from the highest reward to the lowest."""
    max_rollout_rows: int = setting(
        20000,
        ge=0,
        needs=Requires(
            "output.rollouts_per_step > 0 or output.answers_per_evaluation > 0",
            ("output.rollouts_per_step", "output.answers_per_evaluation"),
            lambda rollouts, answers: rollouts > 0 or answers > 0,
        ),
    )
    """Most rows of rollouts.jsonl, and of evaluations.jsonl."""
    traces: bool = True
    """Write whole groups with the numbers of every token to traces.jsonl, histograms of each step to updates.jsonl."""
    trace_every: int | None = setting(None, ge=1, needs=TRACED)
    """Steps between two of which groups are traced, besides the first and the last; null traces about 20 in all."""
    traced_groups: int = setting(4, ge=1, needs=TRACED)
    """Groups traced of such a step."""
    max_trace_bytes: int = setting(20_000_000, ge=1, needs=TRACED)
    """Most bytes of traces.jsonl, and of updates.jsonl."""
    report: bool = True
    """Write report.html at the end of `covey train`, for a browser."""
    trackers: list[str] = setting(
        [],
        choices=("tensorboard", "wandb"),
        packages={"tensorboard": ("tensorboard", "tensorboard"), "wandb": ("wandb", "wandb")},
    )
    """Trackers besides metrics.jsonl: tensorboard, wandb."""
    wandb_project: str = setting(
        "covey", needs=Requires("output.trackers with wandb", ("output.trackers",), lambda names: "wandb" in names)
    )
    """W&B project; WANDB_MODE=offline keeps it local."""
    callbacks: list[str] = field(default_factory=list)
    """Callbacks notified of the run's progress: of installed packages, by name, or module:function."""
    progress: bool = True
    """Show progress in the terminal."""
    on_write_error: str = setting("stop", choices=("stop", "continue"))
    """Response to a full or vanished disk: stop (to be resumed) or continue (rows and saves are tried again later)."""
    shutdown_timeout: float = setting(120.0, gt=0)
    """Longest time from Ctrl-C, SIGTERM or SIGHUP to the exit; a save that takes longer is given up."""


@dataclass
class PreflightConfig(Section):
    """Measurements on your model before a new run's first step, and by `covey check`."""

    enabled: bool = True
    """Measure, and refuse a run that is outside the tolerances."""
    num_prompts: int = setting(8, ge=1, needs=ENABLED)
    """Prompts looked at, the first of the run."""
    max_tokens: int = setting(64, ge=1, needs=ENABLED)
    """Longest completion looked at, in tokens, where sampling.max_tokens is not shorter."""
    logprob_tolerance: float | None = setting(None, gt=0, needs=ENABLED)
    """Most nats by which engine and trainer may differ on a token; null goes by the precision (1e-4 in float32)."""
    gradient_tolerance: float | None = setting(None, gt=0, needs=ENABLED)
    """Most relative error of a gradient between layouts; null goes by the precision (1e-5 in float32)."""


@dataclass
class TimeoutsConfig(Section):
    """Seconds without progress after which a run ends, naming the pending wait."""

    loading: float = setting(3600.0, gt=0)
    """Seconds for the data, the model or a checkpoint to be read."""
    cold_start: float = setting(3600.0, gt=0)
    """Seconds between two measurements of a cold start's accuracy."""
    sampling: float = setting(900.0, gt=0)
    """Seconds for the engine's next tokens."""
    scoring: float = setting(900.0, gt=0)
    """Seconds for the environment's next judgement."""
    update: float = setting(1800.0, gt=0)
    """Seconds for the next micro-batch or phase of an optimiser step."""
    saving: float = setting(1800.0, gt=0)
    """Seconds for a checkpoint or the logs to be written."""
    ranks: float = setting(1800.0, gt=0)
    """Seconds for the other ranks, where several processes train together."""
    samplers: float = setting(120.0, gt=0, needs=SAMPLED_APART)
    """Seconds for a sampler's sign of life, and for it to take new weights; it is then replaced."""
    tracker: float = setting(60.0, gt=0, needs=Requires("output.trackers set", ("output.trackers",), bool))
    """Seconds for TensorBoard or W&B; the run then continues without it."""


@dataclass
class Config(Section):
    """One run."""

    seed: int = 0
    """Everything random follows from it."""
    num_steps: int = setting(100, ge=1)
    """Optimiser phases: batches of groups taken. Follows from total_rollouts or num_epochs where one of them is set."""
    total_rollouts: int | None = setting(None, ge=1)
    """Completions to train on in all; the last step is whole."""
    num_epochs: float | None = setting(
        None,
        gt=0,
        needs=(
            Requires("total_rollouts = null", ("total_rollouts",), lambda total: total is None),
            Requires("curriculum.name = none", ("curriculum.name",), lambda name: name == "none"),
        ),
    )
    """Passes over the training prompts that fit the model; the last step is whole. A curriculum makes no passes."""
    groups_per_step: int = setting(32, ge=1)
    """Prompts of one step."""
    group_size: int = setting(8, ge=1)
    """Completions of one prompt (G)."""
    group_size_schedule: list[GroupSizeStep] = field(default_factory=list)
    """Other group sizes later on: [{step: 100, group_size: 4}] takes 4 once 100 steps are finished."""
    updates_per_batch: int = setting(1, ge=1)
    """Passes over each batch; with several updates the ratio is against the log-probs before the first."""
    mini_batch_groups: int | None = setting(None, ge=1)
    """Groups of all ranks to an optimiser step, shuffled; null takes the whole batch at once."""
    mini_batch_rollouts: int | None = setting(
        None,
        ge=1,
        needs=(
            Requires("mini_batch_groups = null", ("mini_batch_groups",), lambda groups: groups is None),
            Requires(
                "group_size_schedule = []",
                ("group_size_schedule",),
                lambda schedule: not schedule,
                remedy="mini_batch_groups counts prompts, and goes with a schedule",
            ),
        ),
    )
    """The same in rollouts, a multiple of group_size: a group is never split."""
    streaming: bool = setting(False, needs=PER_GROUP)
    """Train on groups as they are complete, while the slowest of the step are still sampled or scored. The same update,
    but for the order in which floats are added."""
    micro_batch_tokens: int = setting(16384, ge=1)
    """Most packed tokens of one forward/backward pass. Changes memory and speed, never the update."""
    packing: str = setting("shared", choices=("shared", "packed", "padded"))
    """Layout of rollouts: shared (a prompt once for its whole group), packed, or padded."""
    logprob_chunk: int = setting(4096, ge=0)
    """Loss tokens whose logits are held at once, fewer of a vocabulary beyond 32,768; 0 holds all."""
    max_staleness: int = setting(0, ge=0)
    """Most versions between the oldest token of a group and its training; 0 is synchronous, more needs source=ray."""
    source: str = setting("local", choices=("local", "ray"), packages={"ray": ("ray", "ray")})
    """Source of groups: local (this process, between updates) or ray (samplers of their own, meanwhile)."""
    publish_every: int = setting(1, ge=1, needs=SAMPLED_APART)
    """Steps from one version that samplers get to the next; staleness counts these versions."""
    shuffle: bool = True
    """Take prompts in an order drawn from the seed, a new one each pass."""
    resume: str | None = None
    """Run to resume: its folder, or "latest". Its settings are taken from there."""
    resume_changes: list[str] = setting([], needs=Requires("resume set", ("resume",), is_set))
    """Settings that may differ from those of the resumed run, by name; it is then no longer bit for bit the same."""
    trust_run: bool = False
    """Import code named by a run or a file of settings that you did not make here, and follow its links."""
    rewards: list[Any] = setting([], needs=OF_REWARD_FUNCTIONS)
    """Reward functions (environment=reward_functions): ready-made names, module:function, or {function, args}."""
    reward_weights: list[float] = setting([], needs=Requires("rewards set", ("rewards",), bool))
    """One weight for each reward function; empty weighs all 1."""
    model: ModelConfig = field(default_factory=ModelConfig)
    environment: Any = field(default_factory=ArithmeticConfig)
    """One of the environments' own settings."""
    data: DataConfig = field(default_factory=DataConfig)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    devices: DevicesConfig = field(default_factory=DevicesConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cold_start: ColdStartConfig = field(default_factory=ColdStartConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    doctor: DoctorConfig = field(default_factory=DoctorConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)

    @property
    def warmed_model(self) -> ModelConfig:
        """Return the model that the cold start trains."""
        if self.model.lora_rank > 0 and self.model.name not in NANO and not self.cold_start.all_weights:
            return self.model
        return replace(self.model, lora_rank=0, load_in_4bit=False, load_in_8bit=False)

    @property
    def num_mini_batches(self) -> int:
        groups = self.mini_batch_groups or (self.mini_batch_rollouts or 0) // max(1, self.group_size)
        return -(-self.groups_per_step // groups) if groups else 1


GROUPS: dict[str, list[str]] = {
    "engine": choices_of(EngineConfig, "name"),
    "optimizer": choices_of(OptimizerConfig, "name"),
}
"""Groups whose choices stand in the schema; those of others are files under conf/, and environments."""


def group_choices() -> dict[str, list[str]]:
    """Return the groups (recipe=NAME) with their choices as typed."""
    files = {folder.name: list(presets(folder.name)) for folder in CONF.iterdir() if folder.is_dir()}
    return dict(sorted((files | GROUPS | {"environment": environment_names()}).items()))


def setting_types(section: type = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting's dotted name and type, a section before its own."""
    for own, kind in types_of(section).items():
        name = f"{prefix}{own}"
        yield name, kind
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from setting_types(kind, f"{name}.")
        elif name == "environment":
            for environment in environment_classes().values():
                yield from setting_types(environment, "environment.")


def setting_names() -> list[str]:
    """Return every setting's dotted name, those of all environments included."""
    return [name for name, _ in setting_types()]


def unknown_setting(name: str, place: str = "") -> str:
    """Describe an unknown setting with the nearest ones, by spelling or section."""
    known = sorted(set(setting_names()))
    if name in known:
        key = name.removeprefix("environment.").partition(".")[0]
        having = [other for other, kind in environment_classes().items() if key in {one.name for one in fields(kind)}]
        return f"the chosen environment has no setting {name}{place}; these have: {', '.join(having)}"
    group, _, leaf = name.partition(".")
    if leaf in ("name", "type") and group in group_choices():
        return f"unknown setting {name}{place}; did you mean {group}=NAME?"
    return f"unknown setting {name}{place}{names.did_you_mean(name, [*known, *group_choices(), *names.CLIP_RANGE])}"


section.explain_unknown = unknown_setting
