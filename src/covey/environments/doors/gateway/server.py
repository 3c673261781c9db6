"""Serve every episode at a URL of its own, on the loopback interface alone.

The server has threads of its own, one a request, and knows nothing of episodes but their doors: a call waits at its
door until the episode, in the event loop of the run, answers it. A key that nobody gave out is answered as any other
path is that there is not. What has sent no whole head yet costs one descriptor of a few, for half a minute at most.
"""

import io
import json
import re
import secrets
import selectors
import socket
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

from covey.environments.doors.gateway.door import OVER, Door
from covey.environments.doors.gateway.refused import Refused
from covey.environments.doors.gateway.tokens import generate_request, generation_of
from covey.environments.doors.gateway.wire import (
    RunSampling,
    body_of,
    chat_request,
    completion_of,
    models,
    reward_of,
    stream_of,
)

MAX_BYTES = 4 * 2**20
"""Of the body of a request."""
MAX_HEAD = 2**16
"""Bytes of what stands before it, with what came along of the body."""
END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
SECONDS = 30.0
"""From the beginning of a connection to the last byte of its request, and for the client to take the answer."""
MAX_WAITING = 256
"""Connections whose request is not there yet. Of more the oldest is dropped: anybody on this machine can make them."""
NUM_REMEMBERED = 10_000
"""Episodes that ended and whose URLs still say so."""
NOT_FOUND = "not found"


class Gateway:
    """Hands out doors, and serves them."""

    def __init__(self, run: RunSampling) -> None:
        self.run = run
        self._doors: dict[str, Door] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        self._server: _Server | None = None

    @property
    def port(self) -> int:
        """Return the port, which the system chose. The server is started where it has not been."""
        with self._lock:
            if self._server is None:
                self._server = _Server(self)
                threading.Thread(target=self._server.serve, name="covey-gateway", daemon=True).start()
            return self._server.address[1]

    def open(self) -> Door:
        """Open a door with a key of its own. Must be called while the event loop runs."""
        port, key = self.port, secrets.token_urlsafe(32)
        door = Door(key, f"http://127.0.0.1:{port}/e/{key}/v1", self.run)
        with self._lock:
            self._doors[key] = door
        return door

    def close_door(self, door: Door) -> None:
        """End an episode: calls that wait are told so, and so are those that come later."""
        with self._lock:
            self._doors.pop(door.key, None)
            self._ended[door.key] = None
            if len(self._ended) > NUM_REMEMBERED:
                self._ended.popitem(last=False)
        door.end(Refused(410, OVER, code="episode_over"), takes_rewards=False)

    def door(self, key: str) -> Door:
        """Return the door of a key. Raises Refused."""
        with self._lock:
            if key in self._doors:
                return self._doors[key]
            if key in self._ended:
                raise Refused(410, OVER, code="episode_over")
        raise Refused(404, NOT_FOUND)

    def close(self) -> None:
        """End every episode and every connection."""
        for door in list(self._doors.values()):
            self.close_door(door)
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.stop()


class _Server:
    """Serves connections of this machine: a thread for each request whose head is there, none for those that wait."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.socket.setblocking(False)
        self.address: tuple[str, int] = self.socket.getsockname()
        self._waiting: dict[Any, _Request] = {}
        """The oldest first."""
        self._open: set[socket.socket] = set()
        """Those that are being answered."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.socket, selectors.EVENT_READ)
        self._is_stopped = False

    def serve(self) -> None:
        """Accept connections and read heads until it is stopped."""
        while not self._is_stopped:
            for key, _ in self._selector.select(0.1):
                if key.fileobj is self.socket:
                    self._accept()
                elif (request := self._waiting.get(key.fileobj)) is not None:  # else a new one has taken its place
                    self._read(request)
            late = [one for one, request in self._waiting.items() if request.deadline < time.monotonic()]
            for connection in [*self._waiting] if self._is_stopped else late:
                self._forget(connection).close()

    def stop(self) -> None:
        """End the server, and the connections that are open."""
        self._is_stopped = True
        self.socket.close()
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # what is being answered still goes out

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self.socket.accept()
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)
            self._waiting[connection] = _Request(connection)
        # A head that is on its way arrives in milliseconds, so the oldest is none
        while len(self._waiting) > MAX_WAITING:
            self._forget(next(iter(self._waiting))).close()

    def _read(self, request: "_Request") -> None:
        part = b""
        with suppress(OSError):
            part = request.connection.recv(MAX_HEAD)
        request.head += part
        if part and len(request.head) <= MAX_HEAD and not END_OF_HEAD.search(request.head):
            return
        connection = self._forget(request.connection)
        if not END_OF_HEAD.search(request.head):
            connection.close()
            return
        self._open.add(connection)
        threading.Thread(target=self._answer, args=(request,), daemon=True).start()

    def _answer(self, request: "_Request") -> None:
        with suppress(OSError), request.connection:  # clients may be gone
            _Handler(request, self)
        self._open.discard(request.connection)

    def _forget(self, connection: socket.socket) -> socket.socket:
        del self._waiting[connection]
        self._selector.unregister(connection)
        return connection


class _Request(io.RawIOBase):
    """What a connection has said, and says until its deadline. Raises OSError."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.deadline = connection, time.monotonic() + SECONDS
        self.head = b""
        """What was read and not taken yet."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Put the next bytes into the buffer and return how many."""
        said = self.head[: len(buffer)]
        self.head = self.head[len(said) :]
        if not said:
            self.connection.settimeout(max(0.001, self.deadline - time.monotonic()))
            said = self.connection.recv(len(buffer))
        buffer[: len(said)] = said
        return len(said)


class _Handler(BaseHTTPRequestHandler):
    """Answers one request, and so ends its connection."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "covey", ""
    server: _Server  # type: ignore[assignment]

    def __init__(self, request: _Request, server: _Server) -> None:
        self.server, self.client_address = server, server.address
        self.rfile, self.wfile = io.BufferedReader(request), io.BytesIO()
        self.handle_one_request()
        request.connection.settimeout(SECONDS)
        request.connection.sendall(self.wfile.getvalue())

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: paths hold keys."""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, method: Any) -> None:
        try:
            status, kind, said = method()
        except Refused as refused:
            status, kind, said = refused.status, "application/json", json.dumps(refused.body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(said)))
        self.send_header("Connection", "close")
        if status >= 400:  # the client of OpenAI would ask again
            self.send_header("x-should-retry", "false")
        self.end_headers()
        self.wfile.write(said)

    def _door(self) -> tuple[Door, str]:
        """Return the door of the path, or of X-Session-ID where the path has no key, and the route."""
        path = self.path.partition("?")[0]
        parts = path.split("/", 3)
        if len(parts) == 4 and parts[:2] == ["", "e"]:
            return self.server.gateway.door(parts[2]), parts[3]
        session = self.headers.get("X-Session-ID")
        if session is None:
            raise Refused(404, NOT_FOUND)
        return self.server.gateway.door(session), path[1:]

    def _get(self) -> tuple[int, str, bytes]:
        door, route = self._door()
        if route != "v1/models":
            raise Refused(404, NOT_FOUND)
        return 200, "application/json", json.dumps(models(door.run)).encode()

    def _post(self) -> tuple[int, str, bytes]:
        door, route = self._door()
        # Rewards that the program posts
        if route == "reward":
            door.take_reward(reward_of(body_of(self._body())))
            return 200, "application/json", b"{}"
        # Completions of token ids
        if route == "inference/v1/generate":
            request = generate_request(body_of(self._body()), door.run)
            return 200, "application/json", json.dumps(generation_of(door.ask(request), request)).encode()
        # Chat completions, streamed or whole
        if route != "v1/chat/completions":
            raise Refused(404, NOT_FOUND)
        request = chat_request(body_of(self._body()), door.run)
        spoken = door.ask(request)
        if request.streams:
            return 200, "text/event-stream; charset=utf-8", stream_of(spoken, request)
        return 200, "application/json", json.dumps(completion_of(spoken, request)).encode()

    def _body(self) -> bytes:
        """Return the body. Raises Refused where it is too long, comes too slowly or does not say how long it is."""
        given = self.headers.get("Content-Length") or ""
        # Refuse a length that is missing or too large
        if not (given.isascii() and given.isdigit()) or "Transfer-Encoding" in self.headers:
            raise Refused(411, "the request must say its Content-Length")
        length = int(given[:20])
        if length > MAX_BYTES:
            raise Refused(413, f"a request has {MAX_BYTES} bytes at most, got {length}")
        try:
            body = self.rfile.read(length)
        except OSError:
            body = b""
        if len(body) < length:
            raise Refused(408, "the request did not arrive in time")
        return body
