"""Runs that a preflight looks at, an environment that knows right answers, an engine that is not what it should be."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest

from covey.engine.base import EngineStats
from covey.engine.build import ENGINES
from covey.engine.native.engine import NativeEngine
from covey.engine.settings import EngineConfig
from covey.environments.base import Environment
from covey.policy.policy import Policy
from covey.run.build import Run, build_run
from covey.system.waits.timer import PhaseTimer
from covey.types import Completion, Failure, Prompt, Reward, Sampling
from covey_preflight.preflight import STAGES, raise_on_failure, run_checks
from covey_preflight.subject import Check, PreflightContext
from tests.support.scripted import Scripted

from ..support.small import scripted, small_config

Build = Callable[..., PreflightContext]


@contextmanager
def subjects() -> Iterator[Build]:
    """A maker of subjects from an environment and settings of small runs, which are closed at the end."""
    runs: list[Run] = []

    def build(environment: Environment | None = None, **changes: Any) -> PreflightContext:
        config = small_config(**changes)
        runs.append(build_run(config, environment or scripted(), PhaseTimer()))
        return PreflightContext(runs[-1], config)

    yield build
    for run in runs:
        run.close()


def slow(subject: PreflightContext) -> PreflightContext:
    """The same run on a machine where each look at the clock is a minute later."""
    return replace(subject, clock=count(0.0, 60.0).__next__)


def finding(subject: PreflightContext, name: str) -> Check:
    """Of one check alone."""
    return next(stage.look for stage in STAGES if stage.name == name)(subject)


def refusal(subject: PreflightContext) -> str:
    """The line a run is refused with."""
    with pytest.raises(ValueError) as caught:
        raise_on_failure(run_checks(subject))
    return str(caught.value)


@dataclass
class Golden:
    """A scripted environment that knows answers, and notes what it was asked to score."""

    verdict: Callable[[Prompt, str], Any]
    gold_of: Callable[[Prompt], str | None]
    num_scored: int = 0
    unlogged: list[float] = field(default_factory=list)

    def prompts(self, split: Any) -> list[Prompt]:
        return Scripted({"train": [f"{i}:" for i in range(8)], "test": ["test:"]}, self.verdict).prompts(split)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        self.num_scored += len(completions)
        self.unlogged += [1.0] * len(completions)
        verdicts = [self.verdict(prompt, text) for text in completions]
        return [verdict if isinstance(verdict, Failure) else Reward(verdict, {}) for verdict in verdicts]

    def gold(self, prompt: Prompt) -> str | None:
        return self.gold_of(prompt)

    def metrics(self) -> dict[str, float]:
        found, self.unlogged = self.unlogged, []
        return {"num": float(len(found))}


@dataclass
class Spoilt:
    """The real engine, but for what `spoil` does to its completions or `sampling` to what is asked of it."""

    engine: NativeEngine
    spoil: Callable[[Completion], Completion] = lambda completion: completion
    sampling: Callable[[Sampling], Sampling] = lambda sampling: sampling
    version: int = 0

    async def generate(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
        return [self.spoil(c) for c in await self.engine.generate(prompt_ids, n, self.sampling(sampling))]

    def load_weights(self, version: int) -> None:
        self.engine.load_weights(version)

    def take_stats(self) -> EngineStats:
        return self.engine.take_stats()


def use_engine(monkeypatch: pytest.MonkeyPatch, **how: Any) -> None:
    def spoilt(policy: Policy, settings: EngineConfig, kernels: str) -> Spoilt:
        return Spoilt(NativeEngine(policy, settings.cache_bytes, settings.max_rows, kernels), **how)

    monkeypatch.setitem(ENGINES, "native", spoilt)
