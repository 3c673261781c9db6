"""HTTP/1.1 on an asyncio event loop, bounded in connections, bytes and seconds.

h11 reads and writes the protocol; a request is a whole body, an answer one write.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import h11

from covey_serve.limits import RequestRefused, ServiceLimits

LOGGER = logging.getLogger(__name__)
MAX_HEAD = 1 << 16
PIECE = 1 << 18
JSON, PROTOBUF = "application/json", "application/x-protobuf"
FINISHED = (h11.MUST_CLOSE, h11.CLOSED, h11.ERROR)


@dataclass(frozen=True, slots=True)
class HttpCall:
    """A whole request."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    """Headers by lower-case name."""
    body: bytes


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int = 200
    body: bytes = b""
    kind: str = JSON
    headers: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(content: Any, status: int = 200) -> "HttpAnswer":
        return HttpAnswer(status, json.dumps(content).encode())


class HttpServer:
    """Serves calls through a function."""

    def __init__(
        self,
        answer: Callable[[HttpCall], Awaitable[HttpAnswer]],
        check: Callable[[HttpCall], None],
        limits: ServiceLimits,
    ) -> None:
        """Let `check` refuse heads before their bodies are read."""
        self._answer, self._check, self._limits = answer, check, limits
        self._open: set[asyncio.StreamWriter] = set()
        self._receiving = 0
        """Bytes of bodies that are being received."""

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen, and return the address. OSError where it is taken."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=PIECE, backlog=1024)
        return self._server.sockets[0].getsockname()[:2]

    async def stop(self) -> None:
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= self._limits.connections:
            writer.transport.abort()
            return
        self._open.add(writer)
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        # Whatever a client does, its connection ends
        try:
            with suppress(OSError, EOFError, TimeoutError, asyncio.CancelledError):
                while connection.our_state is not h11.MUST_CLOSE:
                    if not await self._serve_one(connection, reader, writer):
                        break
                    connection.start_next_cycle()
        finally:
            self._open.discard(writer)
            writer.close()

    async def _serve_one(
        self, connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer one request; return True if the connection stays."""
        try:
            call = await self._receive(connection, reader, writer)
            if call is None:
                return False
            answer = await self._answer(call)
        except h11.RemoteProtocolError as error:
            answer = _refusal(RequestRefused(error.error_status_hint, f"the request is no HTTP: {error}"))
        except RequestRefused as refused:
            answer = _refusal(refused)
        except (OSError, EOFError, TimeoutError):
            raise
        except Exception as error:
            LOGGER.exception("a request failed")
            answer = _refusal(RequestRefused(500, f"a defect of the server: {type(error).__name__}"))
        if connection.our_state in FINISHED:
            return False
        await self._send(connection, writer, answer)
        return connection.our_state is h11.DONE and connection.their_state is h11.DONE

    async def _receive(
        self, connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> HttpCall | None:
        """Return the next request, None at the end of the connection."""
        if connection.trailing_data[0] == b"":
            async with asyncio.timeout(self._limits.idle_seconds):
                connection.receive_data(await reader.read(PIECE))
        async with asyncio.timeout(self._limits.head_seconds):
            event = await _next_event(connection, reader)
        if not isinstance(event, h11.Request):
            return None
        path, _, query = event.target.decode("ascii", "replace").partition("?")
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in event.headers}
        call = HttpCall(event.method.decode("ascii"), path, query, headers, b"")
        if call.method == "HEAD":
            raise RequestRefused(405, "")  # an answer to it has no body
        self._check(call)
        if int(headers.get("content-length", "0")) > self._limits.body_bytes:
            raise RequestRefused(413, f"a request has at most {self._limits.body_bytes} bytes")
        if connection.they_are_waiting_for_100_continue:
            writer.write(connection.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        async with asyncio.timeout(self._limits.body_seconds):
            return HttpCall(call.method, path, query, headers, await self._body(connection, reader))

    async def _body(self, connection: h11.Connection, reader: asyncio.StreamReader) -> bytes:
        pieces: list[bytes] = []
        size = 0
        try:
            while isinstance(event := await _next_event(connection, reader), h11.Data):
                pieces.append(bytes(event.data))
                size += len(pieces[-1])
                self._receiving += len(pieces[-1])
                if size > self._limits.body_bytes:
                    raise RequestRefused(413, f"a request has at most {self._limits.body_bytes} bytes")
                if self._receiving > self._limits.bodies_bytes:
                    raise RequestRefused(429, "too many bytes are being received; send again")
            if not isinstance(event, h11.EndOfMessage):
                raise EOFError
            return b"".join(pieces)
        finally:
            self._receiving -= size

    async def _send(self, connection: h11.Connection, writer: asyncio.StreamWriter, answer: HttpAnswer) -> None:
        """Write head and body together."""
        headers = [("Server", "covey"), *answer.headers.items()]
        body = b"" if answer.status in (204, 405) else answer.body
        if answer.status != 204:
            headers += [("Content-Type", answer.kind), ("Content-Length", str(len(body)))]
        if connection.their_state not in (h11.DONE, h11.MUST_CLOSE):  # the rest of a body is not read
            headers.append(("Connection", "close"))
        events: list[Any] = [h11.Response(status_code=answer.status, headers=headers)]
        events += [h11.Data(data=body), h11.EndOfMessage()]
        writer.write(b"".join(connection.send(event) or b"" for event in events))
        async with asyncio.timeout(self._limits.body_seconds):
            await writer.drain()


async def _next_event(connection: h11.Connection, reader: asyncio.StreamReader) -> Any:
    while (event := connection.next_event()) is h11.NEED_DATA:
        connection.receive_data(await reader.read(PIECE))
    return event


def _refusal(refused: RequestRefused) -> HttpAnswer:
    headers = {"x-should-retry": "false"} if refused.status < 500 and refused.status != 429 else {}
    return HttpAnswer(refused.status, json.dumps({"detail": str(refused)}).encode(), headers=headers)
