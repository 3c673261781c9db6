"""Verdicts on tests that call a function or run a script."""

import re
from collections.abc import Callable
from itertools import groupby
from typing import Any

from covey_sandbox.inside import codec, wire
from covey_sandbox.inside.case import LoadFailed, ProgramCase, answer_of, error_text
from covey_sandbox.inside.host import Broken, Ended, TimedOut, TooMuch, Unjudged, Violation
from covey_sandbox.inside.judging import asserts
from covey_sandbox.inside.judging.compare import Tolerance, matches
from covey_sandbox.inside.judging.shown import short_repr, shown_call
from covey_sandbox.inside.link import PASSED, Verdict, failed_verdict

Test = dict[str, Any]
NOT_ANSWERS = (Broken, LoadFailed, Unjudged, Violation)
"""Exceptions that concern more than one test."""


def judge(case: ProgramCase, tests: list[Test]) -> None:
    """Give one verdict per test, in order; a violation fails all."""
    try:
        for kind, run in groupby(tests, key=lambda test: test["test"]):
            JUDGES[kind](case, list(run))
            case.end()  # a script's process answers no calls, nor one that hangs in its last
    except Violation as error:
        void = failed_verdict("channel", f"the program broke the rules of the result channel: {error}")
        case.link.send(void=void)
    finally:
        case.end()


def each_in_turn(
    judge_from: Callable[[ProgramCase, list[Test], int], int],
) -> Callable[[ProgramCase, list[Test]], None]:
    """Judge from the first missing verdict on, until all or time is over."""

    def judge_all(case: ProgramCase, tests: list[Test]) -> None:
        done = 0
        try:
            while done < len(tests) and case.seconds_left() > 0:
                done += judge_from(case, tests, done)
            rest = failed_verdict("not_run", f"the program used up {case.limits['total_seconds']:g} s")
        except LoadFailed as error:
            rest = failed_verdict("load", str(error))
        for _ in tests[done:]:
            case.add(rest)

    return judge_all


def judge_calls(case: ProgramCase, tests: list[Test], first: int) -> int:
    """Judge from test `first` on in one process; return the number judged.

    A test that ends its process fails alone: the next run in a fresh one.
    """
    # Send all calls at once, arguments alone; the pipe holds them while the program works
    program = case.load()
    calls = [{"i": i, "args": test["args"], "kwargs": test["kwargs"]} for i, test in enumerate(tests[first:], first)]
    program.send(b"".join(wire.pack(codec.dumps(call)) for call in calls))
    for index in range(first, len(tests)):
        test, is_over = tests[index], True
        try:
            frame = program.receive(case.expect(len(tests) - index))
            verdict, is_over = verdict_on_call(case, test, frame, index), False
        except TimedOut:
            verdict = failed_verdict("timeout", f"{call_text(case, test)} took too long")
        except Ended:
            if index > first:  # what came before in this process may be to blame: this test is tried again by itself
                return index - first
            verdict = failed_verdict("crash", f"{call_text(case, test)} ended its process")
        except NOT_ANSWERS:
            raise
        except TooMuch:
            verdict = failed_verdict("output", f"{call_text(case, test)} gave more than can be taken")
        except Exception as error:
            verdict = failed_verdict("error", f"{call_text(case, test)} cannot be judged: {type(error).__name__}")
        case.add(verdict)
        if is_over:
            return index - first + 1
    return len(tests) - first


def verdict_on_call(case: ProgramCase, test: Test, frame: dict[str, Any], index: int) -> Verdict:
    """Compare the answer with the expected value, decoded only here."""
    has_value, value = answer_of(frame, index)
    if not has_value:
        return failed_verdict("error", f"{call_text(case, test)} raised {value}")
    expected, *also = map(codec.decode, test["expected"])
    tolerance = Tolerance(test["rel"], test["abs"], test["is_json"])
    if any(matches(right, value, tolerance) for right in (expected, *also)):
        return PASSED
    return failed_verdict("wrong", f"{call_text(case, test)} should be {short_repr(expected)}, got {short_repr(value)}")


def call_text(case: ProgramCase, test: Test) -> str:
    return shown_call(case.entry_point, codec.decode(test["args"]), codec.decode(test["kwargs"]))


def judge_output(case: ProgramCase, tests: list[Test], index: int) -> int:
    """Give the verdict on one run of the script."""
    try:
        verdict = verdict_on_output(case, tests[index], len(tests) - index)
    except NOT_ANSWERS:
        raise
    except TimedOut:
        verdict = failed_verdict("timeout", "it took too long")
    except TooMuch:
        verdict = failed_verdict("output", f"it printed more than {case.limits['output_bytes']} bytes")
    except Exception as error:
        verdict = failed_verdict("error", f"what it printed cannot be judged: {type(error).__name__}")
    case.add(verdict)
    return 1


def verdict_on_output(case: ProgramCase, test: Test, num_left: int) -> Verdict:
    """Compare the output, however the script ends; an uncaught exception fails."""
    program = case.start(is_script=True)
    deadline = case.expect(num_left)
    program.send(test["stdin"].encode("utf-8", "surrogateescape"), program.stdin)
    try:
        frame = program.receive(deadline)
    except Ended:
        frame = {"i": 0, "out": None}
    if "err" in frame:
        return failed_verdict("error", f"it raised {error_text(frame)}")
    printed = program.finish_output(deadline)
    expected, got = lines_of(test["expected"]), lines_of(printed.decode("utf-8", "replace"))
    if len(expected) == len(got) and all(map(same_line, expected, got)):
        return PASSED
    wanted, found = short_repr(test["expected"]), short_repr("\n".join(got))
    return failed_verdict("wrong", f"for the input {short_repr(test['stdin'])} it should print {wanted}, got {found}")


def lines_of(text: str) -> list[str]:
    """Return lines without trailing white space, without empty ones at the end."""
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


ROUNDING = Tolerance(rel=1e-6, abs=1e-6)
"""Rounding of printed decimals: scripts write as many digits as they like."""
DECIMAL = re.compile(r"-?[0-9]{0,300}\.[0-9]+")


def same_line(expected: str, got: str) -> bool:
    """Return True for equal words between blanks, decimals up to rounding."""
    words, others = expected.split(" "), got.split(" ")
    return expected == got or (len(words) == len(others) and all(map(_same_word, words, others)))


def _same_word(expected: str, got: str) -> bool:
    are_decimals = DECIMAL.fullmatch(expected) and DECIMAL.fullmatch(got)
    return matches(float(expected), float(got), ROUNDING) if are_decimals else expected == got


JUDGES: dict[str, Callable[[ProgramCase, list[Test]], None]] = {
    "call": each_in_turn(judge_calls),
    "output": each_in_turn(judge_output),
    "assert": each_in_turn(asserts.judge_assert),
}
