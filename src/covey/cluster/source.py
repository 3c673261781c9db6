"""Groups from samplers in other processes, none older than `max_staleness`.

The asynchronous run is the synchronous loop with this source. Trainer rank 0 owns the buffer. Batches, and what a
curriculum has learnt when it draws, follow from settings and rewards alone, not from speed: prompts are admitted when
weights are published and when a round of a step is over, and trained in that order. With max_staleness=0 the batches
are those of the source in process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from covey.cluster.pool import SamplerPool
from covey.cluster.settings import DevicesConfig
from covey.cluster.slot import PoolLimits, TicketCall
from covey.cluster.start import ClusterLost, connect, disconnect
from covey.cluster.status import StatusFile, status_of
from covey.cluster.waiting import SamplerWait
from covey.cluster.wire import GroupPart, ranks_of, shares
from covey.engine.base import UpdateMode
from covey.engine.weights import prove, unproved_set
from covey.environments.base import Environment
from covey.policy import sharding
from covey.policy.policy import Policy
from covey.rollouts.buffer import Bound, GroupBuffer, Ticket
from covey.rollouts.encoding import encode_prompt
from covey.rollouts.group_checks import outcomes_of, stop_where_only_failures
from covey.rollouts.sampler import Sampler
from covey.rollouts.saved.buffer import buffer_state, load_buffer
from covey.rollouts.saved.journal import NOTHING_KEPT, KeptGroup, RolloutJournal
from covey.rollouts.schedule import row_of, shared_out
from covey.rollouts.source import Dropped, LocalSource, Meanwhile
from covey.rollouts.stream import AdaptiveSampler, PromptSampler, rollout_seed
from covey.system import collectives
from covey.system.waits.watchdog import Watchdog
from covey.types import Group, Prompt, Sampling


class RaySource:
    """The groups of all trainer ranks, from rank 0's pool."""

    def __init__(
        self,
        local: LocalSource,
        policy: Policy,
        bound: Bound,
        watchdog: Watchdog,
        judged: Environment | None = None,
        *,
        records_logprobs: bool = False,
    ) -> None:
        """Set `local`: the order of prompts, filter and group sizes.

        `judged` judges for samplers that cannot. `records_logprobs` writes log-probs to the schedule, for a loss that
        reads them.
        """
        self.local = local
        self._policy, self._judged, self._records_logprobs = policy, judged, records_logprobs
        self._pool: SamplerPool | None = None
        """Pool of rank 0, once `start` was called."""
        self.on_loss: Callable[[ClusterLost], None] = lambda lost: None
        """Told of the loss of the cluster, which the trainer hears of where it next waits for groups."""
        self._is_own_cluster = False
        self._buffer = GroupBuffer(bound)
        self._wait = SamplerWait(watchdog)
        self._pushed = -1
        """Version that the samplers were given last."""
        self._version = 0
        """Version of the policy's weights."""
        self._unsent: list[Ticket] = []
        """Tickets unfinished in the checkpoint, until weights are pushed that they may start on."""
        self._status = StatusFile()
        self._trained: list[Mapping[str, Any]] = []
        self._threads = collectives.all_gather(torch.get_num_threads())
        """Threads of each trainer rank."""
        self._shared_out: Mapping[str, Any] = {}
        """Distribution of the last step's groups over ranks."""
        self._digest = ""
        """Digest of the weights that the samplers were given last."""
        self._ages, self._spans = list[int](), list[int]()
        self._journal: RolloutJournal | None = None

    def start(
        self,
        make: Callable[[], Sampler],
        devices: DevicesConfig,
        how: UpdateMode,
        limits: PoolLimits,
        weight_bytes: int = 0,
    ) -> None:
        """Connect and start the samplers without waiting, on rank 0 alone."""
        self._is_own_cluster = connect(devices, weight_bytes)
        try:
            self._pool = SamplerPool(make, devices, how, limits, self.notice, lambda lost: self.on_loss(lost))
        except ValueError:
            disconnect(self._is_own_cluster)
            raise

    @property
    def stream(self) -> PromptSampler:
        return self.local.stream

    @property
    def sampling(self) -> Sampling:
        return self.local.sampling

    @property
    def dropped(self) -> Sequence[Dropped]:
        return self.local.dropped

    def await_samplers(self) -> None:
        """Wait on rank 0 for the first sampler."""
        if (pool := self._pool) is not None:
            self._wait_until(lambda: pool.is_ready, "a sampler to start", "timeouts.loading")

    def take(self, n: int, meanwhile: Meanwhile | None = None) -> list[Group]:
        """Wait for the next step's groups and return this rank's share.

        Early groups are assigned by their place in their round, before the rest is known.
        """
        if self._pushed < 0:
            self.publish(0)
        own: dict[int, Group] = {}
        parts = self._take_all(is_streaming=meanwhile is not None)
        while True:
            part: GroupPart = collectives.run_on_rank0(lambda: next(parts))
            new = {number: group for number, (rank, group) in part.groups.items() if rank == collectives.rank()}
            own |= new
            if part.is_last:
                return [own[number] for number in sorted(own)]
            assert meanwhile is not None
            if new:
                meanwhile(list(new.values()))

    def run(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling) -> list[Group]:
        """Sample completions on the last published version."""
        if self._pushed < 0:
            self.publish(0)
        if self._pushed < self._version:  # where not every version is published; collective, as shards are gathered
            self._push(self._version)
        groups: list[Group] = collectives.run_on_rank0(lambda: self._evaluate(prompts, group_size, sampling))
        return groups

    def publish(self, version: int) -> None:
        """Push the weights if a version is due, and admit prompts."""
        self._version = version
        if self._journal is not None:
            self._journal.begin(version)
        # With a bound of 0 nothing starts before the weights are there, so that prompts may be sent ahead of them
        if prompts_first := self._buffer.bound.max_staleness == 0:
            self._open_window(version)
        if version % self._buffer.bound.publish_every == 0 or self._pushed < 0:
            self._push(version)
        if not prompts_first:
            self._open_window(version)

    def epochs(self) -> float:
        """Return the epochs of the taken groups."""
        return self.local.epochs(num_pending=len(self._buffer.pending))

    def follow(self, step: int, num_steps: int) -> None:
        """Set the progress of training in the scoring environments."""
        if self._judged is not None:
            self._judged.follow(step, num_steps, self.epochs())
        if self._pool is not None:
            self._pool.follow(step, num_steps, self.epochs())

    def take_drops(self) -> dict[str, int]:
        return self.local.take_drops()

    def take_scoring_seconds(self) -> float:
        """Return 0: scoring runs beside sampling, in other processes."""
        return 0.0

    def take_schedule(self) -> Mapping[str, Any]:
        """Return the last step's groups, token versions, digest and epoch."""
        if self._pool is None:
            return {}
        groups, self._trained = self._trained, []
        digest = self._digest if self._pushed == self._buffer.step else None
        return {"weights": digest, "epoch": self.epochs(), "groups": groups, **self._shared_out}

    def take_metrics(self) -> dict[str, float]:
        """Return ages, waits and speeds since the last call, on rank 0."""
        if self._pool is None:
            return {}
        ages, self._ages = self._ages, []
        spans, self._spans = self._spans, []
        found = {
            "staleness/mean": fmean(ages) if ages else 0.0,
            "staleness/max": float(max(ages, default=0)),
            "staleness/versions_per_completion": fmean(spans) if spans else 1.0,
            "buffer/finished": float(len(self._buffer.finished)),
            "buffer/pending": float(len(self._buffer.pending)),
            "trainer_waited_seconds": self._wait.take_seconds(),
        }
        return self.local.take_metrics() | found | self._pool.take_metrics()

    def environment_metrics(self) -> Sequence[Mapping[str, float]]:
        """Return the metrics of each scoring environment until this step's groups."""
        if self._judged is not None:
            return (self._judged.metrics(),)
        return () if self._pool is None else self._pool.take_environment_metrics()

    def status(self) -> dict[str, Any]:
        return status_of(self._buffer, self._pushed, self._wait.is_on, self._pool.status() if self._pool else [])

    def report_to(self, file: Path) -> None:
        """Keep a file up to date with `status`, for `covey status`."""
        self._status.path = file

    def keep_in(self, journal: RolloutJournal) -> None:
        self._journal = journal

    def state_dict(self) -> dict[str, Any]:
        """Return the prompts' order and buffer: a resume trains every admitted group."""
        with self._wait.changed:
            return {"stream": self.local.state_dict(), "buffer": buffer_state(self._buffer)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        has_buffer = "buffer" in state  # else of a run whose groups were sampled in process
        self.local.load_state_dict(state["stream"] if has_buffer else state)
        if has_buffer:
            with self._wait.changed:
                load_buffer(self._buffer, state["buffer"], self.local)
                self._unsent = list(self._buffer.waiting)

    def close(self) -> None:
        try:
            if self._pool is not None:
                self._pool.close()
                disconnect(self._is_own_cluster)
        finally:
            self.local.close()

    def _push(self, version: int) -> None:
        with sharding.gather_weights(self._policy):
            if self._pool is not None:
                prompt = self.stream.prompts[version % len(self.stream.prompts)]
                text = encode_prompt(self.local.sampler.tokenizer, prompt)
                weights = unproved_set(self._policy, version, text, copy=False)  # the pool keeps copies of its own
                self._digest = weights.digest
                self._pool.push(weights)
                prove(self._policy, weights.probe)  # while they travel
        self._pushed = version

    def _open_window(self, version: int) -> None:
        """Admit and send the prompts that may start on a version."""
        if self._pool is None:
            return
        with self._wait.changed:
            if self._buffer.admitted == 0:  # a new run, or one that had another source before
                self._buffer.step = version
            self._buffer.publish(version)
        self._admit()

    def _admit(self) -> None:
        """Send prompts waiting for these weights or this round, then draw more."""
        with self._wait.changed:
            tickets, self._unsent = self._buffer.release(self._unsent)
            room = self._buffer.room()
            for prompt, epoch in self.stream.draw(room) if room > 0 else ():
                sampling = replace(self.sampling, seed=rollout_seed(self.stream.seed, prompt.id, epoch))
                size = self.local.size_at(self._buffer.next_step())
                tickets.append(self._buffer.admit(prompt, sampling, size))
        if tickets:
            self._submit(tickets, self._buffer.finish, self._give_up)

    def _submit(
        self, tickets: Sequence[Ticket], take: Callable[[Ticket, Group], bool], give_up: Callable[[Ticket], Ticket]
    ) -> None:
        """Submit tickets, and `take` groups of the journal at once."""
        assert self._pool is not None
        kept = {ticket.number: self._known_parts(ticket) for ticket in tickets}
        left = self._wait.take_whole(tickets, take, kept)
        settle = self._wait.taking(take, kept)
        self._pool.submit([TicketCall(ticket, settle, give_up, kept[ticket.number]) for ticket in left])

    def _known_parts(self, ticket: Ticket) -> KeptGroup:
        """Return a group's known parts; negative numbers are an evaluation's."""
        if self._journal is None:
            return NOTHING_KEPT
        place = f"ticket {ticket.number}" if ticket.number >= 0 else f"evaluation {self._pushed}"
        return self._journal.group(place, ticket.prompt, ticket.sampling)

    def _give_up(self, ticket: Ticket) -> Ticket:
        with self._wait.changed:
            return self._buffer.give_up(ticket)

    def _take_all(self, *, is_streaming: bool) -> Iterator[GroupPart]:
        """Fill the step in rounds, replacing refused groups. Yields early groups if streaming, and last the rest."""
        assert self._pool is not None
        buffer, groups_per_step = self._buffer, self._buffer.bound.groups_per_step
        kept: dict[int, Group] = {}
        tried: list[Group] = []
        early: list[GroupPart] = []
        self.local.forget_dropped()
        for number in range(1 + (self.local.filter_rounds if self.local.keep else 0)):
            missing = groups_per_step - len(kept)
            if missing == 0:
                break
            if number > 0:
                buffer.open_round(missing)
            self._admit()
            if is_streaming:
                for part in self._complete_early(missing):
                    early.append(part)
                    yield part
            taken = self._wait_for(missing)
            groups = [group for _, group in taken]
            if isinstance(self.stream, AdaptiveSampler):
                self.stream.learn(outcomes_of(groups, self.local.correct_above))
            tried += groups
            kept |= self._kept_of(taken)
        with self._wait.changed:
            buffer.count(trained=len(kept), dropped=len(tried) - len(kept))
            buffer.close_step()
        self._pool.ask_environments()
        self._admit()
        stop_where_only_failures(tried)
        ranks = ranks_of(kept, early)
        self._shared_out = shared_out(ranks, [part.groups for part in early], self._threads)
        late = {n: (ranks[n], group) for n, group in kept.items() if not any(n in part.groups for part in early)}
        yield GroupPart(late, is_last=True)

    def _kept_of(self, taken: list[tuple[Ticket, Group]]) -> dict[int, Group]:
        """Return groups that pass the filter, by ticket number; mark them trained."""
        kept = {}
        for ticket, group in taken:
            self.local.sampled_size = ticket.group_size
            if self.local.keep_or_drop(group, ticket.group_size):
                kept[ticket.number] = group
                self._trained.append(row_of(ticket, group, has_logprobs=self._records_logprobs))
        return kept

    def _complete_early(self, n: int) -> Iterator[GroupPart]:
        seen: set[int] = set()
        buffer = self._buffer
        ranks = shares(n)
        first = buffer.pending[0].number
        while True:
            self._wait_counted(lambda: buffer.is_ready(n) or len(buffer.complete(n)) > len(seen), n)
            with self._wait.changed:
                if buffer.is_ready(n):
                    return
                new = [(ticket, group) for ticket, group in buffer.complete(n) if ticket.number not in seen]
            seen.update(ticket.number for ticket, _ in new)
            trained = {t.number: (ranks[t.number - first], g) for t, g in new if self.local.keeps(g, t.group_size)}
            if trained:
                yield GroupPart(trained, is_last=False)

    def _wait_for(self, n: int) -> list[tuple[Ticket, Group]]:
        self._wait_counted(lambda: self._buffer.is_ready(n), n)
        with self._wait.changed:
            step = self._buffer.step
            taken = self._buffer.take(n)
        for _, group in taken:
            for rollout in group.rollouts:
                self._ages.append(self._buffer.bound.age(rollout.policy_version, step))
                self._spans.append(max(1, len(rollout.spans)))
        return taken

    def _wait_counted(self, is_done: Callable[[], bool], n: int) -> None:
        self._wait.seconds += self._wait_until(is_done, f"samplers to finish {n} groups")

    def _wait_until(self, is_done: Callable[[], bool], what: str, setting: str = "timeouts.sampling") -> float:
        pool = self._pool
        assert pool is not None
        return self._wait.until(is_done, what, lambda: pool.error, setting)

    def notice(self, has_worked: bool) -> None:
        """Record a sampler's sign of life, in the pool's thread."""
        if has_worked:
            self._wait.notice()
        if self._status.is_due:
            self._status.write(self.status())

    def _evaluate(self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling) -> list[Group]:
        groups: dict[int, Group] = {}
        # Numbers below 0 go before what is sampled for training.
        first = -len(prompts)
        drawn = [replace(sampling, seed=rollout_seed(sampling.seed, prompt.id, 0)) for prompt in prompts]
        tickets = [
            Ticket(first + place, prompt, own, group_size, self._pushed)
            for place, (prompt, own) in enumerate(zip(prompts, drawn, strict=True))
        ]
        take = lambda ticket, group: groups.setdefault(ticket.number, group) is group  # noqa: E731
        self._submit(tickets, take, Ticket.next_attempt)
        self._wait_until(lambda: len(groups) == len(prompts), f"samplers to answer {len(prompts)} held-out prompts")
        return [groups[first + place] for place in range(len(prompts))]
