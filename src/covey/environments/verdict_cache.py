"""Verdicts that were reached once are not reached again: a policy that learns writes the same programs many times."""

import asyncio
import hashlib
import json
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covey.sandbox.types import Limits, Report, Runner, Test

MAX_BYTES = 128 << 20
"""Of all verdicts that are kept: a policy decides how long their messages are."""
RESULT_BYTES = 200
"""Of a result without its message, and of what is kept besides it."""


@dataclass(frozen=True, slots=True)
class _Kept:
    report: Report
    num_agreed: int
    """Runs in a row that came to it."""

    @property
    def is_settled(self) -> bool:
        """What the clock decided is believed the second time only: the machine may have been busy."""
        return self.num_agreed > 1 or not any(result.kind in CLOCKED for result in self.report.results)


class CachedRunner:
    """A Runner before another one. Programs that are equal and asked for at the same time run once.

    A verdict belongs to the verifier (what it says of itself), the limits, the tests, the entry point and the code.
    """

    def __init__(self, runner: Runner, size: int) -> None:
        """Keep the last `size` verdicts, of at most MAX_BYTES together; 0 keeps none.

        Takes over the runner: `close` closes it.
        """
        self._runner = runner
        self._size = size
        self._identity = identity_of(runner)
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._num_bytes = 0
        self._running: dict[str, asyncio.Task[Report]] = {}
        self._num_asked = 0
        self._num_run = 0

    async def run(
        self, code: str, tests: Sequence[Test], entry_point: str | None = None, limits: Limits | None = None
    ) -> Report:
        """The verdict on a program, from the cache where it is there. SandboxFailed is never kept."""
        self._num_asked += 1
        key = _digest(self._identity, entry_point, limits, tuple(tests), code)
        kept = self._kept.get(key)
        if kept is not None and kept.is_settled:
            self._kept.move_to_end(key)
            return kept.report
        if key not in self._running or self._running[key].get_loop() is not asyncio.get_running_loop():
            asked = self._run(key, code, tests, entry_point, limits)
            self._running[key] = asyncio.get_running_loop().create_task(asked)
        return await asyncio.shield(self._running[key])

    def take_counts(self) -> tuple[int, int]:
        """(verdicts that were asked for, programs that were run for them) since this was last called."""
        counts = self._num_asked, self._num_run
        self._num_asked = self._num_run = 0
        return counts

    def describe(self) -> dict[str, Any]:
        return self._runner.describe()

    def close(self) -> None:
        self._runner.close()

    async def _run(
        self, key: str, code: str, tests: Sequence[Test], entry_point: str | None, limits: Limits | None
    ) -> Report:
        try:
            self._num_run += 1
            report = await self._runner.run(code, tests, entry_point, limits)
            self._keep(key, report)
            return report
        finally:
            self._running.pop(key, None)

    def _keep(self, key: str, report: Report) -> None:
        before = self._drop(key)
        agreed = before is not None and _verdicts(before.report) == _verdicts(report)
        self._kept[key] = _Kept(report, before.num_agreed + 1 if before is not None and agreed else 1)
        self._num_bytes += bytes_of(report)
        while len(self._kept) > self._size or self._num_bytes > MAX_BYTES:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: str) -> _Kept | None:
        dropped = self._kept.pop(key, None)
        self._num_bytes -= bytes_of(dropped.report) if dropped is not None else 0
        return dropped


def bytes_of(report: Report) -> int:
    """Return about how much memory a report takes, whose equal results are one object."""
    return sum(RESULT_BYTES + 4 * len(message) for message in {result.message for result in report.results}) + (
        RESULT_BYTES + 8 * len(report.results)
    )


def identity_of(runner: Runner) -> str:
    """What verdicts depend on besides program, tests and limits."""
    return f"{type(runner).__name__} {json.dumps(runner.describe(), sort_keys=True, default=repr)}"


def _digest(*parts: object) -> str:
    """Pickled, since `repr` has a limit for large integers, and JSON knows no tuples."""
    return hashlib.sha256(pickle.dumps(parts)).hexdigest()


def _verdicts(report: Report) -> list[bool]:
    return [result.passed for result in report.results]


CLOCKED = frozenset({"timeout", "not_run"})
"""Kinds of results that another run might not repeat."""
