"""Run an asynchronous run again in one process, by its schedule, and end with the same weights, bit for bit.

Nothing is asynchronous here: the groups of each step are sampled on the versions they were sampled on, from weights
that this very replay has trained. Where a digest differs from the recorded one, the first step that differs is named.
"""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

from covey.config.schema import Config
from covey.engine.base import DIGEST_KIND, digest_of
from covey.engine.native.replaying import ReplayingEngine
from covey.engine.weights import trained_tensors
from covey.policy.models.loading import load_policy
from covey.rollouts.rollout import roll_out
from covey.rollouts.sampler import Sampler
from covey.rollouts.schedule import PastGroup, past_group, with_logprobs
from covey.rollouts.turns import turn_seed
from covey.run import stages
from covey.run.build import Run, training_sampling
from covey.run.folder import SCHEDULE
from covey.run.records.record import RunRecorder
from covey.system.waits.watchdog import Stages
from covey.trainer.prepare import make_training_batches, train_ahead
from covey.types import Group, Prompt, Span


@dataclass(frozen=True, slots=True)
class PastStep:
    """One row of a schedule."""

    step: int
    """Steps finished with it."""
    digest: str | None
    """Of the weights after it; None where no version was published."""
    groups: tuple[PastGroup, ...]
    ahead: Sequence[Sequence[int]] = ()
    """Places of groups that were trained before the others were there, part by part."""


@dataclass
class Attempts:
    """The versions of every completion of one group, by the seeds that its turns are sampled with."""

    group: PastGroup
    max_turns: int
    _lengths: Counter[int] = field(default_factory=Counter)
    """Sample index -> tokens of its turns so far."""

    def spans(self, seed: int, sample_index: int) -> Sequence[Span]:
        """Return the versions of a completion's tokens, counted from its own first token."""
        index = self._attempt_of(seed, sample_index)
        return after(self.group.spans[index], self._lengths[index])

    def add(self, seed: int, sample_index: int, num_tokens: int) -> None:
        """Note how long a completion came out."""
        self._lengths[self._attempt_of(seed, sample_index)] += num_tokens

    def _attempt_of(self, seed: int, sample_index: int) -> int:
        if seed == self.group.seed:
            return sample_index
        turns = range(1, self.max_turns + 1)
        return next(i for i in range(self.group.size) for t in turns if turn_seed(self.group.seed, i, t) == seed)


def after(spans: Sequence[Span], num_tokens: int) -> list[Span]:
    """Return the spans of what follows after the first tokens. A span without an end stays without one."""
    left = [span for span in spans if span.end < 0 or span.end > num_tokens] or spans[-1:]
    return [Span(s.version, max(0, s.start - num_tokens), s.end if s.end < 0 else s.end - num_tokens) for s in left]


def read_schedule(folder: Path) -> list[PastStep]:
    """Return the steps of a run's schedule. ValueError where it has none."""
    path = folder / SCHEDULE
    if not path.is_file():
        raise ValueError(f"{folder} has no {SCHEDULE}: runs with source=ray write one, and others need none")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not rows:
        raise ValueError(f"{path} is empty: the run ended before its first step")
    return [
        PastStep(row["step"], row.get("weights"), tuple(map(past_group, row["groups"])), row.get("ahead", ()))
        for row in rows
    ]


def replay(config: Config, past: Path, record: RunRecorder, say: Callable[[str], None]) -> str:
    """Train by the schedule of the run in `past` and return the digest of the last weights.

    ValueError names the first step whose weights differ from the recorded ones.
    """
    steps = read_schedule(past)
    check_replayable(config, steps)
    # Build the run as it was, with groups sampled here.
    alone = replace(config, source="local", resume=None)
    environment = stages.load_environment(alone, record)
    warm = stages.run_cold_start(alone, environment, record)
    run = stages.load_run(warm, environment, record)
    engine = ReplayingEngine(
        load_policy(warm.model, seed=warm.seed),
        warm.engine.cache_bytes,
        warm.engine.max_rows,
        warm.model.kernels,
    )
    sampler = replace(run.local.sampler, engine=engine, environment=environment, stages=Stages())
    engine.remember(run.policy, 0)
    prompts = {prompt.id: prompt for prompt in run.local.stream.prompts}
    # Train step by step, keeping the versions that later steps sampled on.
    digest = ""
    for step, oldest in zip(steps, oldest_needed(steps), strict=True):
        groups = []
        for group in step.groups:
            if group.prompt_id not in prompts:
                raise ValueError(f"the run trained on prompt {group.prompt_id!r}, which its data no longer has")
            prompt = prompts[group.prompt_id]
            engine.past = Attempts(group, sampler.limits_for(prompt).max_turns or 1)
            groups.append(asyncio.run(_sample_again(sampler, prompt, group, warm)))
        digest = _train(run, groups, step, record)
        engine.remember(run.policy, step.step)
        engine.forget_before(min(oldest, step.step))
        say(f"step {step.step} of {steps[-1].step}: weights {digest}")
    return digest


def oldest_needed(steps: Sequence[PastStep]) -> list[float]:
    """Return for each step the oldest version that a later one sampled on, infinity where none did."""
    of_each = [min((v for group in step.groups for v in group.versions()), default=math.inf) for step in steps]
    from_the_end = accumulate(reversed(of_each[1:]), min, initial=math.inf)
    return list(from_the_end)[::-1]


def check_replayable(config: Config, steps: Sequence[PastStep]) -> None:
    """Refuse (ValueError) what one process cannot sample again with the same bits."""
    # Samples must follow from seeds
    if config.engine.name != "native":
        raise ValueError(
            f"covey replay needs engine.name=native, got engine.name={config.engine.name}: its samples do not follow "
            "from a seed"
        )
    if config.devices.trainer > 1:
        raise ValueError(
            f"covey replay trains in one process, and sums over devices.trainer={config.devices.trainer} ranks round "
            "otherwise: runs of one rank are replayed bit for bit"
        )
    if any(step.digest is not None and not step.digest.startswith(DIGEST_KIND) for step in steps):
        raise ValueError("the run's schedule has digests of an older covey, which this one cannot compare")
    # Every group must be attributable to versions
    mixed = [group for step in steps for group in step.groups if group.failures and len(group.versions()) > 1]
    if mixed:
        raise ValueError(
            f"a group of {mixed[0].prompt_id} has completions that were not scored, and others of several versions: "
            "which is which is not recorded"
        )
    # The schedule must be complete
    numbers = [step.step for step in steps]
    if numbers != list(range(1, len(steps) + 1)):
        raise ValueError(f"the schedule lacks steps: it has {len(numbers)}, the last is step {numbers[-1]}")


async def _sample_again(sampler: Sampler, prompt: Prompt, past: PastGroup, config: Config) -> Group:
    sampling = replace(training_sampling(config), seed=past.seed)
    return with_logprobs(await roll_out(sampler, prompt, past.size, sampling), past)


def _train(run: Run, groups: Sequence[Group], step: PastStep, record: RunRecorder) -> str:
    """Make the step's update, and compare the weights after it."""
    # Repeat the update, with what was trained ahead
    with record.watchdog.deadline(f"the update of step {step.step}", "timeouts.update"):
        for part in step.ahead:
            train_ahead([groups[place] for place in part], run.trainer, run.credit, run.packing, step.step - 1)
        batches, _ = make_training_batches(groups, run.trainer, run.credit, run.packing, step.step - 1)
        run.trainer.step(batches, step.step - 1)
    # Compare the digest of the weights
    digest = digest_of(trained_tensors(run.policy))
    if step.digest is not None and digest != step.digest:
        raise ValueError(
            f"step {step.step} ends with other weights than the run had ({digest}, recorded {step.digest}): other "
            "code, data, packages, processor or number of threads"
        )
    return digest
