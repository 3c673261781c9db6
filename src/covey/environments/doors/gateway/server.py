"""Serve every episode at a URL of its own, on the loopback interface alone.

The server has threads of its own, one a connection, and knows nothing of episodes but their doors: a call waits at its
door until the episode, in the event loop of the run, answers it. A key that nobody gave out is answered as any other
path is that there is not.
"""

import json
import secrets
import socket
import socketserver
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

MAX_BYTES = 16 * 2**20
"""Of the body of a request."""
SECONDS = 30.0
"""A request must be there in this time, and an idle connection is closed after it."""
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
                serve = self._server.serve_forever
                threading.Thread(target=serve, args=(0.1,), name="covey-gateway", daemon=True).start()
            return int(self._server.server_address[1])

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


class _Server(socketserver.ThreadingTCPServer):
    """Serves connections of this machine, each in a thread."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that are gone."""

    def stop(self) -> None:
        """End the server, and the connections that are open."""
        self.shutdown()
        self.server_close()
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # what is being answered still goes out


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "covey", ""
    timeout = SECONDS
    disable_nagle_algorithm = True
    server: _Server

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
            # What was not read of the body would be taken for the next request
            self.close_connection = True
            status, kind, said = refused.status, "application/json", json.dumps(refused.body).encode()
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(said)))
            if self.close_connection:
                self.send_header("Connection", "close")
            if status >= 400:  # the client of OpenAI would ask again
                self.send_header("x-should-retry", "false")
            self.end_headers()
            self.wfile.write(said)
            return
        self.close_connection = True

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
        # Read in parts under one deadline: a slow client holds a thread
        deadline = time.monotonic() + SECONDS
        parts: list[bytes] = []
        while length > 0:
            try:
                part = self.rfile.read1(min(length, 2**16))
            except OSError as error:
                raise Refused(408, "the request did not arrive in time") from error
            if not part or time.monotonic() > deadline:
                raise Refused(408, "the request did not arrive in time")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)
