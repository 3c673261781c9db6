"""Judges programs that another machine runs, in a worker process of this one.

The judge is the sandbox's own (`covey.sandbox.inside.judging.verdicts`), in a checker of its own. Only in place of a
program's process there is a server that is asked. Expected values stay here: the server gets code, entry point and
arguments.

A program has no process that lasts: each request runs it anew, with the calls that have not been answered yet.
"""

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Any, cast

from covey.sandbox.inside import checker, codec, wire
from covey.sandbox.inside.case import START_SECONDS, SUSPICIOUS, LoadFailed, error_text
from covey.sandbox.inside.host import Ended, Program, TimedOut, TooMuch, Unjudged, Violation, decoded_object
from covey.sandbox.inside.link import Link
from covey.sandbox.inside.supervisor import Supervisor
from covey.sandbox.orders import decode_report, encode_request
from covey.sandbox.types import Limits, Report, SandboxFailed, Test
from covey.system.workers.pool import WorkerPool, WorkerSettings
from covey.system.workers.process import die_with_parent
from covey.types import Failure

STDIN = 0
OVERHEAD = 4
"""Bytes of a response for each byte of output that is allowed: JSON escapes, and the messages around."""
MAX_MESSAGE = 1 << 16
DRIVER = Path(__file__).with_name("remote_driver.py")
CODEC = Path(codec.__file__)
PATIENCE_SECONDS = 60.0
"""For a request that is over and has not noticed."""
TIMED_OUT = "Timeout ("
"""How faulthandler's message begins when the driver's time for one call is over."""


IMPORT = re.compile(
    r"(?:^|;)[ \t]*(?:from[ \t]+(\w+)|import[ \t]+([\w., \t]+))"
    r"|(?:__import__|import_module)\([ \t]*[\"'](\w+)",
    re.MULTILINE,
)


class Unreachable(Unjudged):
    """The server gives no verdict. The message says why in one line."""


def judge_remotely(url: str, margin: float, order: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the sandbox's judge says to an order (`covey.sandbox.orders`), or {"unjudged": why}."""
    remote = Remote(Server(url, margin), os.getpid(), any(test["test"] == "assert" for test in order["tests"]))
    supervisor = Supervisor(remote.serve_checker, Alone())
    try:
        answer = supervisor.judge(dict(order))
    finally:
        supervisor.close()
    return {**answer, "imports": named_imports(order["code"])} if "results" in answer else answer


@dataclass(frozen=True)
class Remote:
    """What a checker needs to know whose programs run elsewhere."""

    server: "Server"
    parent: int
    """The process that it is to end with."""
    loads_first: bool
    """Whether a program is loaded before it is called: tests that call it one by one must not mistake a program that
    cannot be loaded for one that raises."""
    started: float = field(default_factory=time.monotonic)

    def serve_checker(self, channel: socket) -> None:
        """Run in the checker."""
        die_with_parent(self.parent)
        checker.serve(channel, lambda link: RemoteSpawner(self, link))


class Alone:
    """Watches over a checker that asks for nothing: its programs are another machine's affair."""

    callers: Sequence[int] = ()
    look_seconds = wire.MAX_WAIT

    def serve(self, message: dict[str, Any], channel: socket) -> None:
        """Do nothing: no question comes."""

    def look(self) -> None:
        """Do nothing: no program runs in this process."""

    def clear(self) -> None:
        """Do nothing: no program runs in this process."""


def named_imports(code: str) -> list[str]:
    """Return which suspicious modules the code's text imports: a hostile text is not parsed here."""
    named = {name for match in IMPORT.finditer(code) for part in match.groups("") for name in part.split(",")}
    return sorted({name.strip().partition(" ")[0].partition(".")[0] for name in named} & SUSPICIOUS)


@dataclass(frozen=True, slots=True)
class Server:
    """A server that speaks SandboxFusion's /run_code."""

    url: str
    margin: float
    """Seconds it may take besides the program's own time."""

    def run(self, code: str, stdin: str, seconds: float, limits: Mapping[str, Any]) -> dict[str, Any]:
        """Return its `run_result`. Raises Unreachable where there is none."""
        # The request of SandboxFusion's /run_code
        body = {
            "code": code,
            "language": "python",
            "stdin": stdin,
            "run_timeout": seconds,
            "memory_limit_MB": limits["memory_bytes"] >> 20,
        }
        answer = self._post(json.dumps(body).encode(), seconds + self.margin, OVERHEAD * limits["output_bytes"])
        # Its own failure is no verdict on the program
        result = answer.get("run_result")
        if answer.get("status") == "SandboxError" or not isinstance(result, dict):
            raise Unreachable(f"{self.url}: {answer.get('message') or 'no run_result'!s:.200}")
        return result

    def _post(self, body: bytes, seconds: float, max_bytes: int) -> dict[str, Any]:
        address = f"{self.url.rstrip('/')}/run_code"
        # Post it, and read at most so many bytes
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=seconds) as response:
                content = _read(response, max_bytes + MAX_MESSAGE, time.monotonic() + seconds)
            answer = json.loads(content)
        except RecursionError as error:
            raise Unreachable(f"{address} answers with what is nested too deep") from error
        except TimeoutError as error:
            raise Unreachable(f"{address} has not answered for {seconds:.3g} s") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unreachable(f"{address}: {type(error).__name__}: {error}") from error
        # Whatever comes must be an object
        if not isinstance(answer, dict):
            raise Unreachable(f"{address} answers with {type(answer).__name__}, not an object")
        return answer


def _read(response: http.client.HTTPResponse, max_bytes: int, deadline: float) -> bytes:
    """Return a response that comes in time. Raises TooMuch where it is larger than a program's output may be."""
    content = bytearray()
    while part := response.read1(1 << 16):
        content += part
        if len(content) > max_bytes:
            raise TooMuch
        if time.monotonic() > deadline:
            raise TimeoutError
    return bytes(content)


@dataclass
class RemoteSpawner:
    """Makes what stands for a process."""

    remote: Remote
    link: Link
    failure: str = ""
    """Why there is no verdict: test code may catch what it was told of it."""

    def fresh(self, limits: dict[str, Any], is_script: bool) -> Program:
        return cast(Program, RemoteProgram(self, limits, is_script))

    def end(self, program: Program) -> None:
        """Do nothing: no part of it is running."""


@dataclass
class RemoteProgram:
    """Takes the frames that a process would take, and gives those that it would give."""

    spawner: RemoteSpawner
    limits: dict[str, Any]
    is_script: bool
    stdin: int = STDIN
    num_calls: int = 0
    _order: dict[str, Any] = field(default_factory=dict)
    _input: bytes = b""
    _printed: bytes = b""
    _calls: list[dict[str, Any]] = field(default_factory=list)
    """Not yet sent."""
    _answers: deque[str | dict[str, Any]] = field(default_factory=lambda: deque([{"ready": True}]))
    """Those of the server as the lines they came in."""
    _num_missing: int = 0
    """Answers to calls that were sent."""
    _ending: type[Exception] = Ended
    """How the last run ended."""

    def send(self, content: bytes, descriptor: int | None = None) -> None:
        if descriptor == STDIN:
            self._input += content
            return
        for frame in _frames(content):
            if self._order:
                self._calls.append(frame)
            else:
                self._order = frame
                self._answers.append({"imports": []})
                self._answers.extend([] if self.is_script else [{"loaded": True}])

    def receive(self, deadline: float) -> dict[str, Any]:
        """Return the next frame. Raises LoadFailed, TimedOut, Ended, TooMuch, Violation or Unreachable."""
        # Ask the server where nothing is waiting
        if self._answers and self._answers[0] == {"loaded": True} and self.spawner.remote.loads_first:
            self._run([])
        if not self._answers and self.is_script:
            return self._run_script()
        if not self._answers and not self._num_missing and self._calls:
            self._run_calls()
        # Hand out the answers in order
        if not self._answers:
            raise self._ending
        answer = self._answers.popleft()
        return _frame(answer, self.limits["output_bytes"]) if isinstance(answer, str) else answer

    def finish_output(self, deadline: float) -> bytes:
        return self._printed

    def _run_calls(self) -> None:
        """Make all calls at once, or the first alone where their answers are too much together."""
        calls, self._calls = self._calls, []
        try:
            self._run(calls)
        except TooMuch:
            if len(calls) == 1:
                raise
            self._calls = calls[1:]
            self._run(calls[:1])

    def _seconds(self) -> float:
        return max(0.1, self.spawner.remote.started + self.limits["total_seconds"] - time.monotonic())

    def _ask(self, code: str, stdin: str, seconds: float) -> dict[str, Any]:
        # A server that failed once fails the case
        if self.spawner.failure:
            raise Unreachable(self.spawner.failure)
        server, link = self.spawner.remote.server, self.spawner.link
        # Time on the way is not charged to the program
        link.begin(time.monotonic() + seconds + server.margin + PATIENCE_SECONDS, is_charged=False)
        try:
            result = server.run(code, stdin, seconds, self.limits)
        except Unreachable as error:
            self.spawner.failure = str(error)
            raise
        link.begin(time.monotonic() + self.limits["wall_seconds"], is_charged=True)
        # Time-outs of the server and of the driver read alike
        late = result.get("status") == "TimeLimitExceeded" or TIMED_OUT in str(result.get("stderr"))
        self._ending = TimedOut if late else Ended
        return result

    def _run(self, calls: list[dict[str, Any]]) -> None:
        """Make the calls in a fresh process. Raises LoadFailed where the program cannot be loaded."""
        # One request runs the program and all its calls
        result = self._ask(self._driver(calls), "", self._seconds())
        lines = str(result.get("stdout") or "").split("\n")[:-1]  # a torn last line just ends the list
        # The first line says whether it was loaded
        if not lines:
            late = self._ending is TimedOut
            raise LoadFailed("loading it took too long" if late else "its process ended while loading it")
        first = _frame(lines[0], MAX_MESSAGE)
        if set(first) == {"err", "text"}:
            raise LoadFailed(error_text(first))
        if first != {"loaded": True} or len(lines) - 1 > len(calls):
            raise Violation("what came was not the answers to the calls")
        # The others are answers
        self._answers.extend(lines[1:])  # the judge looks whether they are in order
        self._num_missing = len(calls) - len(lines[1:])

    def _run_script(self) -> dict[str, Any]:
        # Run the script
        result = self._ask(self._order["code"], self._input.decode("utf-8", "replace"), self.limits["wall_seconds"])
        if self._ending is TimedOut:
            raise TimedOut
        # Bound what it printed
        self._printed = str(result.get("stdout") or "").encode("utf-8", "replace")
        if len(self._printed) > self.limits["output_bytes"]:
            raise TooMuch
        # An exception shows on stderr
        error = str(result.get("stderr") or "").strip()
        if result.get("return_code") and "Traceback (most recent call last)" in error:
            return {"i": 0, "err": "Exception", "text": error.rpartition("\n")[2][:300]}
        return {"i": 0, "out": None}

    def _driver(self, calls: list[dict[str, Any]]) -> str:
        """Return the text of the driver, with its order before it."""
        order = {
            "code": self._order["code"],
            "entry_point": self._order["entry_point"],
            "codec": CODEC.read_text(encoding="utf-8"),
            "calls": calls,
            "wall_seconds": self.limits["wall_seconds"],
            "max_bytes": self.limits["output_bytes"],
        }
        # Bound the line before it is parsed
        return f"ORDER = {json.dumps(order)!r}\n{DRIVER.read_text(encoding='utf-8')}"


def _frames(content: bytes) -> list[dict[str, Any]]:
    """Split the frames that the judge has put one behind the other."""
    frames = []
    while content:
        end = wire.LENGTH + int.from_bytes(content[: wire.LENGTH], "big")
        frames.append(codec.loads(content[wire.LENGTH : end]))
        content = content[end:]
    return frames


def _frame(line: str, max_bytes: int) -> dict[str, Any]:
    """Return what the program said in one line. Raises Violation where that is no answer."""
    if len(line) > max_bytes + MAX_MESSAGE:
        raise Violation("a line is too long")
    return decoded_object(line.encode("utf-8", "replace"), "line")


NUM_SLOTS = 4
WORKER_BYTES = 4 << 30
"""Address space of a worker: hostile answers cannot take more."""


class RemoteRunner:
    """A Runner (`covey.sandbox.types.Runner`) whose programs run elsewhere, `num_slots` at a time.

    >>> runner = RemoteRunner("http://sandbox.example:8080", num_slots=16)
    """

    def __init__(
        self, url: str, num_slots: int | None = None, margin: float = 10.0, limits: Limits | None = None
    ) -> None:
        """Take the server's address. `margin`: seconds the server may take besides a program's own. `limits`: where
        `run` is given none, and its `total_seconds` is the most that any program may take."""
        self._url = url
        self._margin = margin
        self._limits = limits or Limits()
        self._num_slots = num_slots or NUM_SLOTS
        timeout = self._limits.total_seconds + START_SECONDS + 2 * margin
        settings = WorkerSettings(self._num_slots, timeout, max_calls=10_000, address_bytes=WORKER_BYTES)
        self._pool = WorkerPool([judge_remotely], settings)

    async def run(
        self, code: str, tests: Sequence[Test], entry_point: str | None = None, limits: Limits | None = None
    ) -> Report:
        """Judge a program. Raises SandboxFailed where the server gives no verdict, ValueError for tests it cannot
        take."""
        order = encode_request(code, tests, entry_point, limits or self._limits)
        answer = await self._pool.call(0, {"url": self._url, "margin": self._margin, "order": order})
        if isinstance(answer, Failure):
            raise SandboxFailed(f"{self._url}: {answer.reason}")
        return decode_report(answer)

    def describe(self) -> dict[str, Any]:
        return {"tier": "remote", "url": self._url, "num_slots": self._num_slots}

    def close(self) -> None:
        self._pool.close()
