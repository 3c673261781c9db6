"""The figures in docs/trust/guarantees.md: how far from its tolerance each promise is.

OMP_NUM_THREADS=1 python -m tests.guarantees.measure
"""

import asyncio
import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from covey.engine.native.engine import NativeEngine
from covey.types import Sampling

from ..engine.tiny import tiny_policy
from ..support.builders import ARCHITECTURES
from .update import test_sampled_is_trained as engine_and_trainer
from .update.test_update_is_invariant import EVERYTHING_ON, PLACES, WAYS, any_ways
from .update.test_update_mistakes_are_found import MISTAKES, ONCE, seen
from .update.updates import Distance, any_groups, farthest, make_case

NUM_RANDOM = 20
ROLLOUTS = 32
"""Of each of 16 prompts."""


def largest(found: list[Distance]) -> str:
    gradient, metric = max(each.gradient for each in found), max(found, key=lambda each: each.metric)
    return f"gradient {gradient:.1e}, metrics {metric.metric:.1e} ({metric.name})"


def invariance(architecture: str, dtype: torch.dtype, lora_rank: int) -> str:
    """Over all ways of the table, and over random groups each in four random ways."""
    make = functools.partial(make_case, architecture, dtype, EVERYTHING_ON, lora_rank=lora_rank)
    found = [farthest(make(), [how for ways in WAYS.values() for how in ways])]
    for seed in range(NUM_RANDOM):
        case = make(any_groups(seed))
        found.append(farthest(case, any_ways(case, seed, 4)))
    return largest(found)


def mistake(name: str) -> str:
    """What the checker says of it."""
    case = make_case(algorithm=replace(ONCE, aggregation=MISTAKES[name].aggregation), num_updates=1)
    with pytest.MonkeyPatch.context() as patch:
        return largest([seen(case, MISTAKES[name], patch)])


def mismatch(architecture: str, adapters: bool) -> str:
    """Between engine and trainer, over all sampling settings and the three layouts."""
    policy = engine_and_trainer.policy_of(architecture, adapters)
    gaps = []
    for sampling in engine_and_trainer.SAMPLINGS.values():
        engine = NativeEngine(policy, 1 << 24, max_rows=5)
        groups = engine_and_trainer.groups_of(engine_and_trainer.sampled(engine, sampling, n=16))
        gaps += [
            engine_and_trainer.gap(policy, groups, sampling, packing) for packing in ("shared", "packed", "padded")
        ]
    return f"{max(gaps):.1e} nats"


def differing(architecture: str, dtype: torch.dtype) -> str:
    """Rollouts that differ between one large batch and waves of five rows."""
    policy = tiny_policy(architecture, dtype)

    async def sampled(max_rows: int) -> list[tuple[int, ...]]:
        engine = NativeEngine(policy, 1 << 28, max_rows)
        prompts = [[(7 * i + j) % 260 for j in range(1 + i % 9)] for i in range(16)]
        calls = (engine.generate(p, ROLLOUTS, Sampling(max_tokens=60, seed=i)) for i, p in enumerate(prompts))
        return [completion.token_ids for group in await asyncio.gather(*calls) for completion in group]

    pairs = list(zip(asyncio.run(sampled(512)), asyncio.run(sampled(5)), strict=True))
    return f"{sum(a != b for a, b in pairs)} of {len(pairs)} rollouts of 60 tokens"


def show(title: str, figures: dict[str, Callable[[], str]]) -> None:
    print(f"\n{title}")
    for name, measure in figures.items():
        print(f"  {name:40} {measure()}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    places = [(architecture, dtype, rank) for architecture, dtype, _ in PLACES for rank in (0, 4)]
    show(
        "1. relative error of the update",
        {f"{a} {d} {'LoRA' if r else 'full'}": functools.partial(invariance, a, d, r) for a, d, r in places},
    )
    show("1. mistakes put in on purpose", {name: functools.partial(mistake, name) for name in MISTAKES})
    pairs = [(architecture, adapters) for architecture in ARCHITECTURES for adapters in (False, True)]
    show(
        "2. engine against trainer, float32",
        {f"{a} {'LoRA' if adapters else 'full'}": functools.partial(mismatch, a, adapters) for a, adapters in pairs},
    )
    kinds = [("gpt2", torch.float64), *((name, torch.float32) for name in ARCHITECTURES)]
    show("5. rollouts that depend on the batch", {f"{a} {d}": functools.partial(differing, a, d) for a, d in kinds})


if __name__ == "__main__":
    main()
