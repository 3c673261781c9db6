"""A server that speaks as OpenEnv's does: JSON over a websocket, an environment for every connection."""

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from websockets.asyncio.server import Request, Response, ServerConnection, serve

GUESS = {
    "title": "GuessAction",
    "type": "object",
    "properties": {"guess": {"type": "string"}, "metadata": {"type": "object"}},
    "required": ["guess"],
}
PAIR = {
    "title": "PairAction",
    "type": "object",
    "properties": {"row": {"type": "integer"}, "column": {"type": "integer"}, "metadata": {"type": "object"}},
    "required": ["row", "column"],
}
CALLS = {"title": "Action", "type": "object", "properties": {"metadata": {"type": "object"}}}
NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
TOOLS = [
    {"name": "add", "description": "Add.", "input_schema": NUMBER},
    {"name": "stop", "description": "", "input_schema": {"type": "object", "properties": {}}},
]


@dataclass
class OpenEnvServer:
    """What it serves, and what it heard."""

    schema: Mapping[str, Any] = field(default_factory=lambda: GUESS)
    seats: int = 1000
    tools: list[Mapping[str, Any]] = field(default_factory=lambda: list(TOOLS))
    url: str = ""
    heard: list[Mapping[str, Any]] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    full: threading.Event = field(default_factory=threading.Event)
    """Set when somebody found no seat."""
    closed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released by every session that ended."""

    async def converse(self, connection: ServerConnection) -> None:
        """Serve one connection."""
        if self.num_open >= self.seats:
            self.full.set()
            await connection.send(error("CAPACITY_REACHED", f"{self.seats} of {self.seats} sessions are in use"))
            return
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            played = Played(self)
            async for raw in connection:
                message = json.loads(raw)
                self.heard.append(message)
                if message["type"] == "close":
                    break
                answer = played.answer(message)
                if answer is None:
                    await connection.wait_closed()
                    return
                if answer == "gone":
                    connection.transport.abort()
                    return
                await connection.send(answer)
        finally:
            self.num_open -= 1
            self.closed.release()

    def asked(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer what is asked by HTTP."""
        if request.path == "/ws":
            return None
        if request.path == "/schema":
            return connection.respond(200, json.dumps({"action": self.schema, "observation": {}, "state": {}}))
        return connection.respond(404, "{}")


class Played:
    """One environment: it ends with the third step, and rewards long guesses."""

    def __init__(self, server: OpenEnvServer) -> None:
        self.server, self.num_steps, self.sum = server, 0, 0

    def answer(self, message: Mapping[str, Any]) -> str | None:
        data = message["data"]
        if message["type"] == "reset":
            if data.get("over"):
                return observation({"text": "nothing to do"}, None, True)
            return observation({"text": f"seed {data.get('seed')}", "metadata": {"secret": 3}}, None)
        if data.get("type") == "list_tools":
            return observation({"tools": self.server.tools, "metadata": {}}, None)
        if data.get("type") == "call_tool":
            return self.called(data["tool_name"], data["arguments"])
        if "row" in data:
            return observation({"row": data["row"], "column": data.get("column"), "metadata": {}}, 0.25)
        return self.guessed(data)

    def guessed(self, data: Mapping[str, Any]) -> str | None:
        guess = data.get("guess")
        if not isinstance(guess, str):
            fault = {"type": "string_type", "loc": ["guess"], "msg": "Input should be a valid string", "input": guess}
            return error("VALIDATION_ERROR", "Invalid message", errors=[fault])
        told = {
            "hang": None,
            "gone": "gone",
            "noise": "no JSON",
            "break": error("EXECUTION_ERROR", "the game broke"),
            "nan": observation({"text": ""}, "many"),
        }
        if guess in told:
            return told[guess]
        self.num_steps += 1
        return observation({"text": f"step {self.num_steps}"}, len(guess) / 10, self.num_steps == 3)

    def called(self, name: str, arguments: Mapping[str, Any]) -> str:
        seen: dict[str, Any] = {"tool_name": name, "result": None, "error": None, "metadata": {}}
        if name == "add" and isinstance(arguments.get("number"), int):
            self.sum += arguments["number"]
            text = {"content": [{"type": "text", "text": str(self.sum)}], "is_error": False}
            return observation(seen | {"result": text}, arguments["number"] / 10)
        if name == "stop":
            return observation(seen | {"result": "over"}, float(self.sum), True)
        kind = "timeout" if name == "slow" else "tool_not_found"
        return observation(seen | {"error": {"error_type": kind, "message": f"no {name}"}}, None)


def observation(seen: Mapping[str, Any], reward: Any, done: bool = False) -> str:
    return json.dumps({"type": "observation", "data": {"observation": seen, "reward": reward, "done": done}})


def error(code: str, message: str, **more: Any) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **more}})


@contextmanager
def openenv_server(**given: Any) -> Iterator[OpenEnvServer]:
    """Serve on a free port, in a thread of its own."""
    server = OpenEnvServer(**given)
    loop = asyncio.new_event_loop()
    begun = threading.Event()
    ended: asyncio.Event = asyncio.Event()

    async def serving() -> None:
        async with serve(server.converse, "127.0.0.1", 0, process_request=server.asked, close_timeout=0.1) as made:
            server.url = f"http://127.0.0.1:{made.sockets[0].getsockname()[1]}"
            begun.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serving(),), daemon=True)
    thread.start()
    assert begun.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
        loop.close()
