"""Random faults at random moments: whatever comes together, nothing is lost, trained twice or older than the bound."""

import asyncio
import random

import pytest

from covey.cluster import pool
from covey.engine.base import EngineLost, PushRefused, WeightSet
from covey.policy.policy import Policy
from covey.rollouts.buffer import Bound

from .faulty import Engine, Plan, training

NUM_STEPS = 30


class Chaos:
    """Draws what goes wrong at each call. A sampler that froze is found by its silence."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.calm = False

    async def on_generate(self, engine: Engine) -> None:
        await asyncio.sleep(self.rng.expovariate(1 / 0.003))
        drawn = 1.0 if self.calm else self.rng.random()
        if drawn < 0.02:
            engine.actor.die()
        elif drawn < 0.03:
            engine.actor.is_frozen = True
        elif drawn < 0.04:
            engine.actor.is_deaf = True
            raise EngineLost("a device is gone")
        elif drawn < 0.06:
            await asyncio.sleep(0.05)

    async def on_update(self, engine: Engine, weights: WeightSet) -> None:
        drawn = 1.0 if self.calm else self.rng.random()
        await asyncio.sleep(self.rng.expovariate(1 / 0.002))
        if drawn < 0.03:
            raise PushRefused("the probe differs")
        if drawn < 0.05:
            engine.actor.die()
        elif drawn < 0.06:
            raise MemoryError("no room for a second copy")

    def on_start(self, number: int) -> None:
        if number >= 3 and not self.calm and self.rng.random() < 0.1:
            raise MemoryError("cannot allocate")


@pytest.mark.parametrize("seed", range(8))
def test_random_faults_lose_nothing_and_keep_the_bound(
    policy: Policy, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("MOST_LOSSES", "MOST_ATTEMPTS"):  # here chance alone is what kills so often
        monkeypatch.setattr(pool, limit, 1000)
    rng = random.Random(f"bound {seed}")
    chaos = Chaos(seed)
    plan = Plan(on_generate=chaos.on_generate, on_update=chaos.on_update, on_start=chaos.on_start)
    bound = Bound(rng.choice((1, 3, 4)), rng.choice((0, 1, 2, 4)), rng.choice((1, 1, 2)))
    with training(policy, plan, bound, samplers=3, silence=0.4, groups_per_sampler=rng.choice((1, 2, 8))) as run:
        run.advance(NUM_STEPS)
        assert run.counted["samplers/lost"] > 0
        chaos.calm = True
        run.advance(3)
        run.wait_until(lambda: all(row["state"] == "waiting" for row in run.pool.status()))
        assert len(run.source._buffer.finished) == len(run.source._buffer.pending)
