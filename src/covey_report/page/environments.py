"""Pages of environments: machines as drawings, programs with their tests."""

from typing import Any

from covey_report.logs.read import Row, RunFiles, cut
from covey_report.page.machines import machines_of

NUM_PROGRAMS, NUM_TESTS = 8, 40
TESTS = ("tests", "test_list", "test", "public_tests", "examples", "assertions")
"""Columns that may hold the tests of a program."""


def environment_of(run: RunFiles) -> dict[str, Any] | None:
    """Build the page of the environment, None if it has none."""
    name = run.settings.get("environment.name")
    made = {"machines": machines_of, "code": programs_of}.get(str(name))
    return (made(run) if made else None) or conversations_of(run)


def conversations_of(run: RunFiles) -> dict[str, Any] | None:
    """Mark a run with conversations, None for single answers.

    The page takes them from the traced groups that it has anyway.
    """
    answers = (one.get("completion") for row in run.traces for one in row.get("rollouts") or [])
    return {"kind": "conversations"} if any(isinstance(text, list) and len(text) > 1 for text in answers) else None


def programs_of(run: RunFiles) -> dict[str, Any] | None:
    """Choose the best and worst programs of the last evaluation."""
    rows = [row for row in run.answers if row.get("greedy")] or run.rollouts
    last = max((row["step"] for row in rows), default=None)
    of_last = sorted((row for row in rows if row["step"] == last), key=lambda row: -float(row.get("reward") or 0))
    half = NUM_PROGRAMS // 2
    chosen = of_last[:half] + of_last[max(half, len(of_last) - half) :]
    return {"kind": "programs", "items": [_program(row) for row in chosen]} if chosen else None


def _program(row: Row) -> Row:
    columns = dict(row.get("columns") or {})
    problem = columns.get("problem")  # in which the code environment has them
    columns |= problem if isinstance(problem, dict) else {}
    tests, verdicts = columns.get("tests"), row.get("verdicts")
    listed = tests if isinstance(tests, list) and all(isinstance(test, dict) for test in tests) else []
    return {
        "entry": cut(columns.get("entry_point") or "f", 100),
        "cases": [_case(test) for test in listed[:NUM_TESTS]],
        "num_cases": len(listed),
        "verdicts": [cut(kind, 40) for kind in verdicts[:NUM_TESTS]] if isinstance(verdicts, list) else [],
        "failure": cut(row.get("first_failure"), 600),
        "id": row.get("prompt_id"),
        "prompt": cut(row.get("prompt"), 2000),
        "text": cut(row.get("completion"), 4000),
        "reward": row.get("reward"),
        "parts": row.get("parts") or {},
        "tests": {name: cut(str(columns[name]), 1500) for name in columns if name in TESTS and columns[name] != listed},
    }


def _case(test: Row) -> tuple[str, str]:
    """Write a test's call and expected value as Python."""
    arguments = [repr(value) for value in test.get("args") or []]
    arguments += [f"{name}={value!r}" for name, value in dict(test.get("kwargs") or {}).items()]
    call = ", ".join(arguments) if "args" in test or "kwargs" in test else repr(test)
    return cut(call, 300), cut(repr(test["expected"]), 300) if "expected" in test else ""
