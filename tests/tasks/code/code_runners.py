"""Runners for tests: one that runs the tests' own, trusted programs right here, and one that says what it is told."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from covey_sandbox.types import AssertTest, CallTest, Limits, Report, Test, TestResult

PASSED = TestResult(True, "passed", "")


def report(*passed: bool, imports: tuple[str, ...] = (), kind: Any = "wrong") -> Report:
    results = (PASSED if good else TestResult(False, kind, "f(3) returned 4, expected 5") for good in passed)
    return Report(tuple(results), imports, seconds=0.0)


@dataclass
class Here:
    """Runs programs in this very process: for programs that a test has written out."""

    asked: list[str] = field(default_factory=list)
    closed: bool = False

    async def run(
        self, code: str, tests: Sequence[Test], entry_point: str | None = None, limits: Limits | None = None
    ) -> Report:
        self.asked.append(code)
        await asyncio.sleep(0)
        return Report(tuple(_result(code, test, entry_point or "") for test in tests), (), seconds=0.0)

    def describe(self) -> dict[str, Any]:
        return {"tier": "here"}

    def close(self) -> None:
        self.closed = True


@dataclass
class Told:
    """Gives the verdicts that a test says, after it was let go where there is a gate."""

    verdict: Callable[[str, Sequence[Test]], Report]
    tier: str = "told"
    asked: list[tuple[str, tuple[Test, ...]]] = field(default_factory=list)
    gate: asyncio.Event | None = None

    async def run(
        self, code: str, tests: Sequence[Test], entry_point: str | None = None, limits: Limits | None = None
    ) -> Report:
        self.asked.append((code, tuple(tests)))
        if self.gate is not None:
            await self.gate.wait()
        return self.verdict(code, tests)

    def describe(self) -> dict[str, Any]:
        return {"tier": self.tier}

    def close(self) -> None: ...


def _result(code: str, test: Test, entry_point: str) -> TestResult:
    scope: dict[str, Any] = {}
    try:
        exec(code, scope)
        function = scope[entry_point]
    except Exception as error:
        return TestResult(False, "load", f"{type(error).__name__}: {error}")
    try:
        if isinstance(test, CallTest):
            got = function(*test.args, **test.kwargs)
            told = f"{entry_point}{tuple(test.args)} returned {got!r}, expected {test.expected!r}"
            return PASSED if got == test.expected else TestResult(False, "wrong", told)
        assert isinstance(test, AssertTest)
        exec(test.setup, scope)
        exec(test.source, scope | {entry_point: function, "candidate": function})
        return PASSED
    except Exception as error:
        return TestResult(False, "error", f"{type(error).__name__}: {error}")
