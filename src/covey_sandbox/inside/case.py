"""A program under judgement: its processes and its remaining time."""

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from covey_sandbox.inside import codec, wire
from covey_sandbox.inside.host import Broken, Ended, Program, TimedOut, Violation
from covey_sandbox.inside.link import CHECK_SECONDS, Link, Verdict

SUSPICIOUS = frozenset({"ctypes", "gc", "inspect", "os", "sys"})
"""Modules whose imports are noted."""
USUAL = "math cmath sys os re random string copy itertools functools collections heapq bisect operator datetime"
"""Modules that test code has without importing them."""
START_SECONDS = 20.0
"""Seconds in all not charged to a program: processes that start on a busy machine, test code before its first call."""
MIN_SECONDS = 0.05
"""A test that follows one that timed out gets at least this."""


class LoadFailed(Exception):
    """The program does not define the entry point; the message is the reason."""


class Spawner(Protocol):
    """Makes and ends programs' processes."""

    def fresh(self, limits: dict[str, Any], is_script: bool) -> Program:
        """Return a new process that waits for its order."""

    def end(self, program: Program) -> None:
        """End it, and all it started."""


@dataclass
class ProgramCase:
    """A program, its limits, and its verdicts so far."""

    spawner: Spawner
    link: Link
    code: str
    entry_point: str
    limits: dict[str, Any]
    started: float = field(default_factory=time.monotonic)
    excused: float = 0.0
    """Seconds that it is not charged with."""
    has_timed_out: bool = False
    imports: list[str] | None = None
    program: Program | None = None

    def expect(self, num_left: int) -> float:
        """Return the deadline of the next answer.

        After a timeout, the remaining tests share the remaining time. The judge bounds the time to look at an answer.
        """
        seconds = min(self.limits["wall_seconds"], self.seconds_left())
        if self.has_timed_out:
            seconds = min(seconds, max(self.seconds_left() / num_left, MIN_SECONDS))
        deadline = time.monotonic() + seconds
        self.link.begin(deadline + CHECK_SECONDS, is_charged=True, excused=self.excused)
        return deadline

    def begin_uncharged(self) -> None:
        """Begin work whose delay is not the program's fault."""
        self.link.begin(time.monotonic() + START_SECONDS, is_charged=False, excused=self.excused)

    def seconds_left(self) -> float:
        return max(0.0, self.started + self.excused + self.limits["total_seconds"] - time.monotonic())

    def excuse(self, seconds: float) -> None:
        """Excuse this time, up to START_SECONDS in all."""
        self.excused = min(self.excused + seconds, START_SECONDS)

    def add(self, verdict: Verdict) -> None:
        self.has_timed_out |= verdict["kind"] == "timeout"
        self.link.add(verdict)

    def start(self, is_script: bool = False) -> Program:
        """Return a fresh process that has read, but not run, the program."""
        self.end()
        began = time.monotonic()
        deadline = began + START_SECONDS
        self.link.begin(deadline + CHECK_SECONDS, is_charged=True, excused=self.excused)
        program = self.program = self.spawner.fresh(self.limits, is_script)
        self._wait_ready(program, deadline)
        self.excuse(time.monotonic() - began)
        order = {
            "code": self.code,
            "entry_point": self.entry_point,
            "is_script": is_script,
            "suspicious": sorted(SUSPICIOUS) if self.imports is None else [],
        }
        deadline = self.expect(1)
        program.send(wire.pack(codec.dumps(order)))
        try:
            first = program.receive(deadline)
        except TimedOut:
            raise LoadFailed(f"reading it took longer than {self.limits['wall_seconds']:g} s") from None
        except (Ended, Violation):
            raise LoadFailed("its text ended the process that read it") from None
        if self.imports is None:
            self.imports = first["imports"]
            self.link.send(imports=self.imports)
        return program

    def _wait_ready(self, program: Program, deadline: float) -> None:
        """Raise Broken unless the process, still trusted, reports its isolation."""
        try:
            first = program.receive(deadline)
        except (Ended, TimedOut) as error:
            raise Broken(f"a process for a program did not start ({type(error).__name__})") from error
        if "failed" in first:
            raise Broken(f"a layer could not be put on: {first['failed']}")

    def load(self) -> Program:
        """Return a fresh process that has loaded the program. Raises LoadFailed."""
        program = self.start()
        try:
            loaded = program.receive(self.expect(1))
        except TimedOut:
            raise LoadFailed(f"loading it took longer than {self.limits['wall_seconds']:g} s") from None
        except Ended:
            raise LoadFailed("its process ended while loading it") from None
        if loaded == {"loaded": True}:
            return program
        if set(loaded) == {"err", "text"}:
            raise LoadFailed(error_text(loaded))
        raise Violation("what came first was not an answer")

    def end(self) -> None:
        program, self.program = self.program, None
        if program is not None:
            self.spawner.end(program)


def answer_of(frame: dict[str, Any], index: int, refer: codec.Refer | None = None) -> tuple[bool, Any]:
    """Return (True, value) or (False, error text). Raises Violation for no answer.

    `refer` finds the objects that an answer names.
    """
    # An answer names its call, so that none is taken for another's
    if type(frame.get("i")) is not int or frame["i"] != index:
        raise Violation("an answer to another call")
    if set(frame) == {"i", "out"} or (refer is not None and set(frame) == {"i", "out", "back"}):
        return True, decode_value(frame["out"], refer)
    if set(frame) == {"i", "err", "text"} or (refer is not None and set(frame) == {"i", "err", "text", "more"}):
        return False, error_text(frame)
    raise Violation("neither a value nor an error")


def decode_value(node: Any, refer: codec.Refer | None) -> Any:
    """Decode a program's value. Raises Violation."""
    try:
        return codec.decode(node, refer=refer)
    except MemoryError:
        raise
    except codec.FOREIGN as error:
        raise Violation("a value of unknown shape") from error


def error_text(frame: dict[str, Any]) -> str:
    """Return an exception's type and message on one line."""
    name, text = frame["err"], frame["text"]
    if type(name) is not str or type(text) is not str:
        raise Violation("an error without a name")
    between = " " if text.startswith("(line ") else ": "
    return f"{name[:100]}{between}{text[:400]}" if text else name[:100]
