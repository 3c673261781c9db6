"""Simulate machines in worker processes, as building models holds the interpreter.

The cost of a simulation is bounded by the machine (blocks, degrees of freedom, a fixed number of steps), so the clock
decides no score. It only guards against the impossible: a worker that hangs or crashes costs one sample.
"""

from collections.abc import Callable
from dataclasses import astuple
from importlib.util import find_spec
from typing import Any

from covey.system.workers.pool import WorkerPool, WorkerSettings
from covey.types import Failure
from covey_tasks.async_cache import AsyncCache
from covey_tasks.machines.design.tree import canonical
from covey_tasks.machines.design.types import Tree
from covey_tasks.machines.physics.constants import MISSING, physics_version
from covey_tasks.machines.physics.trajectory import Outcome, outcome_of_data
from covey_tasks.machines.physics.worlds import World

MAX_CALLS = 20_000
"""Machines after which a worker is replaced."""


class Simulators:
    """Simulates machines in worker processes, which start with the first machine.

    >>> asyncio.run(Simulators().run((ROOT, Block(1, 0, 0), Block(2, 0, 2), Block(2, 0, 3)), "car")).forward > 20
    True
    """

    def __init__(
        self, num_workers: int = 2, timeout: float = 5.0, function: Callable[..., dict[str, Any]] | None = None
    ) -> None:
        """Set the workers, started later; each machine may take `timeout` seconds.

        `function` is `physics.run` but in tests. Raises ValueError without MuJoCo.
        """
        if find_spec("mujoco") is None:
            raise ValueError(MISSING)
        self._settings = WorkerSettings(num_workers, timeout, max_calls=MAX_CALLS)
        self._function = function
        self._pool: WorkerPool | None = None
        self.version = physics_version()
        """Names everything that outcomes depend on besides the design and world."""

    async def run(self, tree: Tree, world: World) -> Outcome | Failure:
        """Simulate a tree; the order of its blocks does not matter."""
        if self._pool is None:
            from covey_tasks.machines.physics import simulate

            self._pool = WorkerPool([self._function or simulate.run], self._settings)
        data = await self._pool.call(0, {"rows": [astuple(block) for block in tree], "world": world})
        return data if isinstance(data, Failure) else outcome_of_data(data)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


Key = tuple[Tree, World, str]
"""The machine in its one order, its surroundings, and the physics version."""


class CachedSimulators:
    """Simulates each machine once; all scores share the cached outcomes."""

    def __init__(self, simulators: Simulators, size: int) -> None:
        """Keep the last `size` outcomes; `close` closes the simulators too."""
        self._simulators = simulators
        self._outcomes: AsyncCache[Key, Outcome | Failure] = AsyncCache(size)
        self.take_counts = self._outcomes.take_counts

    @property
    def version(self) -> str:
        return self._simulators.version

    async def run(self, tree: Tree, world: World) -> Outcome | Failure:
        ordered = canonical(tree)
        return await self._outcomes.get((ordered, world, self.version), lambda: self._simulators.run(ordered, world))

    def close(self) -> None:
        self._simulators.close()
