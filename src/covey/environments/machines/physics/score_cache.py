"""Keep outcomes of machines: a policy that learns builds the same ones many times."""

from covey.environments.async_cache import AsyncCache
from covey.environments.machines.design.tree import canonical
from covey.environments.machines.design.types import Tree
from covey.environments.machines.physics.simulators import Simulates
from covey.environments.machines.physics.trajectory import Outcome
from covey.environments.machines.physics.worlds import World
from covey.types import Failure

Key = tuple[Tree, World, str]
"""The machine in its one order, what stands around it, and the physics version."""


class _Outcomes(AsyncCache[Key, Outcome | Failure]):
    def is_worth_keeping(self, value: Outcome | Failure) -> bool:
        return not isinstance(value, Failure)


class CachedSimulators:
    """Simulate each machine once. Scores are computed from outcomes, so every score has the same cache."""

    def __init__(self, simulators: Simulates, size: int) -> None:
        """Keep the last `size` outcomes, with 0 none. Takes over the simulators: `close` closes them."""
        self._simulators = simulators
        self._outcomes = _Outcomes(size)
        self.take_counts = self._outcomes.take_counts

    @property
    def version(self) -> str:
        return self._simulators.version

    async def run(self, tree: Tree, world: World) -> Outcome | Failure:
        """Return the outcome of a machine in its one order, from the cache where it is there."""
        ordered = canonical(tree)
        return await self._outcomes.get((ordered, world, self.version), lambda: self._simulators.run(ordered, world))

    def close(self) -> None:
        self._simulators.close()
