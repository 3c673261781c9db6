"""A small pytest for test files: `raises`, `approx`, `parametrize`, fixtures, marks.

`run` runs one test: a function, or a method of a class of pytest or unittest.
"""

import inspect
import itertools
import re
import sys
import types
import unittest
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from covey_sandbox.inside.judging.compare import Tolerance, matches


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
        self.type, self.value = kind, error
        if not issubclass(kind, self._expected):
            return False
        assert self._match is None or re.search(self._match, str(error)), f"{error!s:.100} does not match"
        return True


class Approx:
    """Equals close numbers, alone or in lists, tuples and dicts."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, **_: Any) -> None:
        self._expected = as_floats(expected)
        self._tolerance = Tolerance((0.0 if abs is not None else 1e-6) if rel is None else rel, abs or 1e-12)

    def __eq__(self, got: object) -> bool:
        return matches(self._expected, as_floats(got), self._tolerance)


def as_floats(value: Any) -> Any:
    """Return a value with floats in place of integers."""
    if isinstance(value, dict):
        return {key: as_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_floats(item) for item in value]
    is_small = isinstance(value, int) and abs(value) < 2**53
    return float(value) if is_small else value


class Mark:
    """`pytest.mark`, of which `parametrize` alone has an effect."""

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **_: given[0] if len(given) == 1 and callable(given[0]) else lambda marked: marked

    def parametrize(self, names: Any, values: Iterable[Any], **_: Any) -> Callable[[Any], Any]:
        """Run a function with each of the values."""
        split = names.replace(" ", "").split(",") if isinstance(names, str) else list(names)
        rows = [dict(zip(split, row if len(split) > 1 else (row,), strict=True)) for row in values]

        def marked(function: Any) -> Any:
            function.cases = [*function.__dict__.get("cases", []), rows]
            return function

        return marked


def param(*values: Any, **_: Any) -> Any:
    return values if len(values) != 1 else values[0]


def fixture(function: Any = None, **_: Any) -> Any:
    """Mark the maker of an argument."""
    return (lambda found: found) if function is None else function


def fail(reason: str = "", **_: Any) -> NoReturn:
    raise AssertionError(reason)


def run(scope: dict[str, Any], call: str) -> None:
    """Run one test of a file executed in this scope."""
    name, _, method = call.partition(".")
    found = scope[name]
    if not method:
        run_function(scope, found)
    elif issubclass(found, unittest.TestCase):
        found.setUpClass()
        found(method).debug()
    else:
        made = found()
        if "setup_method" in dir(made):
            run_function({**scope, "method": lambda: None}, made.setup_method)
        run_function({**scope, "self": lambda: made}, found.__dict__[method])


def run_function(scope: dict[str, Any], function: Any) -> None:
    """Call a function with each parameter set and its fixtures."""
    for rows in itertools.product(*function.__dict__.get("cases", [])):
        told = {name: value for row in rows for name, value in row.items()}
        wanted = inspect.signature(function).parameters
        function(**{name: told[name] if name in told else made_by_fixture(scope, name) for name in wanted})


def made_by_fixture(scope: dict[str, Any], name: str) -> Any:
    """Return a fixture's value, made with its own fixtures."""
    made = scope[name](**{inner: made_by_fixture(scope, inner) for inner in inspect.signature(scope[name]).parameters})
    return next(made) if isinstance(made, types.GeneratorType) else made


def install() -> None:
    """Install it as pytest for test code."""
    module = types.ModuleType("pytest")
    module.__dict__.update(raises=Raises, approx=Approx, mark=Mark(), param=param, fixture=fixture, fail=fail)
    sys.modules["pytest"] = module
