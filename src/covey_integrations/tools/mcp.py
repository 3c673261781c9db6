"""Tools of MCP servers over stdio and HTTP, without MCP's package.

A server's own error message is an observation. A server that is gone, or speaks something else, is ToolServerLost.
"""

import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakSet

import httpx

from covey.system.jsonl import object_of
from covey.system.waits.running import set_alarm
from covey_integrations.tools.calling import ToolServerLost
from covey_integrations.tools.tool import Tool, schema_of

PROTOCOL_VERSION = "2025-06-18"
ABOUT = {"name": "covey", "version": "1"}
HEADERS = {"Accept": "application/json, text/event-stream", "Accept-Encoding": "identity"}
MAX_PAGES, MAX_TOOLS = 100, 1000
"""Maximum pages and entries of a list of tools."""
MAX_BYTES = 16 * 2**20
"""Maximum bytes of one answer, with all that comes before it."""


class ToolRefused(ValueError):
    """The server answered a call with an error: words for the policy."""


class Wire(Protocol):
    """Carries messages of JSON-RPC, for several threads."""

    def ask(self, message: Mapping[str, Any], seconds: float) -> Mapping[str, Any] | None:
        """Return the answer to a request, None to a notification. Raises ToolServerLost."""

    def close(self) -> None: ...


class StdioWire:
    """A local server program: messages are lines of stdin and stdout."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._turn = threading.Lock()
        try:
            self._program = subprocess.Popen(
                shlex.split(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # launchers (npx, uvx) start the server itself, which holds the pipes
            )
        except (OSError, ValueError) as error:
            raise ToolServerLost(f"the tool server {command} does not start: {error}") from error

    def ask(self, message: Mapping[str, Any], seconds: float) -> Mapping[str, Any] | None:
        with self._turn:  # one program reads one line at a time
            return self._asked(message, seconds)

    def _asked(self, message: Mapping[str, Any], seconds: float) -> Mapping[str, Any] | None:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        # One that says nothing is ended, which ends the wait for its line
        cancel = set_alarm(seconds, self._kill)
        try:
            self._program.stdin.write(json.dumps(message).encode() + b"\n")
            self._program.stdin.flush()
            if "id" not in message:
                return None
            left = MAX_BYTES
            while line := self._program.stdout.readline(left + 1):
                left -= len(line)
                if left < 0:
                    self._kill()
                    raise ToolServerLost(f"the tool server {self._command} answered more than {MAX_BYTES} bytes")
                answer = object_of(line)
                if answer.get("id") == message["id"] and "method" not in answer:
                    return answer
        except (OSError, ValueError) as error:
            raise ToolServerLost(f"the tool server {self._command} is gone: {error}") from error
        finally:
            cancel()
        raise ToolServerLost(f"the tool server {self._command} is gone, or said nothing for {seconds:g} s")

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._program.pid, signal.SIGKILL)

    def close(self) -> None:
        self._kill()
        self._program.wait()
        for pipe in (self._program.stdin, self._program.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


class HttpWire:
    """A server at an address: POSTs, answered by JSON or events."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = httpx.Client(headers=HEADERS)
        self._sockets: WeakSet[socket.socket] = WeakSet()

    def ask(self, message: Mapping[str, Any], seconds: float) -> Mapping[str, Any] | None:
        # Time-outs of httpx are those of each read, which a server may stretch by a byte now and then
        cancel = set_alarm(seconds, self._cut)
        how: Any = {"json": message, "timeout": seconds, "extensions": {"trace": self._note}}
        try:
            with self._client.stream("POST", self._url, **how) as answer:
                answer.raise_for_status()
                text = self._text(answer)
        except (httpx.HTTPError, RuntimeError, OSError) as error:  # or another thread has closed the client
            raise ToolServerLost(f"the tool server {self._url} is gone: {error}") from error
        finally:
            cancel()
        session = answer.headers.get("mcp-session-id")
        if session and message.get("method") == "initialize":
            self._client.headers["Mcp-Session-Id"] = session
        # Notifications have no answer
        if "id" not in message:
            return None
        is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
        found = map(object_of, _events(text) if is_stream else [text])
        mine = next((one for one in found if one.get("id") == message["id"] and "method" not in one), None)
        if mine is None:
            raise ToolServerLost(f"the tool server {self._url} did not answer {message['method']}")
        return mine

    def _text(self, answer: httpx.Response) -> str:
        """Return a server's answer; compressed ones, never requested, are refused."""
        found, told = bytearray(), f"the tool server {self._url} answered"
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise ToolServerLost(f"{told} in a compressed form, which was not asked for")
        for part in answer.iter_raw():
            found += part
            if len(found) > MAX_BYTES:
                raise ToolServerLost(f"{told} more than {MAX_BYTES} bytes")
        return found.decode("utf-8", "replace")

    def _note(self, event: str, facts: Mapping[str, Any]) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._sockets.add(facts["return_value"].get_extra_info("socket"))

    def _cut(self) -> None:
        """End the pending call: the session ends with it."""
        for connection in list(self._sockets):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if "Mcp-Session-Id" in self._client.headers:
            with suppress(httpx.HTTPError):
                self._client.delete(self._url, timeout=1.0)
        self._client.close()


class McpSession:
    """One session with a server, opened when it is first used."""

    def __init__(self, server: str, seconds: float = 30.0) -> None:
        """Name the server, a URL or a command line. `seconds` bounds answers."""
        self.server = server
        self._seconds = seconds
        self._lock = threading.Lock()
        self._wire: Wire | None = None
        self._numbers = itertools.count(1)

    def tools(self) -> list[Mapping[str, Any]]:
        """List the server's tools."""
        found: list[Mapping[str, Any]] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = self._asked("tools/list", {"cursor": cursor} if cursor else {})
            tools = page.get("tools", [])
            if not isinstance(tools, list) or not all(
                isinstance(tool, Mapping) and isinstance(tool.get("name"), str) for tool in tools
            ):
                raise ToolServerLost(f"the tool server {self.server} lists what is no tool: {tools!r:.80}")
            found += tools
            if len(found) > MAX_TOOLS:
                raise ToolServerLost(f"the tool server {self.server} lists more than {MAX_TOOLS} tools")
            cursor = page.get("nextCursor")
            if not cursor:
                break
        return found

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool. ToolRefused for its errors, ToolServerLost for the server's."""
        found = self._asked("tools/call", {"name": name, "arguments": dict(arguments)})
        text = result_text(found)
        if found.get("isError"):
            raise ToolRefused(text)
        return text

    def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def _asked(self, method: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            with self._lock:
                wire = self._wire or self._opened()
            return self._result(wire, method, parameters)
        except ToolServerLost:
            self.close()  # the next call opens another
            raise

    def _opened(self) -> Wire:
        is_http = self.server.startswith(("http://", "https://"))
        self._wire = wire = HttpWire(self.server) if is_http else StdioWire(self.server)
        opening = {"protocolVersion": PROTOCOL_VERSION, "capabilities": {}, "clientInfo": ABOUT}
        try:
            self._result(wire, "initialize", opening)
        except ToolRefused as error:
            raise ToolServerLost(f"the tool server {self.server} opens no session: {error}") from error
        wire.ask({"jsonrpc": "2.0", "method": "notifications/initialized"}, self._seconds)
        return wire

    def _result(self, wire: Wire, method: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        request = {"jsonrpc": "2.0", "id": next(self._numbers), "method": method, "params": dict(parameters)}
        answer = wire.ask(request, self._seconds) or {}
        if "error" in answer:
            error = answer["error"]
            raise ToolRefused(str(error.get("message", error) if isinstance(error, Mapping) else error))
        result = answer.get("result")
        if not isinstance(result, Mapping):
            raise ToolServerLost(f"the tool server {self.server} answered {method} with no result")
        return result


class McpServer:
    """A server whose tools are listed once, on first use."""

    def __init__(self, server: str, *, is_shared: bool, seconds: float = 30.0) -> None:
        """Take a server's URL or command; with `is_shared` attempts share a session."""
        self._server = server
        self._seconds = seconds
        self._is_shared = is_shared
        self._session = McpSession(server, seconds)
        self._listed: list[Mapping[str, Any]] | None = None

    def tools(self) -> tuple[Sequence[Tool], Callable[[], None]]:
        """Return tools for one attempt; the first call opens its session."""
        if self._listed is None:
            self._listed = self._session.tools()
            if not self._is_shared:
                self._session.close()
        if self._is_shared:
            return tools_of_session(self._session, self._listed, is_stateful=False), lambda: None
        session = McpSession(self._server, self._seconds)
        return tools_of_session(session, self._listed, is_stateful=True), session.close

    def close(self) -> None:
        self._session.close()


def tools_of_session(session: McpSession, listed: Sequence[Mapping[str, Any]], is_stateful: bool) -> list[Tool]:
    """Return tools that call a session, by its server's list."""
    return [_tool(session, found, is_stateful) for found in listed]


def _tool(session: McpSession, found: Mapping[str, Any], is_stateful: bool) -> Tool:
    name: str = found["name"]

    def call(**arguments: Any) -> str:
        return session.call(name, arguments)

    return Tool(name, schema_of(name, found.get("description"), found.get("inputSchema")), call, is_stateful)


def _events(text: str) -> list[str]:
    blocks = text.replace("\r\n", "\n").split("\n\n")
    found = ("\n".join(line[5:].strip() for line in block.split("\n") if line.startswith("data:")) for block in blocks)
    return [data for data in found if data]


def result_text(result: Mapping[str, Any]) -> str:
    """Return a tool result's text, or its structure as JSON."""
    content = result.get("content")
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    texts = [str(part["text"]) for part in parts if part.get("type") == "text" and "text" in part]
    if not texts and result.get("structuredContent") is not None:
        return json.dumps(result["structuredContent"], ensure_ascii=False)
    return "\n".join([*texts, *(f"({part.get('type')} left out)" for part in parts if part.get("type") != "text")])
