"""Rows of programming data sets become problems."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from covey_graders.code.cases import call_test, plain_value
from covey_graders.code.suites import split_tests
from covey_sandbox.types import AssertTest, CallTest
from covey_tasks.code.formats import problem_of
from covey_tasks.code.problems import Problem

HUMANEVAL = {
    "task_id": "HumanEval/1",
    "prompt": "import math\n\ndef half(n):\n    return n / 2\n\n"
    'def f(n):\n    """Twice n.\n    >>> f(3)\n    6\n    """\n',
    "entry_point": "f",
    "canonical_solution": "    return 2 * n\n",
    "test": "META = {}\n\ndef check(candidate):\n    assert candidate(3) == 6, 'three'\n    assert candidate(0) == 0\n",
}
MBPP = {
    "text": "Write a function to double a number.",
    "code": "def twice(n):\n    return 2 * n",
    "test_setup_code": "import math",
    "test_list": ["assert twice(3) == 6", "assert math.isclose(twice(0.5), 1.0)"],
}


def test_a_humaneval_row_as_it_is_published() -> None:
    problem = problem_of(HUMANEVAL)
    assert problem.entry_point == "f"
    assert problem.solution == HUMANEVAL["prompt"] + HUMANEVAL["canonical_solution"]
    assert problem.opening == HUMANEVAL["prompt"]
    assert "Complete this Python function" in problem.statement
    assert ">>> f(3)" in problem.statement
    first, second = problem.tests
    assert isinstance(first, AssertTest)
    assert isinstance(second, AssertTest)
    assert "candidate(3) == 6, 'three'" in first.source
    assert "candidate(0)" not in first.source
    assert "candidate(0)" in second.source
    assert all(text in first.source for text in ("META = {}", "check(candidate)"))
    assert "def half(n):" in first.setup


def test_an_mbpp_row_as_it_is_published() -> None:
    problem = problem_of(MBPP)
    assert (problem.entry_point, problem.solution, problem.opening) == ("twice", MBPP["code"], "")
    assert problem.tests == tuple(AssertTest(test, "import math") for test in MBPP["test_list"])
    assert "Write a function to double a number." in problem.statement
    assert "assert twice(3) == 6" in problem.statement
    assert "twice(0.5)" not in problem.statement
    assert "`def twice(n)`" in problem.statement
    assert "```python block" in problem.statement


def test_a_row_of_your_own_with_calls() -> None:
    row = {
        "prompt": "Add two numbers.",
        "entry_point": "add",
        "difficulty": 2,
        "tests": [
            {"args": [1, 2], "expected": 3},
            {"args": [0.1], "kwargs": {"b": 0.2}, "expected": 0.3, "tol": {"rel": 1e-6}},
        ],
    }
    problem = problem_of(row)
    assert (problem.family, problem.difficulty, problem.solution) == ("rows", 2, None)
    assert problem.tests == (
        CallTest((1, 2), expected=3),
        CallTest((0.1,), {"b": 0.2}, expected=0.3, rel=1e-6),
    )
    assert problem.statement.startswith("Add two numbers.\n\nName the function `add`.")


@pytest.mark.parametrize("tolerance", [{"rel_tol": 1e-6}, {"rel": 1e-6, "atol": 0.1}, 1e-6, ["rel"]], ids=str)
def test_a_tolerance_that_nothing_would_read_is_refused(tolerance: Any) -> None:
    with pytest.raises(ValueError, match=r'^tol of a test must be \{"rel": r, "abs": a\}, got '):
        call_test({"args": [1], "expected": 0.5, "tol": tolerance})
    assert call_test({"args": [1], "expected": 0.5, "tol": None}) == CallTest((1,), expected=0.5)
    as_in_parquet = {"args": [1], "expected": 0.5, "tol": {"rel": None, "abs": 1}}
    assert call_test(as_in_parquet) == CallTest((1,), expected=0.5, abs=1.0)


def texts(source: str) -> list[str]:
    return [text for text, _ in split_tests(source, "f")]


def test_a_file_of_asserts_is_as_many_tests() -> None:
    assert texts("assert f(1) == 1\nassert f(2) == (\n    3)\n") == ["assert f(1) == 1", "assert f(2) == 3"]


def test_an_assert_that_cannot_fail_is_no_test_that_any_program_passes() -> None:
    tests = texts("def check(candidate):\n    assert True, 'a'\n    assert candidate(1) == 2\n    assert 1\n")
    assert tests == ["\n\ndef check(candidate):\n    assert candidate(1) == 2\n\ncheck(candidate)\n"]
    assert texts("assert True\nassert f(1) == 2") == ["assert f(1) == 2"]
    assert texts("assert False, 'never'\nassert True") == ["assert False, 'never'"]
    assert texts("assert True") == ["assert True"]
    assert texts("assert callable(f)\nassert f(1) == 2") == ["assert f(1) == 2"]


@pytest.mark.parametrize(
    "source",
    [
        "x = 3\nassert f(1) == x\n",
        "def check(candidate):\n    for n in range(3):\n        assert candidate(n) == n\n",
        "def check(candidate):\n    x = candidate(3)\n    assert x == 6\n    assert x > 0\n",
        "def check(candidate):\n    assert candidate(1)\n    assert candidate(2)\n\ncheck(f)\ncheck(lambda n: f(n))\n",
    ],
)
def test_test_code_whose_parts_hang_together_stays_whole(source: str) -> None:
    assert texts(source) == [source]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"prompt": None}, "column 'prompt' is empty"),
        ({"prompt": 3}, "column 'prompt' must be text, got 3"),
        ({"tests": []}, "column 'tests' is empty"),
        ({"tests": {"inputs": [], "outputs": []}}, "has no test: its lists of tests are empty"),
        ({"tests": {"test_cases": []}}, "column 'test_cases' is empty"),
        ({"tests": "assert f(1) =="}, "tests are not Python code"),
        ({"tests": [{"args": 3, "expected": 3}]}, 'a test must be {"args": [...], "expected": ...}'),
        ({"tests": [{"args": [3]}]}, 'a test must be {"args": [...], "expected": ...}'),
        ({"tests": [{"args": [{"$int": "zz"}], "expected": 3}]}, "is not a value: invalid literal"),
        ({"tests": [{"args": json.loads("[" * 700 + "]" * 700), "expected": 3}]}, "maximum recursion depth exceeded"),
        (
            {"entry_point": None, "tests": "x = 1"},
            "has no column 'entry_point', and 'x = 1' calls no function of the program",
        ),
        ({"entry_point": None, "tests": "assert len([])"}, "calls no function of the program"),
        ({"entry_point": "f(x)"}, "column 'entry_point' must name a function, got 'f(x)'"),
        ({"test_imports": "import math"}, "test_imports must be a list of import lines"),
    ],
)
def test_a_row_that_is_no_problem_is_refused(change: dict[str, Any], line: str) -> None:
    good = {"prompt": "Double it.", "entry_point": "f", "tests": "assert f(1) == 2"}
    with pytest.raises((ValueError, RecursionError), match=re.escape(line)):
        problem_of(good | change)


def test_tags_stand_for_what_json_lacks() -> None:
    told = {
        "$dict": [[{"$tuple": [1, 2]}, {"$set": [3]}], [{"$frozenset": [4]}, {"$bytes": "00ff"}]],
    }
    assert plain_value(told) == {(1, 2): {3}, frozenset({4}): b"\x00\xff"}
    assert plain_value([{"$int": "0xff"}, {"$float": "inf"}, {"a": 1, "$int": "0x1"}]) == [
        255,
        float("inf"),
        {"a": 1, "$int": "0x1"},
    ]
    assert call_test({"args": [], "expected": {"$float": "-inf"}}).expected == float("-inf")


def shared_rows(shared: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (shared / f"data/code/{name}.jsonl").read_text().splitlines()]


@pytest.mark.shared
def test_all_shared_problems_are_read(shared: Path) -> None:
    humaneval = [problem_of(row) for row in shared_rows(shared, "humaneval")]
    mbpp = [problem_of(row) for row in shared_rows(shared, "mbpp_sanitized")]
    assert (len(humaneval), len(mbpp)) == (82, 214)
    assert all(problem.opening for problem in humaneval)
    assert sum(len(problem.tests) > 1 for problem in humaneval) == 79
    assert not any(problem.opening for problem in mbpp)
    assert [len(problem.tests) for problem in mbpp] == [
        len(r["test_list"]) for r in shared_rows(shared, "mbpp_sanitized")
    ]


@pytest.mark.shared
def test_the_function_is_found_in_the_asserts_where_no_column_names_it(shared: Path) -> None:
    def found(row: dict[str, Any]) -> Problem:
        return problem_of({name: value for name, value in row.items() if name != "entry_point"})

    rows = shared_rows(shared, "mbpp_sanitized")
    other = [row["task_id"] for row in rows if found(row).entry_point != row["entry_point"]]
    assert other == []
