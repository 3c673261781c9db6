"""Compute each value once: a policy repeats its programs and machines."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from covey.types import Failure

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class AsyncCache(Generic[Key, Value]):
    """Keeps recent values; concurrent requests share one computation.

    A subclass decides when a value is checked again, and how many fit. Exceptions and Failures are never kept.
    """

    def __init__(self, size: int) -> None:
        """Keep the last `size` values; 0 keeps none."""
        if size < 0:
            raise ValueError(f"cache_size must be >= 0, got {size}")
        self._size = size
        self._kept: OrderedDict[Key, Value] = OrderedDict()
        self._running: dict[Key, asyncio.Task[Value]] = {}
        self._num_requested = 0
        self._num_computed = 0
        self.num_bytes = 0
        """Bytes of all kept values, as `bytes_of` counts them."""

    async def get(self, key: Key, compute: Callable[[], Awaitable[Value]]) -> Value:
        """Return a key's value, computed unless a final one is kept."""
        self._num_requested += 1
        kept = self._kept.get(key)
        if kept is not None and self.is_final(kept):
            self._kept.move_to_end(key)
            return kept
        # Wait for the one computation of this event loop. Who stops waiting leaves it to the others.
        running = self._running.get(key)
        if running is None or running.get_loop() is not asyncio.get_running_loop():
            running = asyncio.get_running_loop().create_task(self._compute(key, compute))
            self._running[key] = running
        return await asyncio.shield(running)

    def take_counts(self) -> tuple[int, int]:
        """Return the requested and the computed values since the last call."""
        counts = self._num_requested, self._num_computed
        self._num_requested = self._num_computed = 0
        return counts

    def is_final(self, value: Value) -> bool:
        """Return True if a kept value is used, not computed again."""
        return True

    def combined(self, before: Value | None, value: Value) -> Value:
        """Combine a new value with the one kept before."""
        return value

    def bytes_of(self, value: Value) -> int:
        """Estimate the memory of a value, for `is_full`."""
        return 0

    def is_full(self) -> bool:
        """Return True if the least recent value is to be dropped."""
        return len(self._kept) > self._size

    async def _compute(self, key: Key, compute: Callable[[], Awaitable[Value]]) -> Value:
        try:
            self._num_computed += 1
            value = await compute()
            if not isinstance(value, Failure):
                self._keep(key, self.combined(self._drop(key), value))
            return value
        finally:
            self._running.pop(key, None)

    def _keep(self, key: Key, value: Value) -> None:
        self._kept[key] = value
        self.num_bytes += self.bytes_of(value)
        while self._kept and self.is_full():
            self._drop(next(iter(self._kept)))

    def _drop(self, key: Key) -> Value | None:
        dropped = self._kept.pop(key, None)
        self.num_bytes -= 0 if dropped is None else self.bytes_of(dropped)
        return dropped
