"""Whatever an answer is, looking at it costs the test that it answers and nothing else."""

import os
import subprocess
import sys
import time

import pytest

from covey_sandbox import AssertTest, CallTest, Limits, OutputTest, Report, Sandbox, SandboxFailed

from . import answer_run, attack_run
from . import hostile_answers as hostile

SMALL = Limits(wall_seconds=0.5, total_seconds=5.0, memory_bytes=64 << 20, output_bytes=1 << 20)
NOBODY = 65534


def kinds(report: Report) -> list[str]:
    return [result.kind for result in report.results]


def honest_but(answer: str) -> str:
    """Return a program that is right but for one input."""
    return f"import itertools\ndef f(n): return {answer} if n == 1 else n"


def each(source: str) -> list[AssertTest]:
    """Return a test before, one that uses the answer, and one behind it."""
    return [AssertTest("assert f(0) == 0"), AssertTest(source), AssertTest("assert f(2) == 2")]


CALLS = [CallTest((n,), expected=n) for n in range(3)]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("range(10**5000)", "range(0, <integer of 16610 bits>)"),
        ("[{10**5000: 1}.keys()]", "[dict_keys([<integer of 16610 bits>])]"),
        ("{0: 'a' * 8000000}.values()", "dict_values(['aaa"),
        ("[[[[[[[[10**5000]]]]]]]]", "[[[[[...]]]]]"),
        ("__import__('fractions').Fraction(10**5000, 3)", "Fraction(<integer of 16610 bits>, 3)"),
        ("__import__('decimal').Decimal('9' * 5000000)", "Decimal('999"),
    ],
)
def test_a_wrong_answer_that_is_hard_to_show_fails_its_test_alone(sandbox: Sandbox, answer: str, said: str) -> None:
    report = sandbox.run_blocking(honest_but(answer), CALLS, "f")
    assert kinds(report) == ["passed", "wrong", "passed"]
    assert report.results[1].message.startswith(f"f(1) should be 1, got {said}")


@pytest.mark.parametrize(
    ("answer", "source", "kind"),
    [
        ("range(10**12)", "assert sum(f(1)) == 1", "timeout"),
        ("range(10**12)", "assert set(f(1)) == {1}", "error"),
        ("10**10", "assert 'x' * f(1) == ''", "error"),
        ("'%9999999999d'", "assert f(1) % 1 == ''", "error"),
        ("'a' * 40 + '!'", "import re\nassert re.match('(a+)+$', f(1))", "timeout"),
        ("10**8", "import time\ntime.sleep(f(1))\nassert False", "timeout"),
        ("1", "f(1)\nwhile True: pass", "timeout"),
        ("10**5000", "raise KeyError(f(1))", "error"),
        ("1", "import os\nos._exit(f(1) - 1)", "crash"),
        ("[[[[[[[[[[1]]]]]]]]]]", "x = f(1)\nfor _ in range(60): x = [x]\nassert f(x) == 1", "error"),
    ],
)
def test_large_work_made_of_a_small_answer_fails_its_test_alone(
    any_sandbox: Sandbox, answer: str, source: str, kind: str
) -> None:
    started = time.monotonic()
    with attack_run.Usage() as usage:
        report = any_sandbox.run_blocking(honest_but(answer), each(source), "f", SMALL)
    assert kinds(report) == ["passed", kind, "passed"], report
    assert time.monotonic() - started < SMALL.total_seconds + 5
    assert usage.descendants < 300, "the checker may take 64 MB for the program and 32 for its answer"
    assert any_sandbox.run_blocking(honest_but("1"), CALLS, "f").fraction == 1.0


@pytest.mark.long
def test_tests_that_hang_share_the_time_of_the_program(any_sandbox: Sandbox) -> None:
    limits = Limits(wall_seconds=0.5, total_seconds=1.5)
    started = time.monotonic()
    tests = [AssertTest("assert f(0) == 0"), *[AssertTest("assert sum(f(1)) == 1")] * 8]
    report = any_sandbox.run_blocking(honest_but("range(10**12)"), tests, "f", limits)
    assert kinds(report)[0] == "passed"
    assert set(kinds(report)[1:]) <= {"timeout", "not_run"}
    assert time.monotonic() - started < limits.total_seconds + 10


def test_a_test_that_is_at_fault_by_itself_is_no_verdict(any_sandbox: Sandbox) -> None:
    for source in ("assert f([[[object()]]])", "import os\nos._exit(0)\nf(1)"):
        with pytest.raises(SandboxFailed, match=r"a test passes on what|before it calls the program"):
            any_sandbox.run_blocking(honest_but("1"), [AssertTest("assert f(1) == 1"), AssertTest(source)], "f")


@pytest.mark.slow
def test_nor_is_one_that_never_calls_the_program(any_sandbox: Sandbox) -> None:
    with pytest.raises(SandboxFailed, match=r"takes more than 20 s before it calls the program"):
        any_sandbox.run_blocking(honest_but("1"), [AssertTest("while True: pass\nassert f(1)")], "f")


FLOOD = """
import json, os
body = json.dumps({"i": 0, "out": None}).encode()
os.write(4, len(body).to_bytes(4, "big") + body)
for _ in range(3000): os.write(4, b"\\0" * (1 << 20))
"""


def test_the_result_pipe_does_not_flood_the_judge(sandbox: Sandbox) -> None:
    with attack_run.Usage() as usage:
        report = sandbox.run_blocking(FLOOD, [OutputTest("", "x")])
    assert kinds(report) == ["channel"]
    assert usage.descendants < 300


@pytest.mark.long
def test_messages_stay_short_wherever_they_come_from(any_sandbox: Sandbox) -> None:
    sources = [
        "assert f(1) == 1",
        "assert False, f(1)",
        "raise KeyError(f(1))",
        f"assert f(1) == {'1' * 3000}",
        "f(f(1))",
    ]
    for answer in (
        "'a' * 7000000",
        "{0: 'a' * 7000000}.values()",
        "'\\ud800' * 900000",
        "10**5000",
        "{'a' * 999999: 1}",
    ):
        tests = [*CALLS, *map(AssertTest, sources), OutputTest("", "x")]
        report = any_sandbox.run_blocking(f"{honest_but(answer)}\nprint({answer})", tests, "f")
        assert max(len(result.message) for result in report.results) <= 300
        assert all(result.message.isprintable() for result in report.results)


def test_all_plain_answers_at_once(sandbox: Sandbox) -> None:
    answers = [*hostile.NUMBERS, *hostile.TEXTS[:8], *hostile.RANGES[:11], *hostile.NESTED[:6], *hostile.OBJECTS[:22]]
    assert answer_run.problems_of_calls(sandbox, answers) == []


@pytest.mark.long
def test_no_frame_that_a_program_makes_itself_passes(sandbox: Sandbox) -> None:
    assert [found for one in hostile.FORGED for found in answer_run.problems_of_calls(sandbox, [one])] == []


@pytest.mark.long
def test_answers_that_are_nested_at_random(sandbox: Sandbox) -> None:
    assert answer_run.problems_of_fuzz(sandbox, 7, 3) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_answers_that_are_nested_at_random(sandbox: Sandbox) -> None:
    assert answer_run.problems_of_fuzz(sandbox, 11, 150) == []


@pytest.mark.long
def test_some_of_them_in_test_code_and_as_output(sandbox: Sandbox) -> None:
    assert answer_run.problems_of_asserts(sandbox, answer_run.in_turn(hostile.ALL[::6], 1)) == []
    assert answer_run.problems_of_outputs(sandbox, hostile.ALL[::20]) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_of_them_in_all_kinds_of_tests(sandbox: Sandbox) -> None:
    assert answer_run.problems_of_calls(sandbox, hostile.PLAIN) == []
    assert [
        p for one in [*hostile.FRAMES, *hostile.HANGING] for p in answer_run.problems_of_calls(sandbox, [one])
    ] == []
    assert answer_run.problems_of_asserts(sandbox, answer_run.in_turn(hostile.ALL, 5)) == []
    assert answer_run.problems_of_outputs(sandbox, hostile.ALL) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tier", ["namespace", "landlock"])
def test_all_of_them_for_an_ordinary_user(tier: str) -> None:
    if os.getuid() != 0:
        pytest.skip("the other tests ran as an ordinary user already")
    command = [sys.executable, answer_run.__file__, tier, str(NOBODY)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=880)
    assert (found.stdout.strip(), found.returncode) == (f"{len(hostile.ALL)} answers, 0 problems", 0), found.stderr
