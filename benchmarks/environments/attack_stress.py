"""Does anything grow, leak or break under thousands of attacks?

    python -m benchmarks.environments.attack_stress [--tier TIER]

Programs run in a mix of which a third is hostile: those of the sandbox's tests, answers of all kinds in all kinds of
tests, and answers nested at random. Each verdict is compared with what is due. Memory, descriptors, processes and disk
of caller, judges, checkers and zygotes are looked at before, meanwhile and after. `--user` becomes an ordinary user
first.
"""

import argparse
import asyncio
import itertools
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from covey_sandbox import CallTest, Limits, OutputTest, Report, Sandbox, SandboxFailed, Test, Tier
from tests.sandbox.attacks import answer_run, attack_run, hostile, hostile_answers

HOSTILE_SHARE = 1 / 3
HOSTILE_LIMITS = Limits(wall_seconds=0.3, total_seconds=3.0, file_bytes=1 << 20)
HONEST = (
    ("def solve(x):\n    return x * x", (True, True, True, True)),
    ("def solve(x):\n    return x * x if x != 2 else -1", (True, True, False, True)),
    ("def solve(x):\n    return [x * x for _ in [0]][x > 2]", (True, True, True, False)),
)


@dataclass(frozen=True, slots=True)
class Mix:
    """How many programs, and which."""

    num_slots: int
    num_warm_up: int
    """Programs before the first look."""
    num_programs: int
    seed: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """A program, its tests, and which of them it is due to pass; None: none of them, whatever they are."""

    name: str
    code: str
    tests: list[Test]
    due: list[bool] | None
    limits: Limits

    def is_due(self, report: Report) -> bool:
        """Whether the verdicts are right; a program that breaks the channel's rules passes nothing."""
        passed = [result.passed for result in report.results]
        is_void = {result.kind for result in report.results} == {"channel"}
        return not any(passed) if self.due is None or (is_void and self.name != "honest") else passed == self.due


def draw(rng: random.Random) -> Attempt:
    """The next program of the mix."""
    if rng.random() >= HOSTILE_SHARE:
        code, due = rng.choice(HONEST)
        return Attempt("honest", code, [CallTest((n,), expected=n * n) for n in range(4)], list(due), Limits())
    kind = rng.choice(("program", "answer", "assert", "output", "nested"))
    if kind == "program":
        name = rng.choice(sorted(hostile.ALL))
        tests: list[Test] = [CallTest((n,), expected=answer_run.secret() if n < 2 else "OUT") for n in range(3)]
        return Attempt(name, hostile.ALL[name], tests, None, HOSTILE_LIMITS)
    answer = rng.choice(hostile_answers.ALL) if kind != "nested" else hostile_answers.fuzzed(rng)
    if kind == "output":
        code = answer_run.script(answer)
        return Attempt(f"print {answer}", code, [OutputTest("", answer_run.secret())], None, HOSTILE_LIMITS)
    uses = [rng.choice(hostile_answers.USES)]
    code, tests, due = answer_run.asserts(answer, uses) if kind == "assert" else answer_run.calls([answer])
    return Attempt(f"{answer} {uses if kind == 'assert' else ''}", code, tests, due, HOSTILE_LIMITS)


@dataclass(frozen=True, slots=True)
class State:
    """What there is of a sandbox and its caller."""

    seconds: float
    num_programs: int
    processes: int
    """Judges, checkers and zygotes."""
    descriptors: int
    """Of these and of the caller, as far as one may look."""
    megabytes: tuple[int, ...]
    """Of the caller alone, and of the largest judge, checker and zygote."""
    entries: int
    """Files and folders of programs."""
    judges: frozenset[int]

    def row(self) -> str:
        """Of the table."""
        cells = (
            self.num_programs,
            f"{self.seconds:.0f}",
            self.processes,
            self.descriptors,
            *self.megabytes,
            self.entries,
        )
        return f"| {' | '.join(map(str, cells))} |"


HEADER = (
    "| programs | s | processes | descriptors | caller MB | judge MB | checker MB | zygote MB | files |\n"
    + "|---" * 9
    + "|"
)


def state(sandbox: Sandbox, num_programs: int, started: float) -> State:
    """What there is now, between two programs or while some run."""
    below = attack_run.descendants(os.getpid())
    kinds = [attack_run.named(name, below) for name in ("covey-judge", "covey-checker", "covey-zygote")]
    pids = [os.getpid(), *(pid for kind in kinds for pid in kind)]
    return State(
        seconds=time.monotonic() - started,
        num_programs=num_programs,
        processes=len(pids) - 1,
        descriptors=sum(map(attack_run.num_descriptors, pids)),
        megabytes=tuple(max(map(attack_run.resident, kind), default=0) for kind in ([os.getpid()], *kinds)),
        entries=sum(map(num_entries, attack_run.own_folders(sandbox))),
        judges=frozenset(kinds[0]),
    )


def num_entries(folder: Path) -> int:
    """Files and folders below one that programs change meanwhile, as far as paths reach."""
    return sum(len(folders) + len(files) for _, folders, files in os.walk(folder))


@dataclass
class Outcome:
    """What became of the mix."""

    states: list[State]
    wrong: list[str]
    kinds: Counter[str]
    """Of all results."""

    def problems(self) -> list[str]:
        """What is not as it was after the first programs, and verdicts that were not due."""
        first, last = self.states[0], self.states[-1]
        found = list(self.wrong)
        found += ["a judge was lost"] if first.judges != last.judges else []
        found += [f"{last.processes} processes, not {first.processes}"] if last.processes > first.processes else []
        found += [f"{last.descriptors} descriptors"] if last.descriptors > first.descriptors + 20 else []
        found += [f"{last.entries} files of programs"] if last.entries > first.entries + 8 else []
        growth = [after - before for before, after in zip(first.megabytes, last.megabytes, strict=True)]
        most = (10, 10, 80, 10)  # a checker is replaced where it has grown by more than 64
        return found + ([f"grown by {growth} MB"] if any(a > b for a, b in zip(growth, most, strict=True)) else [])


async def run(sandbox: Sandbox, mix: Mix) -> Outcome:
    """Have as many programs judged at a time as there are slots, and look at the sandbox ten times."""
    rng, started = random.Random(mix.seed), time.monotonic()
    outcome = Outcome([], [], Counter())
    every = max(mix.num_programs // 10, 1)

    def look(num_programs: int) -> None:
        outcome.states.append(state(sandbox, num_programs, started))
        print(outcome.states[-1].row(), flush=True)

    async def keep_one_running() -> None:
        while (index := next(numbers)) < mix.num_programs:
            attempt = draw(rng)
            try:
                report = await sandbox.run(attempt.code, attempt.tests, "solve", attempt.limits)
            except SandboxFailed as error:
                outcome.wrong.append(f"no verdict on {attempt.name}: {error}")
                continue
            outcome.kinds.update(result.kind for result in report.results)
            if not attempt.is_due(report):
                outcome.wrong.append(f"{attempt.name}: {[result.message or result.kind for result in report.results]}")
            if index >= 0 and index % every == 0:
                look(index)

    numbers = itertools.count(-mix.num_warm_up)
    print(HEADER)
    await asyncio.gather(*[keep_one_running() for _ in range(mix.num_slots)])
    look(mix.num_programs)
    return outcome


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.environments.attack_stress", description=__doc__)
    parser.add_argument("--tier", default="auto", choices=("auto", "namespace", "landlock"))
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--programs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--user", type=int, help="its number; needs root")
    arguments = parser.parse_args(argv)
    if arguments.user is not None:
        attack_run.become(arguments.user)
    tier: Tier = arguments.tier
    with Sandbox(arguments.slots, tier) as sandbox:
        print(f"tier {sandbox.tier}, user {os.getuid()}, {arguments.slots} slots, seed {arguments.seed}")
        mix = Mix(arguments.slots, 200, arguments.programs, arguments.seed)
        outcome, folders = asyncio.run(run(sandbox, mix)), attack_run.own_folders(sandbox)
    problems = outcome.problems() + [f"{path} is left" for path in folders if path.exists()]
    print(f"results: {dict(outcome.kinds.most_common())}")
    print("\n".join([*problems, f"{len(problems)} problems"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
