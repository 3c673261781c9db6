"""The source of groups: the protocol, and the in-process source.

Staleness: a group is trained at most `max_staleness` versions after it was started. The local source starts a group
only when it is asked for one, on the weights published last, so its staleness is 0.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from covey.engine.base import EngineStats, Resting
from covey.environments.base import follow, metrics_of
from covey.rollouts.group_checks import GroupFilter, outcomes_of, reason_to_drop, stop_where_nothing_is_scored
from covey.rollouts.rollout import GroupJob, roll_out, roll_out_together
from covey.rollouts.sampler import Sampler
from covey.rollouts.saved.journal import NOTHING_KEPT, RolloutJournal
from covey.rollouts.settings import GroupSizeStep, group_size_at
from covey.rollouts.stream import AdaptiveSampler, PromptSampler, rollout_seed
from covey.system import collectives
from covey.system.waits.signals import outside_of_loops, quiet_event_loop
from covey.types import Group, Prompt, Sampling

T = TypeVar("T")
Meanwhile = Callable[[Sequence[Group]], None]
"""Takes groups of a step that are complete before its others."""
STALE = "stale_groups"
"""Reason for groups that the loop itself drops: they are older than `max_staleness`."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A sampled group that is not trained.

    >>> Dropped(group, reason="filtered_all_right")
    """

    group: Group
    reason: str
    """Reason as `GroupSource.take_drops` counts it."""


class GroupSource(Protocol):
    """The stream of groups a trainer rank pulls from."""

    @property
    def dropped(self) -> Sequence[Dropped]:
        """Return the groups that the last `take` dropped."""

    @property
    def stream(self) -> PromptSampler:
        """Return the order of prompts."""

    @property
    def sampling(self) -> Sampling:
        """Return the sampling of training."""

    def take(self, n: int, meanwhile: Meanwhile | None = None) -> list[Group]:
        """Wait for the next groups, fewer than n where some were dropped.

        `meanwhile` is given early groups while others are sampled, each once.
        """

    def run(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling) -> list[Group]:
        """Return a group per prompt, in order, for evaluation outside the stream.

        Groups may hold failures alone: see `stop_where_only_failures`.
        Ranks share the work, and each gets all groups.
        """

    def publish(self, version: int) -> None:
        """Sample on the policy's current weights, as `version`."""

    def epochs(self) -> float:
        """Return the number of passes over all prompts taken so far."""

    def follow(self, step: int, num_steps: int) -> None:
        """Tell the scoring that `step` of `num_steps` steps are finished."""

    def take_scoring_seconds(self) -> float:
        """Return the seconds `take` waited for scores alone, since the last call."""

    def environment_metrics(self) -> Sequence[Mapping[str, float]]:
        """Return the environments' metrics since the last call, per process."""

    def report_to(self, file: Path) -> None:
        """Keep a status file up to date, where parts run concurrently."""

    def keep_in(self, journal: RolloutJournal) -> None:
        """Write samples to a journal, and take known ones from it."""

    def take_schedule(self) -> Mapping[str, Any]:
        """Return the last step's schedule, empty where settings determine it."""

    def take_drops(self) -> dict[str, int]:
        """Return dropped groups and rollouts since the last call, by reason."""

    def take_metrics(self) -> dict[str, float]:
        """Return metrics of the prompt order and group sizes."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


@dataclass
class LocalSource:
    """Samples and scores in this process, on the trainer's own weights."""

    sampler: Sampler
    stream: PromptSampler
    group_size: int
    sampling: Sampling
    keep: GroupFilter | None = None
    """Dynamic sampling: groups it refuses are replaced by others (DAPO, arXiv 2503.14476)."""
    filter_rounds: int = 3
    """Most extra draws of a step for refused groups, before it trains on the groups it has."""
    later_sizes: Sequence[GroupSizeStep] = ()
    """Group sizes that replace `group_size`, by number of published versions."""
    correct_above: float = 1.0
    """Least reward of a success, for streams that learn from successes."""
    sampled_size: int = 0
    """Completions of a prompt of the last step."""
    journal: RolloutJournal | None = None
    _version: int = 0
    _scoring_seconds: float = 0.0
    _done: EngineStats = field(default_factory=EngineStats)
    _drops: Counter[str] = field(default_factory=Counter)
    _dropped: list[Dropped] = field(default_factory=list)
    _runner: asyncio.Runner = field(default_factory=lambda: asyncio.Runner(loop_factory=quiet_event_loop))

    @property
    def dropped(self) -> Sequence[Dropped]:
        return tuple(self._dropped)

    def take(self, n: int, meanwhile: Meanwhile | None = None) -> list[Group]:
        groups: list[Group] = []
        tried: list[Group] = []
        self.forget_dropped()
        started = time.monotonic()
        self._done += self.sampler.engine.take_stats()
        for _ in range(1 + (self.filter_rounds if self.keep else 0)):
            missing_of_ranks: list[int] = collectives.all_gather(n - len(groups))
            if not any(missing_of_ranks):  # decided by all ranks together: a round is collective
                break
            rolled_out = self._roll_out(missing_of_ranks, meanwhile)
            self.learn(rolled_out)
            tried.extend(rolled_out)
            groups.extend(group for group in rolled_out if self.keep_or_drop(group, self.sampled_size))
        done = self.sampler.engine.take_stats()
        self._scoring_seconds += time.monotonic() - started - done.seconds
        self._done += done
        self._rest()
        stop_where_nothing_is_scored(tried)
        return groups

    def run(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling) -> list[Group]:
        # Every rank answers each world_size-th prompt, and all get all groups in the order of the prompts.
        own = prompts[collectives.rank() :: collectives.world_size()]
        jobs = [self._job(p, replace(sampling, seed=rollout_seed(sampling.seed, p.id, 0))) for p in own]
        of_ranks = collectives.all_gather(self._run_all(jobs, group_size))
        groups = [of_ranks[index % len(of_ranks)][index // len(of_ranks)] for index in range(len(prompts))]
        self._rest()
        return groups

    def publish(self, version: int) -> None:
        self.sampler.engine.load_weights(version)
        self._version = version
        if self.journal is not None:
            self.journal.begin(version)

    def epochs(self, num_pending: int = 0) -> float:
        return (self.stream.position - num_pending) / len(self.stream.prompts)

    def follow(self, step: int, num_steps: int) -> None:
        follow(self.sampler.environment, step, num_steps, self.epochs())

    def take_scoring_seconds(self) -> float:
        seconds, self._scoring_seconds = self._scoring_seconds, 0.0
        return seconds

    def report_to(self, file: Path) -> None:
        return

    def keep_in(self, journal: RolloutJournal) -> None:
        self.journal = journal

    def take_schedule(self) -> Mapping[str, Any]:
        return {}

    def environment_metrics(self) -> Sequence[Mapping[str, float]]:
        found = metrics_of(self.sampler.environment)
        return (found if self.journal is None else self.journal.metrics(found),)

    def take_drops(self) -> dict[str, int]:
        drops, self._drops = dict(self._drops), Counter()
        return drops

    def take_metrics(self) -> dict[str, float]:
        learnt = self.stream.take_metrics() if isinstance(self.stream, AdaptiveSampler) else {}
        size = {"group_size": float(self.sampled_size)} if self.later_sizes else {}
        done, self._done = self._done, EngineStats()
        return {f"curriculum/{name}": value for name, value in learnt.items()} | size | done.metrics()

    def state_dict(self) -> dict[str, Any]:
        return self.stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "buffer" in state:
            needed = "source=ray and devices.sampler >= 1"
            raise ValueError(f"the checkpoint holds unfinished groups of samplers: resume with {needed}")
        self.stream.load_state_dict(state)

    def close(self) -> None:
        outside_of_loops(self._runner.close)

    def _rest(self) -> None:
        """Let the engine release its memory to the trainer."""
        if isinstance(self.sampler.engine, Resting):
            self.sampler.engine.rest()

    def _roll_out(self, missing_of_ranks: Sequence[int], meanwhile: Meanwhile | None) -> list[Group]:
        """Roll out this rank's share of the common stream.

        With fewer groups than ranks every rank samples a part of each.
        """
        seed, self.sampled_size = self.stream.seed, self.size_at(self._version)
        drawn = self.stream.draw(sum(missing_of_ranks))
        jobs = [self._job(p, replace(self.sampling, seed=rollout_seed(seed, p.id, epoch))) for p, epoch in drawn]
        first = sum(missing_of_ranks[: collectives.rank()])
        own = range(first, first + missing_of_ranks[collectives.rank()])
        if len(jobs) < collectives.world_size():
            return roll_out_together(self.sampler, jobs, self.sampled_size, own, self._gather)
        return self._run_all(jobs[own.start : own.stop], self.sampled_size, meanwhile)

    def _job(self, prompt: Prompt, sampling: Sampling) -> GroupJob:
        """Return a group to sample, with what is known of it."""
        kept = NOTHING_KEPT if self.journal is None else self.journal.group(str(self._version), prompt, sampling)
        return GroupJob(prompt, sampling, kept)

    def size_at(self, step: int) -> int:
        return group_size_at(step, self.group_size, self.later_sizes)

    def forget_dropped(self) -> None:
        """Begin a step with no dropped groups."""
        self._dropped = []

    def learn(self, groups: Sequence[Group]) -> None:
        """Give all ranks' outcomes to a learning stream, in order."""
        if isinstance(self.stream, AdaptiveSampler):
            of_ranks = collectives.all_gather(outcomes_of(groups, self.correct_above))
            self.stream.learn([outcome for of_rank in of_ranks for outcome in of_rank])

    def _run_all(self, jobs: Sequence[GroupJob], group_size: int, meanwhile: Meanwhile | None = None) -> list[Group]:
        complete: list[Group] = []
        early: list[Group] = []
        """Complete groups that `meanwhile` has not been given yet."""

        async def one(job: GroupJob) -> Group:
            group = await roll_out(self.sampler, job.prompt, group_size, job.sampling, kept=job.kept)
            complete.append(group)
            early.append(group)
            await asyncio.sleep(0)  # others may be there at the same moment
            # While the engine samples it has the model; scoring must not wait for it longer than needed.
            if meanwhile and early and len(complete) < len(jobs) and not self.sampler.waits.is_sampling:
                ready = [found for found in early if self.keeps(found, group_size)]
                early.clear()
                started = time.monotonic()
                meanwhile(ready)
                self._scoring_seconds -= time.monotonic() - started
            return group

        return collectives.run_or_fail_together(lambda: self._gather(map(one, jobs)), "the end of sampling")

    def _gather(self, work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Run the work of several prompts at a time."""

        async def together() -> list[T]:
            under_way = list(work)
            with self.sampler.waits.under_way(len(under_way)):
                return await asyncio.gather(*under_way)

        return outside_of_loops(lambda: self._runner.run(together()))

    def keeps(self, group: Group, size: int) -> bool:
        """Return True if a group of `size` completions is trained."""
        return reason_to_drop(group, size, self.keep) is None

    def keep_or_drop(self, group: Group, size: int) -> bool:
        """Return True if a group is trained, recording the reason if not."""
        self._drops["unscored_rollouts"] += len(group.failures)
        reason = reason_to_drop(group, size, self.keep)
        if reason is None:
            return True
        self._drops[reason] += 1
        self._dropped.append(Dropped(group, reason))
        return False
