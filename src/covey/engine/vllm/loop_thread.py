"""An event loop in a thread of its own: vLLM's sockets live there, whatever loops come and go in the caller's."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines beside the thread that asks for them."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine. To cancel the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, seconds: float) -> None:
        """Cancel what still runs and end the thread, waiting for it no longer than that."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop)
            self._thread.join(seconds)

    def _stop(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)
