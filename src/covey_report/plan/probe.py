"""Probe this machine by a short run of the settings."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from covey.config.schema import Config, DoctorConfig, EvaluationConfig, OutputConfig, PreflightConfig
from covey.run.build import Run
from covey.run.given import RunObjects
from covey.run.memory.estimate import with_checkpointing, workload
from covey.run.memory.model_shapes import Shape
from covey.run.records.callbacks import Callback
from covey.run.records.record import RunRecorder
from covey_report.plan.hardware import Hardware
from covey_report.plan.known import mean_tokens
from covey_report.plan.plan import Measured, work_of
from covey_report.plan.seconds import PHASES, step_seconds

STEPS = 4
"""Steps of a probe, of which the first is left out."""


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
        sampler = run.local.sampler
        self.prompt_tokens = mean_tokens(sampler.tokenizer, sampler.environment, run.test_prompts)

    def on_step(self, step: int, metrics: dict[str, float | None]) -> None:
        assert self._record is not None
        self.phases.append(self._record.timer.seconds)
        self.times.append(self._clock())
        self.lengths.append(metrics["completion_length_mean"] or 0.0)


def probe(
    config: Config,
    shape: Shape,
    on: Hardware,
    train: Callable[[Config, Path, RunObjects], None],
    clock: Callable[[], float] = time.monotonic,
) -> Measured:
    """Train a few steps in a temporary folder, and compare."""
    watch, config = Watch(clock), with_checkpointing(config, 1, int(on.memory), is_gpu=on.is_gpu)
    short = replace(
        config,
        num_steps=STEPS,
        num_epochs=None,
        total_rollouts=None,
        group_size_schedule=[],
        evaluation=EvaluationConfig(num_prompts=1, num_samples=1, k=[1]),
        output=OutputConfig(save_every=0, traces=False, report=False, progress=False),
        preflight=PreflightConfig(enabled=False),
        doctor=DoctorConfig(enabled=False),
    )
    with tempfile.TemporaryDirectory(prefix="covey-plan-") as made:
        train(short, Path(made) / "run", RunObjects(callbacks=[watch], built=watch.built))
    return compared(short, shape, on, watch)


def compared(config: Config, shape: Shape, on: Hardware, watch: Watch) -> Measured:
    """Divide measured by predicted seconds, by phase, without the first step."""
    count = len(watch.times) - 1
    length = fmean(watch.lengths[1:])
    taken = {name: (watch.phases[-1].get(name, 0.0) - watch.phases[0].get(name, 0.0)) / count for name in PHASES[:-1]}
    taken["other"] = (watch.times[-1] - watch.times[0]) / count - sum(taken.values())
    work = work_of(config, 1, watch.prompt_tokens, length)
    predicted = step_seconds(shape, workload(config, 1), work, on)
    factors = {name: taken[name] / predicted[name] for name in PHASES if predicted[name] > 0}
    source = f"a probe of {count} steps on {on.name}, {time.strftime('%Y-%m-%d')}"
    return Measured(watch.prompt_tokens, length, factors, source)
