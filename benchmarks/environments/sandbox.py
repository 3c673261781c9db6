"""How fast programs are judged: python -m benchmarks.environments.sandbox [--tier TIER] [--slots N] [--programs N]

Each execution is one program of ten tests, comparison included, in a process of its own at full isolation. Targets on
two idle cores: 300 executions a second, half of them within 8 ms, 95 % within 20 ms.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from covey_sandbox import CallTest, Sandbox, SandboxFailed, Tier

CODE = """
def is_balanced(text):
    depth = 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth < 0:
            return False
    return depth == 0
"""
TEXTS = ("", "()", ")(", "(()())", "(", "())", "((()))", "()()()", ")", "(a(b)c)")
EXPECTED = (True, True, False, True, False, False, True, True, False, True)
TESTS = [CallTest((text,), expected=expected) for text, expected in zip(TEXTS, EXPECTED, strict=True)]
NUM_WARM_UP = 50


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of the benchmark."""

    tier: Tier
    num_slots: int
    per_second: float
    p50: float
    """Milliseconds from asking to the report."""
    p95: float

    def row(self) -> str:
        """Of the table."""
        numbers = f"{self.per_second:.0f} | {self.p50:.1f} | {self.p95:.1f}"
        return f"| {self.tier} | {self.num_slots} | {numbers} |"


async def measure(sandbox: Sandbox, num_slots: int, num_programs: int) -> Measured:
    """As many programs at a time as there are slots, until all have run."""
    await run(sandbox, num_slots, NUM_WARM_UP)
    started = time.perf_counter()
    seconds = await run(sandbox, num_slots, num_programs)
    per_second = num_programs / (time.perf_counter() - started)
    marks = statistics.quantiles(seconds, n=100)
    return Measured(sandbox.tier, num_slots, per_second, marks[49] * 1e3, marks[94] * 1e3)


async def run(sandbox: Sandbox, num_slots: int, num_programs: int) -> list[float]:
    """Seconds that each took."""
    seconds: list[float] = []

    async def keep_one_running() -> None:
        while len(seconds) < num_programs:
            started = time.perf_counter()
            report = await sandbox.run(CODE, TESTS, "is_balanced")
            seconds.append(time.perf_counter() - started)
            assert report.fraction == 1.0, report

    await asyncio.gather(*[keep_one_running() for _ in range(num_slots)])
    return seconds


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.environments.sandbox", description=__doc__)
    parser.add_argument("--tier", action="append", choices=("namespace", "landlock"), help="both, if none is named")
    parser.add_argument("--slots", action="append", type=int, help="2, 3 and 4, if none is named")
    parser.add_argument("--programs", type=int, default=2000)
    arguments = parser.parse_args(argv)
    print("| tier | slots | executions/s | p50 ms | p95 ms |\n|---|---|---|---|---|")
    for tier in arguments.tier or ("namespace", "landlock"):
        for num_slots in arguments.slots or (2, 3, 4):
            try:
                with Sandbox(num_slots, tier) as sandbox:
                    print(asyncio.run(measure(sandbox, num_slots, arguments.programs)).row(), flush=True)
            except SandboxFailed as error:
                print(error, file=sys.stderr)
                return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
