"""What test files use of pytest, which is not there: `raises`, `approx`, `mark.parametrize`, fixtures and plain marks.

`run` has one test run: a function, or a method of a class of pytest or unittest.
"""

import inspect
import itertools
import re
import sys
import types
import unittest
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

Scope = dict[str, Any]


class Raises:
    """Expects an exception, within `with` or of a call."""

    def __init__(self, expected: Any, *call: Any, match: str | None = None, **keywords: Any) -> None:
        self._expected, self._match = expected, match
        if call:
            with self:
                call[0](*call[1:], **keywords)

    def __enter__(self) -> "Raises":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if kind is None:
            raise AssertionError(f"it did not raise {self._expected!r:.100}")
        if not issubclass(kind, self._expected):
            return False
        self.type, self.value = kind, error
        assert self._match is None or re.search(self._match, str(error)), f"{error!s:.100} does not match"
        return True


class Approx:
    """Equals numbers that are close, alone or in lists, tuples and dicts."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:
        self._expected, self._rel, self._abs, self._nan_ok = expected, rel, abs, nan_ok

    def __eq__(self, got: object) -> bool:
        return self._meets(self._expected, got)

    def _meets(self, expected: Any, got: Any) -> bool:
        if isinstance(expected, Mapping):
            return isinstance(got, Mapping) and expected.keys() == got.keys() and self._all(expected.items(), got)
        if isinstance(expected, list | tuple):
            is_alike = isinstance(got, list | tuple) and len(expected) == len(got)
            return is_alike and self._all(enumerate(expected), got)
        if isinstance(expected, bool) or not isinstance(expected, int | float | complex):
            return bool(expected == got)
        if type(got) not in (int, float, complex, bool):
            return bool(got == expected)
        relative = 0.0 if self._rel is None and self._abs is not None else self._rel or 1e-6
        is_nan = expected != expected and got != got and self._nan_ok
        return (
            is_nan
            or expected == got
            or abs(expected - got) <= max(relative * abs(expected), self._abs or 1e-12) < float("inf")
        )

    def _all(self, items: Iterable[Any], got: Any) -> bool:
        return all(self._meets(value, got[key]) for key, value in items)


class Mark:
    """`pytest.mark`: of all marks only `parametrize` means something here."""

    def __getattr__(self, name: str) -> Any:
        def mark(*arguments: Any, **keywords: Any) -> Any:
            return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else lambda marked: marked

        return mark

    def parametrize(self, names: Any, values: Iterable[Any], **_: Any) -> Callable[[Any], Any]:
        """Have a function run with each of the values."""
        split = names.replace(" ", "").split(",") if isinstance(names, str) else list(names)
        rows = [dict(zip(split, row if len(split) > 1 else (row,), strict=True)) for row in values]

        def marked(function: Any) -> Any:
            function.cases = [*function.__dict__.get("cases", []), rows]
            return function

        return marked


def param(*values: Any, **_: Any) -> Any:
    """Return one set of values."""
    return values if len(values) != 1 else values[0]


def fixture(function: Any = None, **_: Any) -> Any:
    """Mark what makes the argument of its name."""
    return (lambda found: found) if function is None else function


def fail(reason: str = "", **_: Any) -> NoReturn:
    """Fail the test."""
    raise AssertionError(reason)


def run(scope: Scope, call: str) -> None:
    """Run one test of a file that was executed in this scope."""
    name, _, method = call.partition(".")
    found = scope[name]
    if not method:
        run_function(scope, found)
    elif issubclass(found, unittest.TestCase):
        found.setUpClass()
        try:
            found(method).debug()
        finally:
            found.tearDownClass()
    else:
        made = found()
        if "setup_method" in dir(made):
            run_function({**scope, "method": lambda: None}, made.setup_method)
        run_function({**scope, "self": lambda: made}, found.__dict__[method])


def run_function(scope: Scope, function: Any) -> None:
    """Call a function with each of its sets of parameters, its other arguments made by fixtures."""
    for rows in itertools.product(*function.__dict__.get("cases", [])):
        told = {name: value for row in rows for name, value in row.items()}
        wanted = inspect.signature(function).parameters
        function(**{name: told[name] if name in told else made_by_fixture(scope, name) for name in wanted})


def made_by_fixture(scope: Scope, name: str) -> Any:
    """Return what the fixture of that name makes, which may need others."""
    made = scope[name](**{inner: made_by_fixture(scope, inner) for inner in inspect.signature(scope[name]).parameters})
    return next(made) if isinstance(made, types.GeneratorType) else made


def install() -> None:
    """Have test code find it under the name of pytest."""
    module = types.ModuleType("pytest")
    module.__dict__.update(
        {"raises": Raises, "approx": Approx, "mark": Mark(), "param": param, "fixture": fixture, "fail": fail}
    )
    sys.modules["pytest"] = module
