"""Verdicts on tests that call a function and on tests that run a script."""

from collections.abc import Callable
from itertools import groupby
from typing import Any

from covey.sandbox.inside import asserts, codec, wire
from covey.sandbox.inside.case import PASSED, Case, LoadFailed, Verdict, answer_of, error_text, failed
from covey.sandbox.inside.compare import Tolerance, matches
from covey.sandbox.inside.host import Ended, TimedOut, TooMuch, Violation
from covey.sandbox.inside.shown import shown, shown_call
from covey.sandbox.inside.timer import TooSlow

Test = dict[str, Any]


def judge(case: Case, tests: list[Test]) -> list[Verdict]:
    """One verdict for each test, in order; a program that breaks the channel's rules passes none."""
    verdicts: list[Verdict] = []
    try:
        for kind, run in groupby(tests, key=lambda test: test["test"]):
            verdicts += JUDGES[kind](case, list(run))
    except Violation as error:
        return [failed("channel", f"the program broke the rules of the result channel: {error}")] * len(tests)
    except TooSlow:
        if any(test["test"] == "assert" for test in tests):  # the test's own code may be to blame
            raise
        return [failed("channel", "its answers take too long to compare")] * len(tests)
    finally:
        case.end()
    return verdicts


def judge_calls(case: Case, tests: list[Test]) -> list[Verdict]:
    """A test that ends its process fails alone: those behind it run in a fresh one."""
    verdicts: list[Verdict] = []
    while len(verdicts) < len(tests):
        if case.left() == 0:
            return pad(verdicts, tests, failed("not_run", f"the program used up {case.limits['total_seconds']:g} s"))
        try:
            verdicts += one_process(case, tests, len(verdicts))
        except LoadFailed as error:
            return pad(verdicts, tests, failed("load", str(error)))
    return verdicts


def pad(verdicts: list[Verdict], tests: list[Test], verdict: Verdict) -> list[Verdict]:
    """The same verdict for all tests that have none."""
    return verdicts + [verdict] * (len(tests) - len(verdicts))


def one_process(case: Case, tests: list[Test], first: int) -> list[Verdict]:
    """Verdicts from test `first` on, as far as one process gets; at least one."""
    program = case.load()
    program.send(b"".join(wire.pack(call_frame(index, tests[index])) for index in range(first, len(tests))))
    verdicts: list[Verdict] = []
    for index in range(first, len(tests)):
        try:
            frame = program.receive(case.deadline(len(tests) - index))
        except TimedOut:
            case.has_timed_out = True
            return [*verdicts, failed("timeout", f"{call_text(case, tests[index])} took too long")]
        except Ended:
            ended = failed("crash", f"{call_text(case, tests[index])} ended its process")
            # What came before in this process may be to blame: then this test is tried again by itself.
            return verdicts or [ended]
        verdicts.append(verdict_on_call(case, tests[index], frame, index))
    return verdicts


def call_frame(index: int, test: Test) -> bytes:
    """What the program learns of a test: the arguments."""
    return codec.dumps({"i": index, "args": test["args"], "kwargs": test["kwargs"]})


def verdict_on_call(case: Case, test: Test, frame: dict[str, Any], index: int) -> Verdict:
    """The answer against the expected value, which is decoded only here."""
    has_value, value = answer_of(frame, index)
    if not has_value:
        return failed("error", f"{call_text(case, test)} raised {value}")
    expected = codec.decode(test["expected"])
    if matches(expected, value, Tolerance(test["rel"], test["abs"])):
        return PASSED
    return failed("wrong", f"{call_text(case, test)} should be {shown(expected)}, got {shown(value)}")


def call_text(case: Case, test: Test) -> str:
    return shown_call(case.entry_point, codec.decode(test["args"]), codec.decode(test["kwargs"]))


def judge_outputs(case: Case, tests: list[Test]) -> list[Verdict]:
    """Each test is a run of the script by itself."""
    verdicts: list[Verdict] = []
    for test in tests:
        if case.left() == 0:
            return pad(verdicts, tests, failed("not_run", f"the program used up {case.limits['total_seconds']:g} s"))
        try:
            verdicts.append(verdict_on_output(case, test, len(tests) - len(verdicts)))
        except LoadFailed as error:
            return pad(verdicts, tests, failed("load", str(error)))
    return verdicts


def verdict_on_output(case: Case, test: Test, num_left: int) -> Verdict:
    """What it prints, whether or not it says goodbye; an exception nobody caught fails."""
    program = case.start(is_script=True)
    deadline = case.deadline(num_left)
    try:
        program.send(test["stdin"].encode("utf-8", "surrogateescape"), program.stdin)
        try:
            frame = program.receive(deadline)
        except Ended:
            frame = {"i": 0, "out": None}
        if "err" in frame:
            return failed("error", f"it raised {error_text(frame)}")
        printed = program.finish_output(deadline)
    except TimedOut:
        case.has_timed_out = True
        return failed("timeout", "it took too long")
    except TooMuch:
        return failed("output", f"it printed more than {case.limits['output_bytes']} bytes")
    expected, got = lines_of(test["expected"]), lines_of(printed.decode("utf-8", "replace"))
    if expected == got:
        return PASSED
    wanted, found = shown(test["expected"]), shown("\n".join(got))
    return failed("wrong", f"for the input {shown(test['stdin'])} it should print {wanted}, got {found}")


def lines_of(text: str) -> list[str]:
    """Lines without white space at their ends, without empty ones at the end."""
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


JUDGES: dict[str, Callable[[Case, list[Test]], list[Verdict]]] = {
    "call": judge_calls,
    "output": judge_outputs,
    "assert": asserts.judge_asserts,
}
