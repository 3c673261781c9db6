"""By how much does a model sample slower on the general path than on the fast one?

    python -m benchmarks.speed.paths MODEL        # a folder or a name on the hub; one thread, three rounds

The same attention model is sampled by both engines in turn, the native one and the one in lockstep of the general path:
four prompts of one length, eight completions each. What counts is the ratio of the processor's seconds on one thread,
which work beside it changes little.
"""

import argparse
import asyncio
import statistics
import sys
import time

import torch

from covey.engine.base import Engine
from covey.engine.build import build_native, build_transformers
from covey.engine.settings import EngineConfig
from covey.policy.models.loading import load_policy
from covey.policy.models.text import ordinary_ids
from covey.policy.policy import Policy
from covey.types import Sampling

PROMPTS, MEMBERS, PROMPT, TOKENS = 4, 8, 64, 32


async def sample(engine: Engine, policy: Policy) -> int:
    """Tokens that were sampled."""
    ids = ordinary_ids(policy, PROMPTS + PROMPT)
    prompts = [ids[place : place + PROMPT] for place in range(PROMPTS)]
    found = await asyncio.gather(*(engine.generate(p, MEMBERS, Sampling(max_tokens=TOKENS)) for p in prompts))
    return sum(len(completion.token_ids) for completions in found for completion in completions)


def seconds_a_token(engine: Engine, policy: Policy) -> float:
    started = time.process_time()
    tokens = asyncio.run(sample(engine, policy))
    return (time.process_time() - started) / tokens


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed.paths", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    policy, settings = load_policy(given.model, trainable=False), EngineConfig(max_rows=PROMPTS * MEMBERS)
    ratios = []
    for _ in range(given.rounds):
        fast, general = (
            seconds_a_token(build(policy, settings, "auto"), policy) for build in (build_native, build_transformers)
        )
        ratios.append(general / fast)
        print(
            f"native {1 / fast:.0f} tokens/s, lockstep {1 / general:.0f} tokens/s: {ratios[-1]:.1f} times", flush=True
        )
    print(f"{statistics.median(ratios):.1f} times slower ({min(ratios):.1f} to {max(ratios):.1f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
