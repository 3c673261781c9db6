"""Judges programs that another machine runs, in a worker process of this one.

The judge is the sandbox's own (`covey.sandbox.inside.verdicts`); only where a program's process would be, there is a
server that is asked. Expected values stay here: the server gets code, entry point and arguments.

A program has no process that lasts: each request runs it anew, with the calls that have not been answered yet.
"""

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from covey.sandbox.inside import codec, wire
from covey.sandbox.inside.case import SUSPICIOUS, Case, LoadFailed, error_text
from covey.sandbox.inside.host import Ended, Program, TimedOut, TooMuch, Unjudged, Violation
from covey.sandbox.inside.verdicts import judge

STDIN = 0
OVERHEAD = 4
"""Bytes of a response for each byte of output that is allowed: JSON escapes, and the messages around."""
MAX_MESSAGE = 1 << 16
DRIVER = Path(__file__).with_name("remote_driver.py")
CODEC = Path(codec.__file__)
TIMED_OUT = "Timeout ("
"""How faulthandler's message begins when the driver's time for one call is over."""


IMPORT = re.compile(
    r"(?:^|;)[ \t]*(?:from[ \t]+(\w+)|import[ \t]+([\w., \t]+))"
    r"|(?:__import__|import_module)\([ \t]*[\"'](\w+)",
    re.MULTILINE,
)


class Unreachable(Exception):
    """The server gives no verdict; the message says why in one line."""


def judge_remotely(url: str, margin: float, order: Mapping[str, Any]) -> dict[str, Any]:
    """What the sandbox's judge says to an order (`covey.sandbox.orders`), or {"unjudged": why}."""
    started = time.monotonic()
    spawner = RemoteSpawner(Server(url, margin), started, any(test["test"] == "assert" for test in order["tests"]))
    case = Case(spawner, order["code"], order["entry_point"], dict(order["limits"]))
    try:
        results = judge(case, list(order["tests"]))
    except (Unjudged, Unreachable) as error:
        return {"unjudged": str(error)}
    if spawner.failure:
        return {"unjudged": spawner.failure}
    return {"results": results, "imports": named_imports(order["code"]), "seconds": time.monotonic() - started}


def named_imports(code: str) -> list[str]:
    """Which of the suspicious modules an import of the code names, by its text: a hostile text is not parsed here."""
    named = {name for match in IMPORT.finditer(code) for part in match.groups("") for name in part.split(",")}
    return sorted({name.strip().partition(" ")[0].partition(".")[0] for name in named} & set(SUSPICIOUS))


@dataclass(frozen=True, slots=True)
class Server:
    """A server that speaks SandboxFusion's /run_code."""

    url: str
    margin: float
    """Seconds it may take besides the program's own time."""

    def run(self, code: str, stdin: str, seconds: float, limits: Mapping[str, Any]) -> dict[str, Any]:
        """Its `run_result`. Raises Unreachable where there is none."""
        body = {
            "code": code,
            "language": "python",
            "stdin": stdin,
            "run_timeout": seconds,
            "memory_limit_MB": limits["memory_bytes"] >> 20,
        }
        answer = self._post(json.dumps(body).encode(), seconds + self.margin, OVERHEAD * limits["output_bytes"])
        result = answer.get("run_result")
        if answer.get("status") == "SandboxError" or not isinstance(result, dict):
            raise Unreachable(f"{self.url}: {answer.get('message') or 'no run_result'!s:.200}")
        return result

    def _post(self, body: bytes, seconds: float, max_bytes: int) -> dict[str, Any]:
        address = f"{self.url.rstrip('/')}/run_code"
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=seconds) as response:
                content = _read(response, max_bytes + MAX_MESSAGE, time.monotonic() + seconds)
            answer = json.loads(content)
        except TimeoutError as error:
            raise Unreachable(f"{address} has not answered for {seconds:.3g} s") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unreachable(f"{address}: {type(error).__name__}: {error}") from error
        if not isinstance(answer, dict):
            raise Unreachable(f"{address} answers with {type(answer).__name__}, not an object")
        return answer


def _read(response: http.client.HTTPResponse, max_bytes: int, deadline: float) -> bytes:
    """A response that comes in time and is not larger than it may be."""
    content = bytearray()
    while part := response.read1(1 << 16):
        content += part
        if len(content) > max_bytes:
            raise ValueError(f"the answer has more than {max_bytes} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError
    return bytes(content)


@dataclass
class RemoteSpawner:
    """Makes what stands for a process."""

    server: Server
    started: float
    loads_first: bool
    """Whether a program is loaded before it is called: tests that call it one by one must not mistake a program that
    cannot be loaded for one that raises."""
    failure: str = ""
    """Why there is no verdict: test code may catch what it was told of it."""

    def fresh(self, limits: dict[str, Any], is_script: bool) -> Program:
        return cast(Program, RemoteProgram(self, limits, is_script))

    def end(self, program: Program) -> None:
        """Nothing of it is running."""


@dataclass
class RemoteProgram:
    """Takes the frames that a process would take, and gives those that it would give."""

    spawner: RemoteSpawner
    limits: dict[str, Any]
    is_script: bool
    stdin: int = STDIN
    _order: dict[str, Any] = field(default_factory=dict)
    _input: bytes = b""
    _printed: bytes = b""
    _calls: list[dict[str, Any]] = field(default_factory=list)
    """Not yet sent."""
    _answers: deque[dict[str, Any]] = field(default_factory=deque)
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
        """The next frame; raises LoadFailed, TimedOut, Ended, TooMuch, Violation or Unreachable."""
        if self._answers and self._answers[0] == {"loaded": True} and self.spawner.loads_first:
            self._run([])
        if not self._answers and self.is_script:
            return self._run_script()
        if not self._answers and not self._num_missing and self._calls:
            calls, self._calls = self._calls, []
            self._run(calls)
        if self._answers:
            return self._answers.popleft()
        raise self._ending

    def finish_output(self, deadline: float) -> bytes:
        return self._printed

    def _seconds(self) -> float:
        return max(0.1, self.spawner.started + self.limits["total_seconds"] - time.monotonic())

    def _ask(self, code: str, stdin: str, seconds: float) -> dict[str, Any]:
        if self.spawner.failure:
            raise Unreachable(self.spawner.failure)
        try:
            result = self.spawner.server.run(code, stdin, seconds, self.limits)
        except Unreachable as error:
            self.spawner.failure = str(error)
            raise
        late = result.get("status") == "TimeLimitExceeded" or TIMED_OUT in str(result.get("stderr"))
        self._ending = TimedOut if late else Ended
        return result

    def _run(self, calls: list[dict[str, Any]]) -> None:
        """The calls in a fresh process; raises LoadFailed where the program cannot be loaded."""
        result = self._ask(self._driver(calls), "", self._seconds())
        lines = str(result.get("stdout") or "").split("\n")[:-1]  # a torn last line just ends the list
        frames = [_frame(line, self.limits["output_bytes"]) for line in lines]
        if not frames:
            late = self._ending is TimedOut
            raise LoadFailed("loading it took too long" if late else "its process ended while loading it")
        if set(frames[0]) == {"err", "text"}:
            raise LoadFailed(error_text(frames[0]))
        if frames[0] != {"loaded": True} or len(frames) - 1 > len(calls):
            raise Violation("what came was not the answers to the calls")
        self._answers.extend(frames[1:])  # the judge looks whether they are in order
        self._num_missing = len(calls) - len(frames[1:])

    def _run_script(self) -> dict[str, Any]:
        result = self._ask(self._order["code"], self._input.decode("utf-8", "replace"), self.limits["wall_seconds"])
        if self._ending is TimedOut:
            raise TimedOut
        self._printed = str(result.get("stdout") or "").encode("utf-8", "replace")
        if len(self._printed) > self.limits["output_bytes"]:
            raise TooMuch
        error = str(result.get("stderr") or "").strip()
        if result.get("return_code") and "Traceback (most recent call last)" in error:
            return {"i": 0, "err": "Exception", "text": error.rpartition("\n")[2][:300]}
        return {"i": 0, "out": None}

    def _driver(self, calls: list[dict[str, Any]]) -> str:
        """The text of the driver, with its order before it."""
        order = {
            "code": self._order["code"],
            "entry_point": self._order["entry_point"],
            "codec": CODEC.read_text(encoding="utf-8"),
            "calls": calls,
            "wall_seconds": self.limits["wall_seconds"],
            "max_bytes": self.limits["output_bytes"],
        }
        return f"ORDER = {json.dumps(order)!r}\n{DRIVER.read_text(encoding='utf-8')}"


def _frames(content: bytes) -> list[dict[str, Any]]:
    """What the judge has put one behind the other."""
    frames = []
    while content:
        end = wire.LENGTH + int.from_bytes(content[: wire.LENGTH], "big")
        frames.append(codec.loads(content[wire.LENGTH : end]))
        content = content[end:]
    return frames


def _frame(line: str, max_bytes: int) -> dict[str, Any]:
    """What the program said in one line; raises Violation where that is no answer."""
    if len(line) > max_bytes + MAX_MESSAGE:
        raise Violation("a line is too long")
    try:
        frame = codec.loads(line.encode("utf-8", "replace"))
    except codec.FOREIGN as error:
        raise Violation("a line is not JSON") from error
    if type(frame) is not dict:
        raise Violation("a line is not an object")
    return frame
