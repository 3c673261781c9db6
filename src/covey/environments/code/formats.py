"""Rows of programming data sets as problems: HumanEval, MBPP, and your own JSON lines.

| column                        | what it is                                                                       |
|-------------------------------|----------------------------------------------------------------------------------|
| `prompt`, or `text`           | what is asked for, in words, or the beginning of the program                     |
| `entry_point`, or `function`  | the function that is tested; where missing, the one the first assert calls       |
| `tests`, `test` or `test_list`| test code as text; a list of asserts; or a list of calls (see below)             |
| `test_setup_code`,            | code, or a list of imports, that runs before the tests                           |
| `test_imports`                |                                                                                  |
| `solution`, `code`, or        | a program that passes; after a prompt that begins the program                    |
| `canonical_solution`          | `canonical_solution` is its rest                                                 |
| `difficulty`                  | a number, for those who order problems by it                                     |

A call is `{"args": [3], "expected": 10}`, with `"tol": {"rel": r, "abs": a}` where floats may differ. What JSON lacks
is written with tags: `{"$tuple": [..]}`, `{"$set": [..]}`, `{"$frozenset": [..]}`, `{"$dict": [[key, value], ..]}`,
`{"$int": "0x.."}`, `{"$float": "inf"}`, `{"$bytes": "00ff"}`.

Test code is trusted: it runs as it is, in a process that the tested program cannot reach.
"""

import ast
import builtins
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covey.environments.code.problems import Problem
from covey.environments.code.words import asked, shown_call, signature_of, to_complete
from covey.environments.data.columns import text_in
from covey.sandbox.types import AssertTest, CallTest, Test

Row = Mapping[str, Any]


def problem_of(row: Row) -> Problem:
    """Read the problem of a row. Raises ValueError where it lacks something."""
    # Columns go by several names in public data sets
    prompt = _text(row, "prompt", "text")
    solution = _solution(row, prompt)
    tests = row[_given(row, "tests", "test", "test_list")]
    asserts = row["test_list"] if _is_list_of_text(row.get("test_list")) else tests
    # The function's name: from a column, or from the calls in its tests
    is_named = row.get("entry_point") or row.get("function")
    entry_point = _text(row, "entry_point", "function") if is_named else _called(asserts)
    if not all(map(str.isidentifier, entry_point.split("."))):
        raise ValueError(f"column 'entry_point' must name a function, got {entry_point!r:.80}")
    # HumanEval's prompts are the beginning of the program itself
    opening = prompt if _begins_program(prompt, entry_point) else ""
    judging = _tests(asserts, entry_point, _setup(row, opening))
    return Problem(
        family=str(row.get("source", "rows")),
        difficulty=_difficulty(row),
        statement=to_complete(opening) if opening else _statement(prompt, entry_point, solution, asserts, judging),
        entry_point=entry_point,
        tests=judging,
        solution=solution,
        opening=opening,
    )


# ------------------------------------------------------------------------------------------------ columns


def _given(row: Row, *names: str) -> str:
    """Return the first of the columns that has something in it."""
    for name in names:
        if row.get(name):
            return name
    raise ValueError(f"has no column {' or '.join(repr(name) for name in names)} (has: {', '.join(row)})")


def _text(row: Row, *names: str) -> str:
    return text_in(row, _given(row, *names))


def _difficulty(row: Row) -> int | None:
    value = row.get("difficulty")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"difficulty must be a whole number, got {value!r:.80}")
    return value


def _solution(row: Row, prompt: str) -> str | None:
    if row.get("solution") or row.get("code"):
        return _text(row, "solution", "code")
    if not row.get("canonical_solution"):
        return None
    rest = _text(row, "canonical_solution")
    return prompt + rest if rest.startswith((" ", "\t")) else rest


def _setup(row: Row, opening: str) -> str:
    """Return what test code may need: imports, and the helpers that the beginning of the program defines."""
    imports = row.get("test_imports") or []
    if not _is_list_of_text(imports):
        raise ValueError(f"test_imports must be a list of import lines, got {imports!r:.80}")
    helpers = opening + "    pass\n" if opening else ""
    return "\n".join([helpers, *imports, row.get("test_setup_code") or ""]).strip("\n")


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(v, str) for v in value)


# ------------------------------------------------------------------------------------------------ prompts


def _begins_program(prompt: str, entry_point: str) -> bool:
    """Return whether the prompt is the beginning of the program itself, up to somewhere in the function."""
    tree = _parsed(prompt + "\n    pass\n")
    return tree is not None and any(_is_function(node, entry_point) for node in tree.body)


def _is_function(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name


def _statement(prompt: str, entry_point: str, solution: str | None, asserts: Any, tests: Sequence[Test]) -> str:
    """Return what a chat model reads: of a list of asserts the first is shown, of calls the first of several."""
    calls = [test for test in tests if isinstance(test, CallTest)]
    lines = [str(asserts[0])] if _is_list_of_text(asserts) else [shown_call(entry_point, test) for test in calls[:-1]]
    return asked(prompt, entry_point, signature_of(solution, entry_point, calls), lines[:1])


# ------------------------------------------------------------------------------------------------ tests


def _tests(tests: Any, entry_point: str, setup: str) -> tuple[Test, ...]:
    if isinstance(tests, str):
        return tuple(AssertTest(source, setup) for source in split_tests(tests, entry_point))
    if _is_list_of_text(tests):
        return tuple(AssertTest(source, setup) for source in tests)
    if isinstance(tests, Sequence):
        return tuple(call_test(test) for test in tests)
    raise ValueError(f"tests must be code or a list, got {tests!r:.80}")


def split_tests(source: str, entry_point: str) -> list[str]:
    """Test code as tests that stand alone, so that a program can pass a part of them.

    A file of asserts, or a `check` that consists of asserts, gives one test for each that can fail (`assert True` is no
    test); anything else stays whole.
    """
    # Several asserts are several tests
    tree = _parsed(source)
    if tree is None:
        raise ValueError("tests are not Python code")
    if tree.body and all(isinstance(node, ast.Assert) for node in tree.body):
        return [ast.unparse(node) for node in tree.body if _can_fail(node)] or [source]
    # So are those within check(candidate); other programs are one test
    checks = [node for node in tree.body if _is_function(node, "check")]
    if len(checks) != 1 or not isinstance(checks[0], ast.FunctionDef):
        return [source]
    place, asserts = tree.body.index(checks[0]), checks[0].body
    only_called = all(ast.unparse(node) == f"check({entry_point})" for node in tree.body[place + 1 :])
    if not only_called or len(asserts) < 2 or not all(isinstance(node, ast.Assert) for node in asserts):
        return [source]
    # Each gets the text before them
    head = ast.unparse(ast.Module(tree.body[:place], [])) + f"\n\ndef check({ast.unparse(checks[0].args)}):\n    "
    return [f"{head}{ast.unparse(node)}\n\ncheck({entry_point})\n" for node in asserts if _can_fail(node)] or [source]


def _can_fail(node: ast.stmt) -> bool:
    """Tell tests from asserts of a constant or of `callable(...)`, which ask the program nothing."""
    if not isinstance(node, ast.Assert):
        return True
    if isinstance(node.test, ast.Call):
        return not (isinstance(node.test.func, ast.Name) and node.test.func.id == "callable")
    return not (isinstance(node.test, ast.Constant) and node.test.value)


def call_test(test: Any) -> CallTest:
    """Return a call as rows write it. Raises ValueError where it is none."""
    if not isinstance(test, Mapping) or "expected" not in test or not isinstance(test.get("args", []), list):
        raise ValueError(f'a test must be {{"args": [...], "expected": ...}}, got {test!r:.80}')
    tolerance = test.get("tol") or {}
    if not isinstance(tolerance, Mapping) or not set(tolerance) <= {"rel", "abs"}:
        raise ValueError(f'tol of a test must be {{"rel": r, "abs": a}}, got {tolerance!r:.80}')
    return CallTest(
        args=tuple(plain_value(value) for value in test.get("args", [])),
        kwargs={name: plain_value(value) for name, value in (test.get("kwargs") or {}).items()},
        expected=plain_value(test["expected"]),
        rel=float(tolerance.get("rel") or 0.0),
        abs=float(tolerance.get("abs") or 0.0),
    )


def plain_value(value: Any) -> Any:
    """Return the value that JSON with tags stands for.

    >>> plain_value({"$tuple": [1, {"$set": [2]}]})
    (1, {2})
    """
    # Lists and plain values
    if isinstance(value, list):
        return [plain_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    # A mapping with one tagged key stands for what JSON cannot hold
    (tag,) = value if len(value) == 1 else ("",)
    if tag in TAGS:
        try:
            return TAGS[tag](value[tag])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{value!r:.80} is not a value: {error}") from error
    return {name: plain_value(item) for name, item in value.items()}


def _called(tests: Any) -> str:
    """Return the function that the first assert calls."""
    first = tests[0] if _is_list_of_text(tests) and tests else tests
    tree = _parsed(first) if isinstance(first, str) else None
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Assert):
            return _own_name(node, first)
    raise ValueError("has no column 'entry_point', and no assert that calls a function")


def _own_name(test: ast.Assert, source: str) -> str:
    """Return the call that belongs to the program: not a builtin, not an attribute of a module."""
    calls = [node.func.id for node in ast.walk(test) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    own = [name for name in calls if name not in dir(builtins)]
    if not own:
        raise ValueError(f"has no column 'entry_point', and {source!r:.80} calls no function of the program")
    return own[0]


def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


TAGS: dict[str, Callable[[Any], Any]] = {
    "$tuple": lambda items: tuple(plain_value(item) for item in items),
    "$set": lambda items: {plain_value(item) for item in items},
    "$frozenset": lambda items: frozenset(plain_value(item) for item in items),
    "$dict": lambda pairs: {plain_value(key): plain_value(value) for key, value in pairs},
    "$int": lambda text: int(text, 16),
    "$float": float,
    "$bytes": bytes.fromhex,
}
