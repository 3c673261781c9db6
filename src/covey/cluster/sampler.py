"""A sampler: a process with an engine and the environment.

One event loop does everything, a thousand calls at a time, so that a push of weights never waits for completions.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from covey.cluster.start import prepare_actor
from covey.cluster.wire import Jobs, Logprobs, SampledBatch, SampledGroup, SampledPart, WeightArrays, unpack
from covey.engine.base import Closable, EngineLost, PushRefused, UpdatableEngine, UpdateMode
from covey.environments.base import close_environment, follow, metrics_of
from covey.rollouts.buffer import Ticket
from covey.rollouts.rollout import roll_out
from covey.rollouts.sampler import Sampler
from covey.rollouts.saved.journal import NOTHING_KEPT, KeptGroup
from covey.rollouts.saved.plain import SavedGroup

PARTS_SECONDS = 1.0
"""Most seconds until parts of unfinished groups are handed over."""


class SamplerActor:
    """Rolls out prompts; Ray makes one in each sampler's process."""

    def __init__(self, make_sampler: Callable[[], Sampler], how: UpdateMode) -> None:
        """Load model and environment; `how` is a push's effect on running completions."""
        prepare_actor()
        self._sampler = make_sampler()
        engine = self._sampler.engine
        assert isinstance(engine, UpdatableEngine), f"{type(engine).__name__} has no weights of its own"
        self._engine: UpdatableEngine = engine
        self._how: UpdateMode = how
        self._version = -1
        """Version of the weights that a push has proved: the sampler's own may differ from the trainer's."""
        self._updating = asyncio.Lock()
        self._updated = asyncio.Event()
        self._logprobs: dict[int, Logprobs] = {}
        """Log-probs of the probe for each version that came or is coming, by version."""
        self._tokens = 0
        self._incarnation = 0
        self._under_way: set[asyncio.Task[None]] = set()
        self._done: list[SampledGroup] = []
        """Results not yet collected."""
        self._parts: list[SampledPart] = []
        """Parts of other groups, likewise."""
        self._longest = 0.0
        """Seconds that one of these took, at most."""
        self._error: EngineLost | None = None
        self._some_done, self._all_done = asyncio.Event(), asyncio.Event()

    async def ping(self) -> tuple[int, int, int]:
        """Return process number, version and tokens so far: a sign of life."""
        return os.getpid(), self._version, self._tokens

    async def update(self, weights: list[WeightArrays | Awaitable[WeightArrays]]) -> str:
        """Take new weights, small ones inline and others fetched here.

        Ray fetches nothing inside a list. Returns "" or the reason for refusing them; a failure that leaves nothing
        whole is raised.
        """
        async with self._updating:
            given = weights[0]
            packed = given if isinstance(given, WeightArrays) else await given
            try:
                await self._engine.update(unpack(packed, self._logprobs_of(packed.version)), self._how)
            except PushRefused as refused:
                return str(refused)
            # Not when a later proof comes: those of weights on their way are still to be compared with
            self._logprobs = {later: own for later, own in self._logprobs.items() if later > packed.version}
            self._version = packed.version
        self._updated.set()
        return ""

    async def prove(self, version: int, logprobs: tuple[float, ...]) -> None:
        """Take the log-probs of a version's probe; idempotent."""
        coming = self._logprobs_of(version)
        if not coming.done():
            coming.set_result(logprobs)

    def _logprobs_of(self, version: int) -> Logprobs:
        return self._logprobs.setdefault(version, Future())

    async def follow(self, step: int, num_steps: int, epochs: float) -> None:
        follow(self._sampler.environment, step, num_steps, epochs)

    async def begin(self, jobs: Jobs) -> None:
        """Start the groups of some tickets."""
        self._incarnation = jobs.incarnation
        self._all_done.clear()
        for ticket in jobs.tickets:
            kept = NOTHING_KEPT if jobs.kept is None else jobs.kept.get(ticket.number, KeptGroup())
            tell = None if jobs.kept is None else partial(self._tell, ticket)
            task = asyncio.get_running_loop().create_task(self._roll_out(ticket, replace(kept, tell=tell)))
            self._under_way.add(task)
            task.add_done_callback(self._end)

    async def collect(self) -> SampledBatch:
        """Return finished groups and parts. EngineLost where one lost the engine."""
        while not (self._some_done.is_set() or self._parts):
            with suppress(TimeoutError):
                async with asyncio.timeout(PARTS_SECONDS):
                    await self._some_done.wait()
        # Others may be finished at about the same time, and each answer has its price
        with suppress(TimeoutError):
            async with asyncio.timeout(patience(self._longest)):
                await self._all_done.wait()
        if self._error is not None:
            raise self._error
        done, self._done, self._longest = self._done, [], 0.0
        parts, self._parts = self._parts, []
        self._some_done.clear()
        stats = self._engine.take_stats()
        self._tokens += stats.sampled_tokens
        return SampledBatch(self._incarnation, tuple(done), stats, tuple(parts))

    def _tell(self, ticket: Ticket, kind: str, index: int, value: Any) -> None:
        if kind != "end":
            self._parts.append(SampledPart(ticket.number, ticket.attempt, kind, index, value))

    async def _roll_out(self, ticket: Ticket, kept: KeptGroup) -> None:
        """Sample and score a ticket's group, once the required weights are here."""
        started = time.monotonic()

        async def ready() -> None:
            nonlocal started
            while self._version < ticket.least_version:
                self._updated.clear()
                await self._updated.wait()
            started = time.monotonic()

        try:
            group = await roll_out(self._sampler, ticket.prompt, ticket.group_size, ticket.sampling, ready, kept)
        except EngineLost as lost:
            self._error = lost
        # Ray never answers a call that raised SystemExit, or one that foreign code cancelled
        except (Exception, SystemExit, asyncio.CancelledError) as raised:
            error = (type(raised).__name__, str(raised))
            self._done.append(SampledGroup(ticket.number, ticket.attempt, error=error))
        else:
            self._done.append(SampledGroup(ticket.number, ticket.attempt, SavedGroup.of(group)))
        self._parts = [part for part in self._parts if part.number != ticket.number]
        self._longest = max(self._longest, time.monotonic() - started)
        self._some_done.set()

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._under_way.discard(task)
        if not self._under_way:
            self._all_done.set()

    async def environment_metrics(self) -> dict[str, float]:
        return metrics_of(self._sampler.environment)

    async def close(self) -> None:
        """Release worker processes and the engine's."""
        try:
            if isinstance(self._engine, Closable):
                self._engine.close()
        finally:
            close_environment(self._sampler.environment)


def patience(seconds: float) -> float:
    """Return the seconds a finished group waits for others."""
    return min(0.1, 0.05 * seconds)
