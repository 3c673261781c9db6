"""A sampler: a process of its own with an engine on weights of its own, and the environment.

One event loop does everything, with room for a thousand calls at a time, so that a push of weights never waits for the
completions under way.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable

from covey.cluster.wire import Job, PackedWeights, Result, unpack
from covey.engine.base import Closable, EngineLost, PushRefused, UpdatableEngine, UpdateMode
from covey.rollouts.rollout import roll_out
from covey.rollouts.sampler import Sampler
from covey.types import Group


class SamplerActor:
    """Rolls out the prompts that it is given. Ray makes one in each sampler's process."""

    def __init__(self, make_sampler: Callable[[], Sampler], how: UpdateMode) -> None:
        """`make_sampler` loads model and environment. `how` says what a push does to completions under way."""
        self._sampler = make_sampler()
        self._how: UpdateMode = how
        self._updating = asyncio.Lock()
        self._updated = asyncio.Event()
        self._tokens = 0

    async def ping(self) -> tuple[int, int, int]:
        """Return process number, version and tokens sampled so far: a sign of life."""
        return os.getpid(), self._version, self._tokens

    async def update(self, weights: list[Awaitable[PackedWeights]]) -> str:
        """Take new weights, fetched here (Ray fetches what stands in a list only where it is awaited).

        Returns "" or why they were not taken; a failure that leaves nothing whole is raised.
        """
        async with self._updating:
            packed = await weights[0]
            try:
                await self._engine.update(unpack(packed), self._how)
            except PushRefused as refused:
                return str(refused)
        self._updated.set()
        return ""

    async def follow(self, step: int, num_steps: int, epochs: float) -> None:
        """Tell the environment how far training is."""
        self._sampler.environment.follow(step, num_steps, epochs)

    async def roll_out(self, job: Job) -> Result:
        """Sample and score the group of a ticket, once the weights it demands are here."""
        ticket = job.ticket
        while self._version < ticket.least_version:
            self._updated.clear()
            await self._updated.wait()
        group: Group | None = None
        error: tuple[str, str] | None = None
        try:
            group = await roll_out(self._sampler, ticket.prompt, ticket.group_size, ticket.sampling)
        except EngineLost:
            raise
        except (Exception, SystemExit) as raised:  # Ray never answers a call that raised SystemExit
            error = (type(raised).__name__, str(raised))
        stats = self._engine.take_stats()
        self._tokens += stats.sampled_tokens
        return Result(ticket, job.incarnation, group, error, stats)

    async def environment_metrics(self) -> dict[str, float]:
        """Return what the environment logs itself, since this was last asked."""
        return dict(self._sampler.environment.metrics())

    async def close(self) -> None:
        """Let go of worker processes, and of an engine's own."""
        try:
            if isinstance(self._engine, Closable):
                self._engine.close()
        finally:
            self._sampler.environment.close()

    @property
    def _engine(self) -> UpdatableEngine:
        engine = self._sampler.engine
        assert isinstance(engine, UpdatableEngine), f"{type(engine).__name__} has no weights of its own"
        return engine

    @property
    def _version(self) -> int:
        return self._engine.version
