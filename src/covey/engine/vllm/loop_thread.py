"""An event loop in a thread of its own, for vLLM's sockets."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines beside the calling thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine; cancelling the future cancels it. RuntimeError once closed."""
        with self._lock:  # a loop that has stopped would take it, and never run it
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise RuntimeError("the thread is closed")

    def close(self, seconds: float) -> None:
        """Cancel running work and end the thread, within `seconds`."""
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
        if is_first:
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        self._thread.join(seconds)

    async def _stop(self) -> None:
        """Stop the loop once all tasks have received their cancellation."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.stop()
