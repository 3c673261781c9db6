"""A short run of the very settings on this machine: what it takes over what was predicted, and how long answers are."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

from covey.config.doctor import DoctorConfig
from covey.config.schema import Config, EvaluationConfig, OutputConfig, PreflightConfig
from covey.environments.base import close_environment
from covey.policy.models.loading import load_tokenizer
from covey.rollouts.encoding import encode_prompt
from covey.run.build import Run, build_environment
from covey.run.given import Given
from covey.run.planner.hardware import Hardware
from covey.run.planner.kept import keep, kept
from covey.run.planner.memory import with_checkpointing, workload
from covey.run.planner.model_shapes import Shape
from covey.run.planner.plan import Measured, work_of
from covey.run.planner.seconds import PHASES, step_seconds
from covey.run.records.callbacks import Callback
from covey.run.records.record import RunRecorder
from covey.system.disk import cache_folder

STEPS = 4
"""Of which the first is left out."""
NUM_PROMPTS = 64
"""Whose tokens are counted."""


class Watch(Callback):
    """Notes the phases after each step, and how long answers are."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._record: RunRecorder | None = None
        self.phases: list[dict[str, float]] = []
        self.times: list[float] = []
        self.lengths: list[float] = []
        self.prompt_tokens = 0.0

    def built(self, run: Run, record: RunRecorder) -> None:
        self._record = record
        record.timer.clock = self._clock
        prompts = run.test_prompts[:NUM_PROMPTS]
        self.prompt_tokens = fmean(len(encode_prompt(run.policy.tokenizer, prompt)) for prompt in prompts)

    def on_step(self, step: int, metrics: dict[str, float | None]) -> None:
        assert self._record is not None
        self.phases.append(self._record.timer.seconds)
        self.times.append(self._clock())
        self.lengths.append(metrics["completion_length_mean"] or 0.0)


def prompt_tokens_of(config: Config) -> float | None:
    """Return the mean length of the prompts of a task that is here, None where a tokenizer would be fetched for it."""
    if config.model.name != "nano":
        return None
    try:
        tokenizer, environment = load_tokenizer(config.model), build_environment(config)
    except (ValueError, ImportError, OSError):  # a plan needs no rows: training says what is missing
        return None
    try:
        prompts = environment.prompts("train")[:NUM_PROMPTS]
        return fmean(len(encode_prompt(tokenizer, prompt)) for prompt in prompts)
    finally:
        close_environment(environment)


def probe(
    config: Config,
    shape: Shape,
    on: Hardware,
    train: Callable[[Config, Path, Given], None],
    clock: Callable[[], float] = time.monotonic,
) -> Measured:
    """Train a few steps in a folder that goes away, and compare. The cold start, if any, stays in its cache."""
    # A short run without checkpoints, checks and reports
    watch, config = Watch(clock), with_checkpointing(config, 1, int(on.memory), is_gpu=on.is_gpu)
    short = replace(
        config,
        num_steps=STEPS,
        evaluation=EvaluationConfig(num_prompts=1, num_samples=1, k=[1]),
        output=OutputConfig(save_every=0, traces=False, report=False, progress=False),
        preflight=PreflightConfig(enabled=False),
        doctor=DoctorConfig(enabled=False),
    )
    with tempfile.TemporaryDirectory(prefix="covey-plan-") as made:
        train(short, Path(made) / "run", Given(callbacks=[watch], built=watch.built))
    return compared(config, shape, on, watch)


def compared(config: Config, shape: Shape, on: Hardware, watch: Watch) -> Measured:
    """Return measured over predicted seconds by phase, of the steps after the first."""
    count = len(watch.times) - 1
    length = fmean(watch.lengths[1:])
    taken = {name: (watch.phases[-1].get(name, 0.0) - watch.phases[0].get(name, 0.0)) / count for name in PHASES[:-1]}
    taken["other"] = (watch.times[-1] - watch.times[0]) / count - sum(taken.values())
    work = work_of(config, 1, watch.prompt_tokens, length)
    predicted = step_seconds(shape, workload(config, 1), work, on)
    factors = {name: taken[name] / predicted[name] for name in PHASES if predicted[name] > 0}
    source = f"a probe of {count} steps on {on.name}, {time.strftime('%Y-%m-%d')}"
    return Measured(watch.prompt_tokens, length, factors, source)


def kept_probe(config: Config, on: Hardware) -> Measured | None:
    """Return what an earlier probe of this model and task on this machine has kept."""
    found = kept(_path(config, on))
    try:
        return None if found is None else Measured(**found)
    except TypeError:  # of another version
        return None


def keep_probe(config: Config, on: Hardware, found: Measured) -> None:
    keep(_path(config, on), asdict(found))


def _path(config: Config, on: Hardware) -> Path:
    model = config.model
    words = (
        model.name,
        model.nano_hidden_size,
        model.nano_num_layers,
        model.lora_rank,
        config.environment.name,
        on.name,
    )
    name = "".join(c if c.isalnum() else "-" for c in "_".join(map(str, words)))
    return Path(cache_folder()) / "plans" / f"{name}.json"
