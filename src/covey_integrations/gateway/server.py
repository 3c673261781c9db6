"""Serve every episode at its own URL, on the loopback interface alone.

The server has an event loop of its own, and knows nothing of episodes but their endpoints: a call waits at its endpoint
until the episode, in the event loop of the run, answers it. An unknown key is answered as any other unknown path. A
connection without a whole head yet costs one descriptor of a few, for half a minute at most.
"""

import asyncio
import io
import json
import secrets
import socket
import threading
from collections import OrderedDict
from contextlib import closing, suppress
from email.message import Message
from http import HTTPStatus
from http.client import HTTPException, parse_headers

from covey_integrations.gateway.endpoint import OVER, Endpoint
from covey_integrations.gateway.refused import Refused
from covey_integrations.gateway.tokens import generate_request, generation_of
from covey_integrations.gateway.wire import (
    RunSampling,
    body_of,
    chat_request,
    completion_of,
    models,
    reward_of,
    stream_of,
)

MAX_BYTES = 4 * 2**20
"""Maximum bytes of a request's body."""
MAX_HEAD = 2**16
"""Bytes of the head before it."""
SECONDS = 30.0
"""Seconds from the beginning of a connection to its request's last byte, and for the client to take the answer."""
MAX_WAITING = 256
"""Most connections with a request still to come, the oldest is dropped: anybody on this machine can make them."""
MAX_ACCEPTED = 32
"""Connections taken in one round of the loop, before earlier ones are counted and dropped."""
MAX_QUEUED = 1024
"""Connections that the kernel keeps meanwhile."""
NUM_REMEMBERED = 10_000
"""Episodes that ended and whose URLs still say so."""
NOT_FOUND = "not found"
JSON = "application/json"
ROUTES = ("reward", "inference/v1/generate", "v1/chat/completions")
"""Routes that take a body."""


class Gateway:
    """Hands out endpoints, and serves them."""

    def __init__(self, run: RunSampling) -> None:
        self.run = run
        self._endpoints: dict[str, Endpoint] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        self._server: _Server | None = None

    @property
    def port(self) -> int:
        """Return the port chosen by the system, starting the server if needed."""
        with self._lock:
            if self._server is None:
                self._server = _Server(self)
            return self._server.address[1]

    def open(self) -> Endpoint:
        """Open an endpoint with a key of its own. Must be called while the event loop runs."""
        port, key = self.port, secrets.token_urlsafe(32)
        endpoint = Endpoint(key, f"http://127.0.0.1:{port}/e/{key}/v1", self.run)
        with self._lock:
            self._endpoints[key] = endpoint
        return endpoint

    def close_endpoint(self, endpoint: Endpoint) -> None:
        """End an episode: waiting and later calls are refused."""
        with self._lock:
            self._endpoints.pop(endpoint.key, None)
            self._ended[endpoint.key] = None
            if len(self._ended) > NUM_REMEMBERED:
                self._ended.popitem(last=False)
        endpoint.end(Refused(410, OVER, code="episode_over"), takes_rewards=False)

    def endpoint(self, key: str) -> Endpoint:
        """Return the endpoint of a key. Raises Refused."""
        with self._lock:
            if key in self._endpoints:
                return self._endpoints[key]
            if key in self._ended:
                raise Refused(410, OVER, code="episode_over")
        raise Refused(404, NOT_FOUND)

    def close(self) -> None:
        for endpoint in list(self._endpoints.values()):
            self.close_endpoint(endpoint)
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.stop()


class _Server:
    """Serves local connections in its own event loop, without threads per connection."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._waiting: dict[asyncio.StreamWriter, None] = {}
        """Connections without a whole head, the oldest first."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="covey-gateway", daemon=True)
        self._thread.start()
        listening = socket.create_server(("127.0.0.1", 0))
        # asyncio takes as many at once as it asks the kernel to keep: few here, and then the kernel is asked for more
        opening = asyncio.start_server(self._serve, sock=listening, limit=MAX_HEAD, backlog=MAX_ACCEPTED)
        self._server = asyncio.run_coroutine_threadsafe(opening, self._loop).result()
        listening.listen(MAX_QUEUED)
        self.address: tuple[str, int] = listening.getsockname()

    def stop(self) -> None:
        """End the server, once pending answers are out."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        await asyncio.sleep(0.01)  # what was accepted just now is among those that wait then
        for writer in list(self._waiting):
            writer.transport.abort()
        late = asyncio.all_tasks() - {asyncio.current_task()}
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*late, return_exceptions=True), 1.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and so end its connection."""
        self._waiting[writer] = None
        # A head that is on its way arrives in milliseconds, so the oldest is none
        while len(self._waiting) > MAX_WAITING:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.transport.abort()
        until = self._loop.time() + SECONDS
        # Whatever a client does, its connection ends
        with suppress(OSError, EOFError, TimeoutError, asyncio.LimitOverrunError), closing(writer):
            try:
                async with asyncio.timeout_at(until):
                    head = await reader.readuntil(b"\r\n\r\n")
            finally:
                self._waiting.pop(writer, None)
            writer.write(await self._answer(head, reader, until))
            async with asyncio.timeout(SECONDS):
                await writer.drain()

    async def _answer(self, head: bytes, reader: asyncio.StreamReader, until: float) -> bytes:
        try:
            status, kind, said = await self._said(head, reader, until)
        except Refused as refused:
            status, kind, said = refused.status, JSON, json.dumps(refused.body).encode()
        lines = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            *("Server: covey", f"Content-Type: {kind}", f"Content-Length: {len(said)}", "Connection: close"),
            *(["x-should-retry: false"] if status >= 400 else []),  # the client of OpenAI would ask again
        ]
        return "\r\n".join([*lines, "", ""]).encode() + said

    async def _said(self, head: bytes, reader: asyncio.StreamReader, until: float) -> tuple[int, str, bytes]:
        """Return status, type and content of an answer. Raises Refused."""
        first, _, rest = head.partition(b"\r\n")
        try:
            method, path, _ = first.decode("ascii").split()
            headers = parse_headers(io.BytesIO(rest))
        except (ValueError, HTTPException) as error:
            raise Refused(400, "the request is no HTTP") from error
        endpoint, route = self._endpoint(path, headers)
        if (method, route) == ("GET", "v1/models"):
            return 200, JSON, json.dumps(models(endpoint.run)).encode()
        if method != "POST" or route not in ROUTES:
            raise Refused(404, NOT_FOUND)
        body = body_of(await _body(headers, reader, until))
        if route == "reward":
            endpoint.take_reward(reward_of(body))
            return 200, JSON, b"{}"
        if route == "inference/v1/generate":
            request = generate_request(body, endpoint.run)
            return 200, JSON, json.dumps(generation_of(await endpoint.ask(request), request)).encode()
        request = chat_request(body, endpoint.run)
        spoken = await endpoint.ask(request)
        if request.streams:
            return 200, "text/event-stream; charset=utf-8", stream_of(spoken, request)
        return 200, JSON, json.dumps(completion_of(spoken, request)).encode()

    def _endpoint(self, path: str, headers: Message) -> tuple[Endpoint, str]:
        """Return endpoint and route, by the path's key or X-Session-ID."""
        path = path.partition("?")[0]
        parts = path.split("/", 3)
        if len(parts) == 4 and parts[:2] == ["", "e"]:
            return self._gateway.endpoint(parts[2]), parts[3]
        session = headers.get("X-Session-ID")
        if session is None:
            raise Refused(404, NOT_FOUND)
        return self._gateway.endpoint(session), path[1:]


async def _body(headers: Message, reader: asyncio.StreamReader, until: float) -> bytes:
    """Return the body. Refused if too long, too slow or without length."""
    given = headers.get("Content-Length") or ""
    if not (given.isascii() and given.isdigit()) or "Transfer-Encoding" in headers:
        raise Refused(411, "the request must say its Content-Length")
    length = int(given[:20])
    if length > MAX_BYTES:
        raise Refused(413, f"a request has {MAX_BYTES} bytes at most, got {length}")
    try:
        async with asyncio.timeout_at(until):
            return await reader.readexactly(length)
    except (OSError, EOFError, TimeoutError) as error:
        raise Refused(408, "the request did not arrive in time") from error
