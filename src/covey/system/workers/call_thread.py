"""A thread that runs calls in order, beside the event loop."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

from covey.system.waits.running import running_clock


class CallThread:
    """One thread, started when first needed, that keeps no process from ending.

    It may hang in a user's function, which an executor's thread would wait for.
    """

    def __init__(self, name: str = "covey-reward") -> None:
        self._name = name
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.busy_since: float | None = None
        """Second of the running clock at which the call in flight began."""

    @property
    def num_waiting(self) -> int:
        return self._calls.qsize()

    def submit(self, function: Callable[[], Any]) -> "Future[Any]":
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        answer: Future[Any] = Future()
        self._calls.put((function, answer))
        return answer

    async def call(self, function: Callable[[], Any]) -> Any:
        """Return the function's result, or raise its exception."""
        return await asyncio.wrap_future(self.submit(function))

    def close(self) -> None:
        """End the thread after the pending calls."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (job := self._calls.get()) is not None:
            function, answer = job
            if not answer.set_running_or_notify_cancel():
                continue
            self.busy_since = running_clock()()
            try:
                report = partial(answer.set_result, function())
            except BaseException as error:  # whoever waits for the call must hear of it
                report = partial(answer.set_exception, error)
            self.busy_since = None
            report()
