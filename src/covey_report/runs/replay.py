"""Replay an asynchronous run by its schedule, bit for bit.

The groups of each step are sampled on their original versions, from weights that this replay has trained. Several ranks
keep their groups, so sums round alike. The first step with another digest is named.
"""

import asyncio
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

from covey.cluster.wire import shares
from covey.config.schema import Config
from covey.engine.base import digest_of
from covey.engine.lockstep.engine import ReplayingLockstepEngine
from covey.engine.native.replaying import ReplayingEngine
from covey.environments.base import follow
from covey.policy import sharding
from covey.policy.models.loading import load_policy
from covey.rollouts.rollout import roll_out
from covey.rollouts.sampler import Sampler
from covey.rollouts.schedule import PastGroup, past_group, with_logprobs
from covey.rollouts.turns import turn_seed
from covey.run import stages
from covey.run.build import Run, training_sampling
from covey.run.folder import METRICS, SCHEDULE, begin_log, changes_of
from covey.run.records.record import RunRecorder
from covey.run.records.step_metrics import StepResult
from covey.system import collectives, ranks
from covey.system.jsonl import read_rows
from covey.system.text.console import CleanConsole
from covey.system.waits.watchdog import PromptWaits
from covey.trainer.prepare import make_training_batches, train_ahead
from covey.types import Group, Prompt, Span
from covey_report.runs.local_ranks import run_on_ranks


@dataclass(frozen=True, slots=True)
class PastStep:
    """One row of a schedule."""

    step: int
    """Steps finished with it."""
    digest: str | None
    """Digest of the weights after it; None where no version was published."""
    groups: tuple[PastGroup, ...]
    epoch: float = 0.0
    """Passes over the prompts after it, dropped groups included."""
    ahead: Sequence[Sequence[int]] = ()
    """Places of groups that were trained before the others were there, part by part."""
    ranks: Sequence[int] = ()
    """Rank that trained each group, where there were several."""
    threads: Sequence[int] = ()
    """Threads of each rank, where there were several."""

    def own_places(self) -> list[int]:
        """Return the places of this rank's groups."""
        ranks = self.ranks or shares(len(self.groups))
        return [place for place, rank in enumerate(ranks) if rank == collectives.rank()]


@dataclass
class Attempts:
    """The token versions of a group's completions, by their turns' seeds."""

    group: PastGroup
    max_turns: int
    _lengths: Counter[int] = field(default_factory=Counter)
    """Sample index -> tokens of its turns so far."""

    def spans(self, seed: int, sample_index: int) -> Sequence[Span]:
        """Return the versions of a completion's tokens."""
        index = self._attempt_of(seed, sample_index)
        return after(self.group.spans[index], self._lengths[index])

    def add(self, seed: int, sample_index: int, num_tokens: int) -> None:
        """Record a completion's length."""
        self._lengths[self._attempt_of(seed, sample_index)] += num_tokens

    def _attempt_of(self, seed: int, sample_index: int) -> int:
        if seed == self.group.seed:
            return sample_index
        turns = range(1, self.max_turns + 1)
        return next(i for i in range(self.group.size) for t in turns if turn_seed(self.group.seed, i, t) == seed)


def after(spans: Sequence[Span], num_tokens: int) -> list[Span]:
    """Return the spans after the first tokens; open ends stay open."""
    left = [span for span in spans if span.end < 0 or span.end > num_tokens] or spans[-1:]
    return [Span(s.version, max(0, s.start - num_tokens), s.end if s.end < 0 else s.end - num_tokens) for s in left]


def read_schedule(folder: Path) -> list[PastStep]:
    """Return a run's schedule. ValueError without one."""
    path = folder / SCHEDULE
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {SCHEDULE}: runs with samplers of their own (source=ray) write one, and others need none"
        )
    rows = list(read_rows(path))
    if not rows:
        raise ValueError(f"{path} is empty: the run ended before its first step")
    return [
        PastStep(
            step=row["step"],
            digest=row.get("weights"),
            groups=tuple(map(past_group, row["groups"])),
            epoch=row["epoch"],
            ahead=row.get("ahead", ()),
            ranks=row.get("ranks", ()),
            threads=row.get("threads", ()),
        )
        for row in rows
    ]


def best_evaluations(folder: Path) -> set[int]:
    """Return the steps with a new best evaluation. ValueError without metrics."""
    path = folder / METRICS
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {METRICS}: it says when algorithm.reference_refresh_on_best took a reference"
        )
    rows = [row for row in read_rows(path) if row["kind"] == "evaluate"]
    found = [row["accuracy"] if "accuracy" in row else row["reward_mean"] for row in rows]
    scores = [math.nan if score is None else score for score in found]
    return {row["step"] for place, row in enumerate(rows) if stages.is_best(scores[: place + 1])}


def num_ranks(steps: Sequence[PastStep]) -> int:
    """Return the number of ranks that trained, by default 1."""
    return len(steps[0].threads) or 1


Watcher = Callable[[int, StepResult], bool]
"""Looks at a step that was trained again; False ends the replay."""


def replay(
    config: Config, past: Path, record: RunRecorder, say: Callable[[str], None], watch: Watcher = lambda *_: True
) -> str:
    """Train by the schedule of `past`; return the last weights' digest.

    ValueError names the first step with other weights. Collective, over as many ranks as the run had.
    """
    steps = read_schedule(past)
    check_replayable(config, steps)
    refreshed = best_evaluations(past) if config.algorithm.reference_refresh_on_best else set()
    if (wanted := num_ranks(steps)) != collectives.world_size():
        raise ValueError(f"a run of {wanted} trainer ranks is replayed by as many, got {collectives.world_size()}")
    alone = replace(config, source="local", resume=None)
    environment = stages.load_environment(alone, record)
    began = stages.run_cold_start(alone, environment, record)
    run = stages.load_run(alone, environment, record, began=began)
    model = config.model if began is None else replace(config.model, name=str(began))
    policy = load_policy(model, seed=config.seed)
    is_general = policy.path == "general" or config.engine.name == "transformers"
    kind = ReplayingLockstepEngine if is_general else ReplayingEngine
    engine = kind(policy, config.engine.cache_bytes, config.engine.max_rows, model.kernels)
    sampler = replace(run.local.sampler, engine=engine, environment=environment, waits=PromptWaits())
    _remember(run, engine, 0)
    prompts = {prompt.id: prompt for prompt in run.local.stream.prompts}
    digest, epoch = "", 0.0
    for step, oldest in zip(steps, oldest_needed(steps), strict=True):
        follow(sampler.environment, step.step - 1, config.num_steps, epoch)
        epoch = step.epoch
        groups = {}
        for place in step.own_places():
            group = step.groups[place]
            if group.prompt_id not in prompts:
                raise ValueError(f"the run trained on prompt {group.prompt_id!r}, which its data no longer has")
            prompt = prompts[group.prompt_id]
            engine.past = Attempts(group, sampler.limits_for(prompt).max_turns or 1)
            groups[place] = asyncio.run(_sample_again(sampler, prompt, group, config))
        stepped = _train(run, groups, step, record)
        digest = _remember(run, engine, step.step)
        if not watch(step.step, stepped):
            break
        collectives.run_on_rank0(partial(_compare, step, digest, past))
        engine.forget_before(min(oldest, step.step))
        if step.step in refreshed:
            stages.take_as_reference(run)
        say(f"step {step.step} of {steps[-1].step}: weights {digest}")
    return digest


def oldest_needed(steps: Sequence[PastStep]) -> list[float]:
    """Return each step's oldest version that is needed later."""
    of_each = [min((v for group in step.groups for v in group.versions()), default=math.inf) for step in steps]
    from_the_end = accumulate(reversed(of_each[1:]), min, initial=math.inf)
    return list(from_the_end)[::-1]


def check_replayable(config: Config, steps: Sequence[PastStep]) -> None:
    """Refuse runs that cannot be sampled again bit for bit. ValueError."""
    if config.engine.name not in ("native", "transformers"):
        raise ValueError(
            f"covey replay needs engine.name=native or transformers, got engine.name={config.engine.name}: its samples "
            "do not follow from a seed"
        )
    mixed = [group for step in steps for group in step.groups if group.failures and len(group.versions()) > 1]
    if mixed:
        raise ValueError(
            f"a group of {mixed[0].prompt_id} has completions that were not scored, and others of several versions: "
            "which is which is not recorded"
        )
    numbers = [step.step for step in steps]
    if numbers != list(range(1, len(steps) + 1)):
        raise ValueError(f"the schedule lacks steps: it has {len(numbers)}, the last is step {numbers[-1]}")
    for step in steps:
        if len(step.threads) != len(steps[0].threads):
            raise ValueError(
                f"step {step.step} was trained by {len(step.threads) or 1} ranks and step 1 by "
                f"{len(steps[0].threads) or 1}: a run that was resumed with another number of ranks cannot be replayed"
            )


async def _sample_again(sampler: Sampler, prompt: Prompt, past: PastGroup, config: Config) -> Group:
    sampling = replace(training_sampling(config), seed=past.seed)
    return with_logprobs(await roll_out(sampler, prompt, past.size, sampling), past)


def _train(run: Run, groups: Mapping[int, Group], step: PastStep, record: RunRecorder) -> StepResult:
    with record.watchdog.deadline(f"the update of step {step.step}", "timeouts.update"):
        for part in step.ahead:
            if early := [groups[place] for place in part if place in groups]:
                train_ahead(early, run.trainer, run.credit, run.packing, step.step - 1)
        own = list(groups.values())
        batches, credit = make_training_batches(own, run.trainer, run.credit, run.packing, step.step - 1)
        return StepResult(own, [], credit, run.trainer.step(batches, step.step - 1))


def _remember(run: Run, engine: ReplayingEngine, version: int) -> str:
    """Keep the weights for sampling; return their digest. Collective where sharded."""
    with sharding.gather_weights(run.policy):
        return digest_of(engine.remember(run.policy, version))  # of the copy: gathered memory must stay resizable


def _compare(step: PastStep, digest: str, past: Path) -> None:
    if step.digest is None or digest == step.digest:
        return
    changed = [name for line in changes_of(past) for name in line["changes"]]
    because = f"settings that a resume changed ({', '.join(changed)}), " if changed else ""
    raise ValueError(
        f"step {step.step} ends with other weights than the run had ({digest}, recorded {step.digest}): {because}other "
        "code, data, packages, processor or number of threads"
    )


def replay_on_ranks(config: Config, past: Path) -> str:
    """Replay the run in `past`; return the last digest.

    Rank 0 prints each step's. ValueError as `replay`; RunStopped where a rank is lost.
    """
    steps = read_schedule(past)
    check_replayable(config, steps)
    if ranks.world_size() > 1:
        raise ValueError(
            f"covey replay starts the ranks of a run itself, and a launcher has started {ranks.world_size()} already: "
            "leave the launcher out"
        )
    with tempfile.TemporaryDirectory(prefix="covey-replay-") as aside:
        as_rank = partial(_replay_as_rank, config, past, Path(aside))
        return as_rank() if num_ranks(steps) == 1 else run_on_ranks(as_rank, list(steps[0].threads))


def _replay_as_rank(config: Config, past: Path, aside: Path) -> str:
    """Replay this rank's part in a scratch folder."""
    with collectives.process_group(config.timeouts.ranks, config.model.device), RunRecorder(config, aside) as record:
        if not collectives.is_main_process():
            begin_log(aside)  # away from the terminal, where rank 0 says the same
        say = CleanConsole().print if collectives.is_main_process() else lambda text: None
        return replay(config, past, record, say)
