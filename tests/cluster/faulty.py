"""Samplers that fail as a test says, over a Ray of one process, and a trainer that asserts what must hold."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from covey.cluster.pool import SamplerPool
from covey.cluster.settings import DevicesConfig
from covey.cluster.slot import PoolLimits
from covey.cluster.source import RaySource
from covey.engine.base import EngineStats, UpdateMode, WeightSet
from covey.engine.fake import FakeEngine
from covey.policy.policy import Policy
from covey.rollouts.buffer import Bound
from covey.rollouts.sampler import Sampler
from covey.rollouts.source import LocalSource
from covey.rollouts.stream import PromptStream
from covey.system.waits.watchdog import Watchdog
from covey.types import Completion, Group, Sampling

from ..support.fake_ray import Actor, FakeRay, fake_ray
from ..support.scripted import Scripted
from ..support.small import TOKENIZER, varied

PATIENCE = 20.0
"""Seconds that a wait of these tests may take on a loaded machine."""
NUM_PROMPTS = 40
ONE_STALE = Bound(groups_per_step=4, max_staleness=1)


@dataclass
class Plan:
    """What the samplers do. Hooks get the engine and run before the honest work; they may fail or never return."""

    seconds: float = 0.002
    """Of sampling one group."""
    on_generate: Callable[["Engine"], Awaitable[None]] | None = None
    on_update: Callable[["Engine", WeightSet], Awaitable[None]] | None = None
    on_start: Callable[[int], None] | None = None
    """Gets the number of the sampler, in the order in which they are started."""
    verdict: Callable[..., float] = varied
    ray: FakeRay = field(default_factory=FakeRay)
    num_started: int = 0


@dataclass
class Engine:
    """An engine that samples nothing, takes its time and fails as planned."""

    plan: Plan
    number: int
    version: int = -1
    calls: int = 0
    tokens: int = 0
    prompt_ids: tuple[int, ...] = ()

    @property
    def actor(self) -> Actor:
        return self.plan.ray.actors[self.number]

    async def generate(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
        self.calls += 1
        self.prompt_ids = tuple(prompt_ids)
        version = self.version  # of the first token: what counts as the age
        if self.plan.on_generate is not None:
            await self.plan.on_generate(self)
        await asyncio.sleep(self.plan.seconds)
        self.tokens += n
        return [Completion((8 + index,), (-0.5,), "stop", version) for index in range(n)]

    async def update(self, weights: WeightSet, how: UpdateMode) -> None:
        if self.plan.on_update is not None:
            await self.plan.on_update(self, weights)
        self.version = weights.version

    def load_weights(self, version: int) -> None:
        self.version = version

    def take_stats(self) -> EngineStats:
        tokens, self.tokens = self.tokens, 0
        return EngineStats(sampled_tokens=tokens)


def environment(plan: Plan) -> Scripted:
    return Scripted({"train": [f"prompt {index}:" for index in range(NUM_PROMPTS)], "test": ["test:"]}, plan.verdict)


def make_sampler(plan: Plan) -> Sampler:
    number, plan.num_started = plan.num_started, plan.num_started + 1
    if plan.on_start is not None:
        plan.on_start(number)
    return Sampler(Engine(plan, number), environment(plan), TOKENIZER)


@dataclass
class Training:
    """The loop of a run over a source, without the training. It knows what must come out of it."""

    source: RaySource
    plan: Plan
    step: int = 0
    trained: list[str] = field(default_factory=list)
    """Ids of prompts, in order."""
    ages: list[int] = field(default_factory=list)
    counted: dict[str, float] = field(default_factory=dict)

    @property
    def pool(self) -> SamplerPool:
        assert self.source._pool is not None
        return self.source._pool

    def take(self) -> list[Group]:
        bound = self.source._buffer.bound
        groups = self.source.take(bound.groups_per_step)
        self.trained += [group.prompt.id for group in groups]
        self.ages += [bound.age(rollout.policy_version, self.step) for group in groups for rollout in group.rollouts]
        return groups

    def advance(self, num_steps: int) -> None:
        """Take groups and publish the next version so often, then assert that nothing is lost, twice or too old."""
        for _ in range(num_steps):
            self.take()
            self.step += 1
            self.source.publish(self.step)
            for name, number in self.source.take_metrics().items():
                self.counted[name] = self.counted.get(name, 0.0) + number
        stream = PromptStream(self.source.stream.prompts, self.source.stream.seed, shuffle=True)
        assert self.trained == [prompt.id for prompt, _ in stream.draw(len(self.trained))]
        self.source._buffer.check_conservation()
        assert min(self.ages) >= 0
        assert max(self.ages) <= self.source._buffer.bound.max_staleness

    def wait_until(self, condition: Callable[[], object]) -> None:
        until = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < until, "what was waited for never came"
            time.sleep(0.002)

    def in_pool(self, work: Callable[[], None]) -> None:
        """Do something in the pool's thread, where the actors of the fake live."""
        done = threading.Event()
        self.pool._loop.call_soon_threadsafe(lambda: (work(), done.set()))
        assert done.wait(PATIENCE)


@contextmanager
def training(
    policy: Policy,
    plan: Plan | None = None,
    bound: Bound = ONE_STALE,
    samplers: int = 2,
    silence: float = PATIENCE,
    loading: float = PATIENCE,
    groups_per_sampler: int = 4,
) -> Iterator[Training]:
    """A source over samplers that do as planned."""
    plan = plan or Plan()
    local = LocalSource(
        sampler=Sampler(FakeEngine(lambda ids, index: (8,), vocab_size=64), environment(plan), TOKENIZER),
        stream=PromptStream(environment(plan).prompts("train"), seed=0, shuffle=True),
        group_size=2,
        sampling=Sampling(),
    )
    devices = DevicesConfig(sampler=samplers, groups_per_sampler=groups_per_sampler)
    with fake_ray() as plan.ray:
        source = RaySource(local, policy, bound, Watchdog())
        try:
            source.start(partial(make_sampler, plan), devices, "keep", PoolLimits(loading, silence))
            yield Training(source, plan)
        finally:
            source.close()
