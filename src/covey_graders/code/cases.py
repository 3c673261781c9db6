"""Tests that rows write as data: calls with answers, scripts with output."""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from covey_sandbox.types import CallTest, OutputTest, Test

SCRIPT = ("stdin", "stdin_stdout")
"""Values of a case's `type` in data sets that mark a script."""
OUTPUTS = ("output", "expected_output", "expected")
"""Names of a case's answer."""
ASSIGNED = re.compile(r"\s*[A-Za-z_]\w*\s*=(?!=)")
"""Beginning of arguments as LeetCode shows them: `nums = [3,3], target = 6`."""
PYTHONS = re.compile(r"\s*(?:[\[{]|(?:True|False|None)\s*\Z)")
"""Text that is a value of Python's where JSON has none."""
JSON_NAMES = {"null": None, "true": True, "false": False}


def plural(table: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the cases of `{"inputs": [...], "outputs": [...]}`, with the function's name. ValueError for unequal
    numbers.
    """
    inputs, outputs = (table.get(f"{name}s", table.get(name)) for name in ("input", "output"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError(f"inputs and outputs must be lists of the same length, got {table!r:.80}")
    shared = {"fn_name": table["fn_name"]} if table.get("fn_name") else {}
    return [{"input": one, "output": other, **shared} for one, other in zip(inputs, outputs, strict=True)]


def name_in(case: Any) -> str | None:
    """Return the function that a case names, None for a script."""
    if not isinstance(case, Mapping) or (case.get("testtype") or case.get("type")) in SCRIPT:
        return None
    within = case.get("metadata")
    name = case.get("fn_name") or (within.get("func_name") if isinstance(within, Mapping) else None)
    return name if isinstance(name, str) else None


def case_tests(cases: Sequence[Any], function: str | None) -> list[Test]:
    """Return tests of the function, or of a script. Raises ValueError."""
    for case in cases:
        if not isinstance(case, Mapping) or "input" not in case or set(case).isdisjoint(OUTPUTS):
            raise ValueError(f'a case must be {{"input": ..., "output": ...}}, got {case!r:.80}')
    cases = [{**case, "output": next(case[name] for name in OUTPUTS if name in case)} for case in cases]
    kinds = {str(case.get("testtype") or case.get("type")) for case in cases}
    if function is None or kinds <= set(SCRIPT):
        if any("func" in kind for kind in kinds):
            raise ValueError("its cases call a function that no column names (fn_name, or func_name in metadata)")
        return [OutputTest(_lines(case["input"]), _lines(case["output"])) for case in cases]
    # If arguments are written as text the answer is, too
    answers = [_value(case["output"]) if isinstance(case["input"], str) else case["output"] for case in cases]
    # APPS puts some answers into a list of one
    is_boxed = all(isinstance(answer, list) and len(answer) == 1 for answer in answers)
    return [
        _call(_arguments(case["input"]), answer, (answer[0],) if is_boxed else ())
        for case, answer in zip(cases, answers, strict=True)
    ]


def _call(arguments: Any, answer: Any, also: tuple[Any, ...]) -> CallTest:
    """Return a call as JSON tells it, which knows no tuples."""
    args, named = ((), arguments) if isinstance(arguments, Mapping) else (tuple(arguments), {})
    return CallTest(args, named, expected=answer, also=also, is_json=True)


def is_assigned(given: Any) -> bool:
    """Check for arguments by name, as text."""
    return isinstance(given, str) and ASSIGNED.match(given) is not None


def _arguments(given: Any) -> Any:
    """Return arguments: a list, a mapping, JSON lines, or text by name."""
    if is_assigned(given):
        return _by_name(given)
    if isinstance(given, str):
        return [_value(line) for line in given.split("\n") if line.strip()]
    return given if isinstance(given, list | Mapping) else [given]


def _by_name(text: str) -> dict[str, Any]:
    """Read values by name, spelt as JSON or Python. ValueError for others."""
    try:
        lines = [line.strip().rstrip(",") for line in text.splitlines() if line.strip()]
        call = ast.parse(f"f({', '.join(lines)})", mode="eval").body
        keywords = call.keywords if isinstance(call, ast.Call) and not call.args else []
        found = {one.arg: ast.literal_eval(_Named().visit(one.value)) for one in keywords if one.arg is not None}
        if not len(found) == len(keywords) > 0:
            raise ValueError("a name twice, or none")
        return found
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"the input of a case must be values by name, got {text!r:.80}") from None


class _Named(ast.NodeTransformer):
    """Puts values in the place of JSON's names."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(JSON_NAMES[node.id]) if node.id in JSON_NAMES else node


def _value(written: Any) -> Any:
    """Return the value of JSON or Python text, else the text."""
    if not isinstance(written, str):
        return written
    try:
        return json.loads(written)
    except ValueError:
        if not PYTHONS.match(written):
            return written
    try:
        return ast.literal_eval(written)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return written


def _lines(written: Any) -> str:
    """Return text that may be a list of lines, or a number."""
    return "\n".join(map(_lines, written)) if isinstance(written, list) else str(written)


def call_test(test: Any) -> CallTest:
    """Return a call in covey's own form. Raises ValueError."""
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


TAGS: dict[str, Callable[[Any], Any]] = {
    "$tuple": lambda items: tuple(plain_value(item) for item in items),
    "$set": lambda items: {plain_value(item) for item in items},
    "$frozenset": lambda items: frozenset(plain_value(item) for item in items),
    "$dict": lambda pairs: {plain_value(key): plain_value(value) for key, value in pairs},
    "$int": lambda text: int(text, 16),
    "$float": float,
    "$bytes": bytes.fromhex,
}
