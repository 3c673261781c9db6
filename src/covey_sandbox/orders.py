"""Tests as the judge gets them, and its answer as a Report."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from covey_sandbox.inside.codec import Encoder, Unencodable
from covey_sandbox.types import AssertTest, CallTest, Limits, OutputTest, Report, SandboxFailed, Test, TestResult

MAX_TEST = 256 << 20
"""Nodes and characters of a test's values."""


def encode_request(code: str, tests: Sequence[Test], entry_point: str | None, limits: Limits) -> dict[str, Any]:
    """Return the judge's request. Raises ValueError for tests that cannot run."""
    if not tests:
        raise ValueError("tests must not be empty: a program that passes none of none has shown nothing")
    if entry_point is None and not all(isinstance(test, OutputTest) for test in tests):
        raise ValueError("entry_point must name the function to call, got None")
    return {
        "code": code,
        "entry_point": entry_point or "",
        "tests": [_ORDERS[type(test)](test) for test in tests],
        "limits": dict(vars(limits)),
        "packages": {
            name: _folder_of(name) for test in tests if isinstance(test, AssertTest) for name in test.packages
        },
    }


def _folder_of(package: str) -> str:
    """Return the folder of an installed package."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ValueError(f"a test imports {package}, which is not installed")
    return str(Path(found.origin).parent.parent)


def decode_report(answer: dict[str, Any]) -> Report:
    """Return a report, equal results shared. Raises SandboxFailed without a verdict."""
    if "unjudged" in answer:
        raise SandboxFailed(answer["unjudged"])
    results = [TestResult(**result) for result in answer["results"]]
    return Report(
        results=tuple(map({result: result for result in results}.__getitem__, results)),
        suspicious_imports=tuple(answer["imports"]),
        seconds=answer["seconds"],
    )


def _call(test: CallTest) -> dict[str, Any]:
    return {
        "test": "call",
        "args": _encode_value("args", list(test.args)),
        "kwargs": _encode_value("kwargs", dict(test.kwargs)),
        "expected": [_encode_value("expected", value) for value in (test.expected, *test.also)],
        "rel": test.rel,
        "abs": test.abs,
        "is_json": test.is_json,
    }


def _encode_value(name: str, value: Any) -> Any:
    try:
        return Encoder(MAX_TEST, is_strict=True).encode(value)
    except Unencodable as error:
        raise ValueError(f"{name} of a test must be plain values: {error}") from error


_ORDERS: dict[type, Callable[[Any], dict[str, Any]]] = {
    CallTest: _call,
    OutputTest: lambda test: {"test": "output", "stdin": test.stdin, "expected": test.expected},
    AssertTest: lambda test: {
        "test": "assert",
        **{name: value for name, value in vars(test).items() if name != "packages"},
    },
}
