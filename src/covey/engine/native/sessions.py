"""Sessions of the native engine, cached while they wait for the environment."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Protocol

from covey.engine.native.rows import DecodeRow, SamplingRequest
from covey.types import Completion, Sampling


class SessionHost(Protocol):
    """Functions of the engine that a session calls."""

    def extend(self, row: DecodeRow, token_ids: Sequence[int], sampling: Sampling) -> "asyncio.Future[Completion]": ...

    def close_session(self, row: DecodeRow) -> None: ...

    def abandon(self, row: DecodeRow) -> None: ...


class NativeSession:
    """One attempt of several turns (`Session`), closed when dropped or cancelled."""

    def __init__(self, engine: SessionHost, row: DecodeRow, first: "asyncio.Future[Completion]") -> None:
        self._engine = engine
        self._row = row
        self._first = first

    @property
    def re_encoded_tokens(self) -> int:
        return self._row.re_encoded

    async def first(self) -> Completion:
        return await self._wait(self._first)

    async def extend(self, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Append the environment's reply, and sample the next turn."""
        if self._row.closed or self._row.completion is None:
            state = "is closed" if self._row.closed else "has not answered its last turn"
            raise RuntimeError(f"a session that {state} cannot be extended")
        return await self._wait(self._engine.extend(self._row, token_ids, sampling))

    def close(self) -> None:
        self._engine.close_session(self._row)

    def __del__(self) -> None:
        if not self._row.closed:
            self._engine.abandon(self._row)

    async def _wait(self, turn: "asyncio.Future[Completion]") -> Completion:
        try:
            return await turn
        except asyncio.CancelledError:
            self.close()
            raise


class PendingTurns:
    """Open sessions and awaited turns."""

    def __init__(self) -> None:
        self.under_way: dict[DecodeRow, asyncio.Future[Completion]] = {}
        self.requests: dict[SamplingRequest, int] = {}
        """Number of open sessions of each."""
        self.version = 0
        """Version of the weights that the kept tokens were encoded with."""

    def open(self, request: SamplingRequest) -> None:
        """Begin the first turn of sessions."""
        self.requests[request] = request.n
        for row in request.sessions:
            self.begin(row)

    def begin(self, row: DecodeRow) -> "asyncio.Future[Completion]":
        """Begin a turn, and return its future in the running loop."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may have no waiter
        self.under_way[row] = future
        return future

    def answer(self, over: Sequence[tuple[int, DecodeRow]]) -> None:
        for _, row in over:
            future = self.under_way.pop(row, None)
            if future is not None and not future.done():
                assert row.completion is not None, "its turn is over"
                future.set_result(row.completion)

    def close(self, row: DecodeRow) -> None:
        """Remove a session, once."""
        future = self.under_way.pop(row, None)
        if future is not None:
            future.cancel()
        self.requests[row.request] -= 1
        if not self.requests[row.request]:
            del self.requests[row.request]

    def at_rest(self) -> Iterator[DecodeRow]:
        for request in self.requests:
            yield from (row for row in request.sessions if row.is_at_rest)
