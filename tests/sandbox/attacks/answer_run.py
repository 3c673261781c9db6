"""Runs programs whose answers are hostile, and says which did not come out as a verdict of their tests.

As a script, `python answer_run.py TIER UID` becomes an ordinary user first and tries them all.
"""

import random
import secrets
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from covey_sandbox import AssertTest, CallTest, Limits, OutputTest, Report, Sandbox, SandboxFailed, Test

if __package__:
    from . import attack_run
    from . import hostile_answers as hostile
else:  # run as a script
    import attack_run
    import hostile_answers as hostile

CALLS = Limits(wall_seconds=2.0, total_seconds=20.0)
QUICK = Limits(wall_seconds=0.4, total_seconds=3.0)
SLACK_SECONDS = 25.0
"""A busy machine may take that much longer than a program's time: what starting processes takes is not counted."""


def program(answers: Sequence[str]) -> str:
    """Return what is honest for even numbers and gives one of the answers for each odd one."""
    given = "".join(f"    if x == {2 * index + 1}: return {answer}\n" for index, answer in enumerate(answers))
    return f"{hostile.PREAMBLE}\ndef solve(x):\n{given}    return x\n"


def script(answer: str) -> str:
    return f"{hostile.PREAMBLE}\nprint({answer})\n"


def secret() -> str:
    """Return what nobody can guess."""
    return f"SECRET-{secrets.token_hex(8)}"


def calls(answers: Sequence[str]) -> tuple[str, list[Test], list[bool]]:
    """Return a program, tests in turn honest and hostile, and which of them it passes."""
    tests: list[Test] = [CallTest((0,), expected=0)]
    for index in range(len(answers)):
        tests += [CallTest((2 * index + 1,), expected=secret()), CallTest((2 * index + 2,), expected=2 * index + 2)]
    return program(answers), tests, [True, *[False, True] * len(answers)]


def asserts(answer: str, uses: Sequence[str]) -> tuple[str, list[Test], list[bool]]:
    """Return the same with test code that makes something of the answer."""
    written = [use.format(call="solve(1)", secret=repr(secret())) for use in uses]
    tests: list[Test] = [
        AssertTest("assert solve(0) == 0"),
        *map(AssertTest, written),
        AssertTest("assert solve(2) == 2"),
    ]
    return program([answer]), tests, [True, *[False] * len(uses), True]


def problem(sandbox: Sandbox, name: str, case: tuple[str, list[Test], list[bool]], limits: Limits) -> list[str]:
    """Return what is wrong with how a program was judged; nothing if it was judged as it is due."""
    code, tests, due = case
    started = time.monotonic()
    try:
        report = sandbox.run_blocking(code, tests, "solve", limits)
    except SandboxFailed as error:
        return [f"{name}: no verdict: {error}"]
    seconds = time.monotonic() - started
    return [f"{name}: {text}" for text in wrong(report, due, seconds - limits.total_seconds)]


def wrong(report: Report, due: list[bool], late: float) -> list[str]:
    found = []
    results = report.results
    if {result.kind for result in results} == {"channel"}:
        due = [False] * len(due)
    if [result.passed for result in results] != due:
        found.append(f"{[(index, r.kind, r.message) for index, r in enumerate(results) if r.passed != due[index]]}")
    if late > SLACK_SECONDS:
        found.append(f"it took {late:.0f} s too long")
    if any(len(result.message) > 300 or not result.message.isprintable() for result in results):
        found.append("a message is long or not printable")
    return found


def problems_of_calls(sandbox: Sandbox, answers: Sequence[str]) -> list[str]:
    """Judge one program with all the answers."""
    return problem(sandbox, "calls", calls(answers), Limits(wall_seconds=2.0, total_seconds=60.0))


def problems_of_asserts(sandbox: Sandbox, pairs: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Judge a program for each answer, with the test code that uses it."""
    return [
        found
        for answer, uses in pairs
        for use in uses
        for found in problem(sandbox, f"{answer} in {use}", asserts(answer, [use]), QUICK)
    ]


def problems_of_outputs(sandbox: Sandbox, answers: Iterable[str]) -> list[str]:
    """Judge a script for each answer, which it prints."""
    cases = [(answer, (script(answer), [OutputTest("", secret())], [False])) for answer in answers]
    return [found for answer, case in cases for found in problem(sandbox, f"print({answer})", case, QUICK)]


def problems_of_fuzz(sandbox: Sandbox, seed: int, num_programs: int) -> list[str]:
    """Judge programs of 20 answers each that are nested at random."""
    rng = random.Random(seed)
    found = []
    for _ in range(num_programs):
        case = calls([hostile.fuzzed(rng) for _ in range(20)])
        problems = problem(sandbox, f"seed {seed}", case, Limits(wall_seconds=0.5, total_seconds=10.0))
        found += [f"{one}\n{case[0][len(hostile.PREAMBLE) :]}" for one in problems]
    return found


def in_turn(answers: Sequence[str], each: int) -> list[tuple[str, list[str]]]:
    """Return some uses for each answer, so that every use has its turn."""
    uses = hostile.USES
    return [
        (answer, [uses[(index * each + n) % len(uses)] for n in range(each)]) for index, answer in enumerate(answers)
    ]


def main(tier: Any, uid: int) -> int:
    attack_run.become(uid)
    with Sandbox(1, tier) as sandbox:
        found = problems_of_calls(sandbox, hostile.PLAIN)
        found += [one for answer in [*hostile.FRAMES, *hostile.HANGING] for one in problems_of_calls(sandbox, [answer])]
        found += problems_of_asserts(sandbox, in_turn(hostile.ALL, 1))
        found += problems_of_outputs(sandbox, hostile.ALL[::4])
        found += problems_of_fuzz(sandbox, uid, 20)
    print("\n".join([*found, f"{len(hostile.ALL)} answers, {len(found)} problems"]))
    return len(found) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
