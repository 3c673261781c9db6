"""A thread that runs calls in order, beside the event loop."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


class CallThread:
    """One thread, started when first needed, that keeps no process from ending.

    It may hang in a user's function, which an executor's thread would wait for.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[[], Any]) -> Any:
        """Return the function's result, or raise its exception."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="covey-reward", daemon=True)
            self._thread.start()
        answer: Future[Any] = Future()
        self._calls.put((function, answer))
        return await asyncio.wrap_future(answer)

    def close(self) -> None:
        """End the thread after the pending calls."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (job := self._calls.get()) is not None:
            function, answer = job
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(function())
            except BaseException as error:  # whoever waits for the call must hear of it
                answer.set_exception(error)
