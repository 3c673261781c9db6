"""What the checker makes of time, answers and errors, without a process."""

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from covey_sandbox.inside import case as case_module
from covey_sandbox.inside.case import ProgramCase, answer_of
from covey_sandbox.inside.host import Violation
from covey_sandbox.inside.judging.candidate import exception_of
from covey_sandbox.inside.judging.remote import ProgramError
from covey_sandbox.inside.link import PASSED, Link, failed_verdict


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProgramCase]:
    """Second 100 of a program that began at second 88."""
    monkeypatch.setattr(case_module, "time", SimpleNamespace(monotonic=lambda: 100.0))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        limits = {"wall_seconds": 5.0, "total_seconds": 20.0}
        yield ProgramCase(SimpleNamespace(), Link(ours), "", "f", limits, started=88.0)  # type: ignore[arg-type]


def test_after_a_timeout_the_other_tests_share_the_remaining_time(case: ProgramCase) -> None:
    assert (case.seconds_left(), case.expect(4)) == (8.0, 105.0)
    for verdict in (PASSED, failed_verdict("wrong", "f(0) should be 1, got 2")):
        case.add(verdict)
    assert case.expect(4) == 105.0
    case.add(failed_verdict("timeout", "f(0) took too long"))
    assert (case.expect(4), case.expect(1), case.expect(400)) == (102.0, 105.0, 100.05)
    case.started = 70.0
    assert (case.seconds_left(), case.expect(1)) == (0.0, 100.0)


def test_a_program_is_excused_twenty_seconds_in_all(case: ProgramCase) -> None:
    case.excuse(15.0)
    assert case.seconds_left() == 23.0
    case.excuse(15.0)
    assert (case.excused, case.seconds_left()) == (20.0, 28.0)


@pytest.mark.parametrize(
    "frame",
    [
        {"i": 2, "out": 1},  # to another call
        {"i": True, "out": 1},
        {"i": 1.0, "out": 1},
        {"out": 1},
        {"i": 1},
        {"i": 1, "out": 1, "err": "E", "text": ""},
        {"i": 1, "out": {"f": "1.5"}},  # in no spelling of ours
        {"i": 1, "err": "E"},
        {"i": 1, "err": 1, "text": ""},
        {"i": 1, "err": "E", "text": None},
    ],
    ids=str,
)
def test_what_is_no_answer_to_the_call_breaks_the_rules(frame: dict[str, Any]) -> None:
    with pytest.raises(Violation):
        answer_of(frame, 1)
    assert answer_of({"i": 1, "out": {"t": [1]}}, 1) == (True, (1,))
    assert answer_of({"i": 1, "err": "KeyError", "text": "'a'"}, 1) == (False, "KeyError: 'a'")


@pytest.mark.parametrize(
    ("bases", "kinds"),
    [
        (["KeyError", "LookupError", "Exception"], (KeyError,)),
        (["Mine", "ValueError", "Exception"], (ValueError, ProgramError)),
        (["StopIteration", "Exception"], (ProgramError,)),  # would end a loop of the test
        (["SystemExit", "BaseException"], (ProgramError,)),
        (["GivenUp"], (ProgramError,)),
        (["print"], (ProgramError,)),
        (["UnicodeDecodeError", "ValueError"], (ProgramError,)),
        (["Mine", "KeyError", "OSError"], (KeyError, ProgramError)),
    ],
)
def test_a_programs_error_is_matched_as_a_builtin_or_its_own(
    bases: list[str], kinds: tuple[type[Exception], ...]
) -> None:
    error = exception_of(bases[0], [], bases, ["a"], ("text", None))
    assert all(isinstance(error, kind) for kind in kinds)
    assert not isinstance(error, StopIteration)
    assert bases[0] == "UnicodeDecodeError" or type(error).__name__ == bases[0]
