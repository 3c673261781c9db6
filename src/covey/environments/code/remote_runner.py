"""Programs that run on another machine: an adapter for servers that speak SandboxFusion's HTTP interface.

The server gets code, entry point and arguments, never what is expected; a worker process here compares. So whatever
the server isolates or does not, a program cannot look up what it should answer. It isolates this machine, not one
program from the next: that is the server's own affair.
"""

from collections.abc import Sequence
from typing import Any

from covey.environments.code.remote_judge import judge_remotely
from covey.sandbox.inside.case import START_SECONDS
from covey.sandbox.orders import decode_report, encode_request
from covey.sandbox.types import Limits, Report, SandboxFailed, Test
from covey.system.workers.pool import WorkerPool, WorkerSettings
from covey.types import Failure

NUM_SLOTS = 4
WORKER_BYTES = 4 << 30
"""Address space of a worker: hostile answers cannot take more."""


class RemoteRunner:
    """A Runner (`covey.sandbox.types.Runner`) whose programs run elsewhere, `num_slots` at a time.

    >>> runner = RemoteRunner("http://sandbox.example:8080", num_slots=16)
    """

    def __init__(
        self, url: str, num_slots: int | None = None, margin: float = 10.0, limits: Limits | None = None
    ) -> None:
        """Take the server's address. `margin`: seconds the server may take besides a program's own. `limits`: where
        `run` is given none, and its `total_seconds` is the most that any program may take."""
        self._url = url
        self._margin = margin
        self._limits = limits or Limits()
        self._num_slots = num_slots or NUM_SLOTS
        timeout = self._limits.total_seconds + START_SECONDS + 2 * margin
        settings = WorkerSettings(self._num_slots, timeout, max_calls=10_000, address_bytes=WORKER_BYTES)
        self._pool = WorkerPool([judge_remotely], settings)

    async def run(
        self, code: str, tests: Sequence[Test], entry_point: str | None = None, limits: Limits | None = None
    ) -> Report:
        """Judge a program. Raises SandboxFailed where the server gives no verdict, ValueError for tests it cannot
        take."""
        order = encode_request(code, tests, entry_point, limits or self._limits)
        answer = await self._pool.call(0, {"url": self._url, "margin": self._margin, "order": order})
        if isinstance(answer, Failure):
            raise SandboxFailed(f"{self._url}: {answer.reason}")
        return decode_report(answer)

    def describe(self) -> dict[str, Any]:
        return {"tier": "remote", "url": self._url, "num_slots": self._num_slots}

    def close(self) -> None:
        self._pool.close()
