"""What do turns cost?

    python -m benchmarks.environments.sessions [--turns 8] [--tokens 64] [--repetitions 7] [--prompts]

Episodes of several turns against completions of one turn that are as long in all, tokens sampled a second, the nano
model (0.8 million weights) with random weights, no stop token, replies of REPLY tokens at once. Of both, the groups are
under way at the same time. Repetitions alternate, and a ratio is of two that ran one after the other; that of processor
seconds is less disturbed by others. `prompts` is the same episodes on an engine without sessions: each turn a prompt
that holds the whole history.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from covey.engine.base import PromptSession, Session
from covey.engine.native.engine import NativeEngine
from covey.policy.models.loading import load_policy
from covey.policy.policy import Policy
from covey.policy.settings import ModelConfig
from covey.types import Sampling

PROMPT, REPLY = 32, 8
"""Tokens of a prompt, and of what the environment says between two turns."""
GROUPS, SIZE = 8, 8
CACHE_BYTES = 2**30
Opens = Callable[[NativeEngine, Sequence[int], Sampling], Sequence[Session]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the episodes."""

    turns: int
    tokens: int
    """Of a turn."""

    @property
    def length(self) -> int:
        """Tokens after the prompt."""
        return self.turns * self.tokens + (self.turns - 1) * REPLY


def own_sessions(engine: NativeEngine, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[Session]:
    """Open a group on the engine's own sessions."""
    return engine.open(prompt_ids, SIZE, sampling)


def prompt_sessions(engine: NativeEngine, prompt_ids: Sequence[int], sampling: Sampling) -> Sequence[Session]:
    """Open a group as on an engine without sessions."""
    first = asyncio.ensure_future(engine.generate(prompt_ids, SIZE, sampling))
    return [PromptSession(engine, prompt_ids, first, index) for index in range(SIZE)]


async def several_turns(engine: NativeEngine, shape: Shape, opens: Opens) -> None:
    """Play all episodes."""

    async def play(session: Session, seed: int) -> None:
        await session.first()
        for turn in range(1, shape.turns):
            await session.extend(range(REPLY), Sampling(max_tokens=shape.tokens, seed=1000 * turn + seed))
        assert opens is prompt_sessions or session.re_encoded_tokens == 0
        session.close()

    episodes = []
    for group in range(GROUPS):
        opened = opens(engine, prompt_of(group), Sampling(max_tokens=shape.tokens, seed=group))
        episodes += [play(session, SIZE * group + index) for index, session in enumerate(opened)]
    await asyncio.gather(*episodes)


async def one_turn(engine: NativeEngine, shape: Shape) -> None:
    """Sample completions that are as long as the episodes."""
    samplings = [Sampling(max_tokens=shape.length, seed=group) for group in range(GROUPS)]
    await asyncio.gather(*(engine.generate(prompt_of(g), SIZE, sampling) for g, sampling in enumerate(samplings)))


def prompt_of(group: int) -> list[int]:
    """Return the tokens of a group's prompt."""
    return [(7 * group + index) % 250 for index in range(PROMPT)]


def tokens_a_second(engine: NativeEngine, work: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Do the work, and return the tokens it sampled a second, of wall time and of processor time."""

    async def run() -> None:
        await work()

    engine.take_stats()
    started = time.perf_counter(), time.process_time()
    asyncio.run(run())
    seconds = time.perf_counter() - started[0], time.process_time() - started[1]
    sampled = engine.take_stats().sampled_tokens
    return sampled / seconds[0], sampled / seconds[1]


def policy_without_stop() -> Policy:
    """Return the nano policy, whose completions end at their limit alone."""
    policy = load_policy(ModelConfig(), seed=0)
    policy.causal_lm.generation_config.eos_token_id = None
    policy.tokenizer.eos_token = None
    return policy


def measure(shape: Shape, repetitions: int, with_prompts: bool) -> dict[str, list[tuple[float, float]]]:
    """Return the tokens a second of each way, one number a repetition, after one to warm up."""
    engine = NativeEngine(policy_without_stop(), CACHE_BYTES, GROUPS * SIZE)
    ways: dict[str, Callable[[], Awaitable[None]]] = {
        "one turn": lambda: one_turn(engine, shape),
        "sessions": lambda: several_turns(engine, shape, own_sessions),
    }
    if with_prompts:
        ways["prompts"] = lambda: several_turns(engine, shape, prompt_sessions)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for repetition in range(repetitions + 1):
        for name, work in ways.items():
            rates = tokens_a_second(engine, work)
            if repetition:
                found[name].append(rates)
    return found


def column(rates: Sequence[tuple[float, float]], single: Sequence[tuple[float, float]], which: int) -> str:
    """Return the median rate, and the median, smallest and largest of its ratios."""
    ratios = [rate[which] / one[which] for rate, one in zip(rates, single, strict=True)]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"{statistics.median(rate[which] for rate in rates):.0f} | {spread}"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.environments.sessions", description=__doc__)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of a turn")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--prompts", action="store_true", help="measure whole histories as prompts too")
    given = parser.parse_args(argv)
    shape = Shape(given.turns, given.tokens)
    found = measure(shape, given.repetitions, given.prompts)
    print(f"{GROUPS * SIZE} episodes of {shape.turns} turns of {shape.tokens} tokens, {shape.length} tokens in all")
    print("| way | tokens/s | of one turn's | a processor second | of one turn's |\n|---|---|---|---|---|")
    for name, rates in found.items():
        cells = [column(rates, found["one turn"], which) for which in (0, 1)]
        print(f"| {name} | {cells[0]} | {cells[1]} |")
    print(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} processors")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
