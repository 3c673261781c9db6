"""MCP over both of its wires, by servers of a few lines."""

import gzip
import itertools
import json
import socket
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from covey_integrations.tools import mcp
from covey_integrations.tools.calling import Caller, ToolServerLost
from covey_integrations.tools.calls import Call
from covey_integrations.tools.mcp import McpServer, McpSession, ToolRefused, tools_of_session

from ...support.tools import Sums, call, play, run

SERVER = """
COUNTS = {}
NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
TOOLS = [
    {"name": "add", "description": "Add.", "inputSchema": NUMBER},
    {"name": "broken", "inputSchema": {"type": "object", "properties": {}}},
]


def answer(message, session):
    method, parameters = message["method"], message.get("params", {})
    if "id" not in message:
        return None
    if method == "initialize" and not parameters["protocolVersion"]:
        return {"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32602, "message": "unknown version"}}
    if method == "initialize":
        result = {"protocolVersion": parameters["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": {}}
    elif method == "tools/list":
        first = "cursor" not in parameters
        result = {"tools": TOOLS[:1], "nextCursor": "2"} if first else {"tools": TOOLS[1:]}
    elif parameters["name"] == "add":
        COUNTS[session] = COUNTS.get(session, 0) + parameters["arguments"]["number"]
        result = {"content": [{"type": "text", "text": str(COUNTS[session])}, {"type": "image", "data": ""}]}
    elif parameters["name"] == "broken":
        result = {"content": [{"type": "text", "text": "it is broken"}], "isError": True}
    elif parameters["name"] == "shape":
        result = {"content": [], "structuredContent": {"side": 4}}
    elif parameters["name"] == "exit":
        raise SystemExit(1)
    else:
        return {"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32602, "message": "no such tool"}}
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}
"""
STDIO = """
import json, sys
print("starting")
for line in sys.stdin:
    message = json.loads(line)
    if message.get("params", {}).get("name") == "hang":
        continue
    found = answer(message, 0)
    if found is not None:
        print(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}}))
        print(json.dumps(found), flush=True)
"""


def stdio_server(folder: Path) -> str:
    (folder / "server.py").write_text(SERVER + STDIO)
    return f"{sys.executable} {folder / 'server.py'}"


@pytest.fixture
def http_server() -> Iterator[tuple[str, list[Any]]]:
    """A server that answers lists by JSON and calls by a stream, with what it was sent."""
    scope: dict[str, Any] = {}
    exec(SERVER, scope)
    heard: list[Any] = []
    sessions = iter(range(1000))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            session = self.headers.get("Mcp-Session-Id")
            heard.append((message["method"], session, self.headers["Accept"]))
            is_call = message["method"] == "tools/call"
            try:
                found = scope["answer"](message, session)
            except SystemExit:
                self.send_error(500)
                return
            text = json.dumps(found) if found else ""
            event = f'event: message\r\ndata: {{"method": "notifications/progress"}}\r\n\r\ndata: {text}\r\n\r\n'
            body = (event if is_call else text).encode()
            self.send_response(200 if found else 202)
            self.send_header("Content-Type", "text/event-stream" if is_call else "application/json")
            self.send_header("Content-Length", str(len(body)))
            if message["method"] == "initialize":
                self.send_header("Mcp-Session-Id", f"session-{next(sessions)}")
            self.end_headers()
            self.wfile.write(body)

        def do_DELETE(self) -> None:
            heard.append(("DELETE", self.headers.get("Mcp-Session-Id"), ""))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *given: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/mcp", heard
    server.shutdown()
    server.server_close()


@pytest.fixture(params=["stdio", "http"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[McpSession]:
    server = stdio_server(tmp_path) if request.param == "stdio" else request.getfixturevalue("http_server")[0]
    made = McpSession(server, seconds=20)
    yield made
    made.close()


@dataclass(frozen=True)
class Saying:
    """A wire to a server that always says the same."""

    said: Mapping[str, Any]

    def ask(self, message: Mapping[str, Any], seconds: float) -> Mapping[str, Any]:
        return self.said

    def close(self) -> None: ...


def saying(said: Mapping[str, Any]) -> McpSession:
    session = McpSession("lies")
    session._wire = Saying(said)
    return session


def test_tools_are_listed_page_by_page_and_called(session: McpSession) -> None:
    assert [tool["name"] for tool in session.tools()] == ["add", "broken"]
    assert session.call("add", {"number": 2}) == "2\n(image left out)"
    assert session.call("add", {"number": 3}) == "5\n(image left out)"
    assert session.call("shape", {}) == '{"side": 4}'


def test_errors_of_tools_are_words_and_those_of_servers_are_failures(session: McpSession) -> None:
    with pytest.raises(ToolRefused, match="it is broken"):
        session.call("broken", {})
    with pytest.raises(ToolRefused, match="no such tool"):
        session.call("other", {})
    with pytest.raises(ToolServerLost, match=r"the tool server .* is gone"):
        session.call("exit", {})
    # The next call opens another session, whose state is new.
    assert session.call("add", {"number": 1}).startswith("1")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"error": "down"}, "down"),
        ({"error": ["down"]}, "['down']"),
        ({"result": {"isError": True, "content": None}}, ""),
        ({"result": {"isError": True, "content": "down"}}, ""),
        ({"result": {"isError": True, "content": [None, {"type": "text"}]}}, ""),
    ],
)
def test_errors_of_any_shape_are_words(said: Any, words: str) -> None:
    with pytest.raises(ToolRefused) as refused:
        saying(said).call("f", {})
    assert str(refused.value) == words


@pytest.mark.parametrize("tools", [None, {}, "f", ["f"], [{}], [{"name": 3}]])
def test_a_list_of_what_is_no_tool_is_the_servers_fault(tools: Any) -> None:
    with pytest.raises(ToolServerLost, match="lists what is no tool"):
        saying({"result": {"tools": tools}}).tools()


def test_tools_of_a_server_are_called_as_others(session: McpSession) -> None:
    tools = tools_of_session(session, session.tools(), is_stateful=True)
    assert tools[0].schema["function"]["description"] == "Add."
    caller = Caller({tool.name: tool for tool in tools})
    calls = (Call("add", {"number": 1}), Call("broken", {}), Call("add", {"number": "x"}), Call("add", {"number": 1}))
    answers = run(caller.answers(calls))
    assert [answer.content for answer in answers] == [
        "1\n(image left out)",
        '{"error": "ToolRefused: it is broken"}',
        '{"error": "number must be of type integer, got \'x\'"}',
        "2\n(image left out)",
    ]
    with pytest.raises(ToolServerLost):
        run(Caller({"exit": tools_of_session(session, [{"name": "exit"}], True)[0]}).answer(Call("exit", {})))


def test_each_http_session_has_its_id_and_is_ended(http_server: tuple[str, list[Any]]) -> None:
    url, heard = http_server
    first, second = McpSession(url), McpSession(url)
    assert first.call("add", {"number": 1}).startswith("1")
    assert second.call("add", {"number": 5}).startswith("5")
    first.close()
    said = [(method, session) for method, session, _ in heard]
    assert said[:3] == [
        ("initialize", None),
        ("notifications/initialized", "session-0"),
        ("tools/call", "session-0"),
    ]
    assert said[-2:] == [("tools/call", "session-1"), ("DELETE", "session-0")]
    assert {accept for _, _, accept in heard[:-1]} == {"application/json, text/event-stream"}
    second.close()


def test_a_server_that_says_nothing_is_given_up(tmp_path: Path) -> None:
    session = McpSession(stdio_server(tmp_path), seconds=20)
    session.tools()
    session._seconds = 0.05
    with pytest.raises(ToolServerLost, match=r"is gone, or said nothing for 0.05 s"):
        session.call("hang", {})


FLOODS = {
    "a line without end": "while True: print('x' * 65536, end='')",
    "lines without end": "while True: print('{}')",
    "a launcher whose child holds the pipe": "import subprocess\nsubprocess.run(['sleep', '30'])",
    "pages of tools without end": "import json\nwhile line := input():\n    tools = [{'name': 'x'}] * 400\n"
    "    said = {'id': json.loads(line).get('id'), 'result': {'tools': tools, 'nextCursor': 'x'}}\n"
    "    print(json.dumps(said), flush=True)",
    "nothing, byte by byte": "import time\nwhile True: print(' ', end='', flush=True); time.sleep(0.02)",
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_program_that_floods_or_stalls_is_ended(flood: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "MAX_BYTES", 2**20)
    (tmp_path / "server.py").write_text(FLOODS[flood])
    session, began = McpSession(f"{sys.executable} {tmp_path / 'server.py'}", seconds=1.0), time.monotonic()
    with pytest.raises(ToolServerLost, match=r"answered more than|said nothing for 1 s|is gone|lists more than"):
        session.tools()
    assert time.monotonic() - began < 15


def raw_server(*parts: bytes, pause: float = 0.0) -> str:
    """A server of one connection that sends its last part for ever."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listening, suppress(OSError):
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                for part in itertools.chain(parts, itertools.repeat(parts[-1])):
                    connection.sendall(part)
                    time.sleep(pause)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
ENDLESS = {
    "a body without end": ((HEAD + b"\r\n", b"x" * 65536), 0.0, "answered more than"),
    "a stream of events without end": (
        (HEAD.replace(b"application/json", b"text/event-stream") + b"\r\n", b"data: {}\n\n" * 5000),
        0.0,
        "answered more than",
    ),
    "a compressed body": ((HEAD + b"Content-Encoding: gzip\r\n\r\n", gzip.compress(bytes(10**6))), 0.0, "compressed"),
    "a body byte by byte": ((HEAD + b"\r\n", b" "), 0.05, "did not answer"),
    "headers byte by byte": ((HEAD + b"X: ", b"x"), 0.05, "is gone"),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_answer_is_bounded_in_bytes_and_as_a_whole_in_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "MAX_BYTES", 2**20)
    parts, pause, said = ENDLESS[kind]
    session, began = McpSession(raw_server(*parts, pause=pause), seconds=0.5), time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(ToolServerLost, match=said):
            session.tools()
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()
    assert time.monotonic() - began < 15


def test_a_refused_or_closed_mcp_session_is_a_server_failure(
    session: McpSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.tools()
    wire = session._wire
    assert wire is not None
    session.close()
    with pytest.raises(ToolServerLost, match="is gone"):
        wire.ask({"jsonrpc": "2.0", "id": 9, "method": "tools/list"}, 1.0)
    monkeypatch.setattr(mcp, "PROTOCOL_VERSION", None)
    for _ in range(2):
        with pytest.raises(ToolServerLost, match="opens no session: unknown version"):
            session.call("add", {"number": 1})


def test_a_server_that_is_not_there_is_lost() -> None:
    with pytest.raises(ToolServerLost, match="does not start"):
        McpSession("/nowhere/at/all --port 3").tools()
    with pytest.raises(ToolServerLost, match="is gone"):
        McpSession("http://127.0.0.1:9/mcp").tools()


@pytest.mark.parametrize(("is_shared", "counts"), [(False, ["1", "1"]), (True, ["1", "2"])])
def test_sessions_are_an_episodes_own_or_shared_by_all(is_shared: bool, counts: list[str], tmp_path: Path) -> None:
    environment = Sums()
    server = McpServer(stdio_server(tmp_path), is_shared=is_shared, seconds=20)
    environment.servers = [server]
    prompt = environment.prompts("train")[0]
    names = [schema["function"]["name"] for schema in environment.tool_schemas(prompt)]
    assert names == ["multiply", "add", "broken"]
    found = []
    for seed in (0, 1):
        said = run(play(environment.episode(prompt, seed), [call("add", number=1), "done"]))
        assert not isinstance(said[1].messages, str)
        found.append(said[1].messages[0]["content"].partition("\n")[0])
    server.close()
    assert found == counts


def test_a_tool_of_a_server_with_the_name_of_another_is_refused(tmp_path: Path) -> None:
    environment = Sums()
    environment.servers = [McpServer(stdio_server(tmp_path), is_shared=False, seconds=20)] * 2
    with pytest.raises(ValueError, match="two are called add"):
        environment.tool_schemas(environment.prompts("train")[0])
