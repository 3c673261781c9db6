"""Machines that were simulated once are not simulated again: a policy that learns builds the same ones many times."""

import asyncio
from collections import OrderedDict

from covey.environments.machines.simulators import Simulates
from covey.environments.machines.trajectory import Outcome
from covey.environments.machines.tree import canonical
from covey.environments.machines.types import Tree
from covey.environments.machines.worlds import World
from covey.types import Failure

Key = tuple[Tree, World, str]
"""The machine in its one order, what stands around it, and the physics version."""


class CachedSimulators:
    """Outcomes by machine. Equal machines that are asked for at the same time are simulated once; a Failure is never
    kept. Scores are computed from outcomes, so every score has the same cache."""

    def __init__(self, simulators: Simulates, size: int) -> None:
        """Keeps the last `size` outcomes; 0 keeps none. Takes over the simulators: `close` closes them."""
        if size < 0:
            raise ValueError(f"cache_size must be >= 0, got {size}")
        self._simulators = simulators
        self._size = size
        self._kept: OrderedDict[Key, Outcome] = OrderedDict()
        self._running: dict[Key, asyncio.Task[Outcome | Failure]] = {}
        self._num_asked = 0
        self._num_simulated = 0

    @property
    def version(self) -> str:
        return self._simulators.version

    async def run(self, tree: Tree, world: World) -> Outcome | Failure:
        """From the cache where it is there."""
        self._num_asked += 1
        key = (canonical(tree), world, self.version)
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            return kept
        running = self._running.get(key)
        if running is None or running.get_loop() is not asyncio.get_running_loop():
            running = asyncio.get_running_loop().create_task(self._simulate(key))
            self._running[key] = running
        return await asyncio.shield(running)

    def take_counts(self) -> tuple[int, int]:
        """(machines that were asked for, simulations that were made for them) since this was last called."""
        counts = self._num_asked, self._num_simulated
        self._num_asked = self._num_simulated = 0
        return counts

    def close(self) -> None:
        self._simulators.close()

    async def _simulate(self, key: Key) -> Outcome | Failure:
        try:
            self._num_simulated += 1
            outcome = await self._simulators.run(key[0], key[1])
            if not isinstance(outcome, Failure):
                self._keep(key, outcome)
            return outcome
        finally:
            self._running.pop(key, None)

    def _keep(self, key: Key, outcome: Outcome) -> None:
        self._kept[key] = outcome
        while len(self._kept) > self._size:
            self._kept.popitem(last=False)
