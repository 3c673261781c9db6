"""Cache of verdicts, as a policy writes the same programs again."""

import hashlib
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from covey_sandbox.types import Limits, Report, Runner, Test
from covey_tasks.async_cache import AsyncCache

MAX_BYTES = 128 << 20
"""Maximum bytes of all kept verdicts: a policy decides how long their messages are."""
RESULT_BYTES = 200
"""Bytes of a result without its message, with its overhead in the cache."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    report: Report
    num_agreed: int = 1
    """Consecutive runs with this result."""


class _Verdicts(AsyncCache[str, _Verdict]):
    """Keep at most MAX_BYTES of verdicts; timeouts count from the second time."""

    def is_final(self, value: _Verdict) -> bool:
        """Return False for a first timeout, as the machine may be busy."""
        return value.num_agreed > 1 or not any(result.kind in CLOCKED for result in value.report.results)

    def combined(self, before: _Verdict | None, value: _Verdict) -> _Verdict:
        agreed = before is not None and _passes(before.report) == _passes(value.report)
        return replace(value, num_agreed=before.num_agreed + 1) if before is not None and agreed else value

    def bytes_of(self, value: _Verdict) -> int:
        """Estimate the memory of a report, whose equal messages are one object."""
        results = value.report.results
        messages = {result.message for result in results}
        return sum(RESULT_BYTES + 4 * len(message) for message in messages) + RESULT_BYTES + 8 * len(results)

    def is_full(self) -> bool:
        return super().is_full() or self.num_bytes > MAX_BYTES


class CachedRunner:
    """Cache another Runner's verdicts; equal concurrent programs run once.

    A verdict belongs to the verifier (what it says of itself), the limits, the tests, the entry point and the code.
    """

    def __init__(self, runner: Runner, size: int) -> None:
        """Keep the last `size` verdicts, at most MAX_BYTES in total; 0: none.

        Takes over the runner: `close` closes it.
        """
        self._runner = runner
        self._identity = f"{type(runner).__name__} {json.dumps(runner.describe(), sort_keys=True, default=repr)}"
        self._verdicts = _Verdicts(size)
        self.take_counts = self._verdicts.take_counts

    async def run(
        self, code: str, tests: Sequence[Test], entry_point: str | None = None, limits: Limits | None = None
    ) -> Report:
        """Judge a program, or return its cached verdict; SandboxFailed is not cached."""

        async def judge() -> _Verdict:
            return _Verdict(await self._runner.run(code, tests, entry_point, limits))

        # A pickle, since `repr` has a limit for large integers, and JSON knows no tuples
        parts = pickle.dumps((self._identity, entry_point, limits, tuple(tests), code))
        return (await self._verdicts.get(hashlib.sha256(parts).hexdigest(), judge)).report

    def describe(self) -> dict[str, Any]:
        return self._runner.describe()

    def close(self) -> None:
        self._runner.close()


def _passes(report: Report) -> list[bool]:
    return [result.passed for result in report.results]


CLOCKED = frozenset({"timeout", "not_run"})
"""Kinds of results that another run might not repeat."""
