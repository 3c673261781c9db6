"""One program under judgement: its processes, one after another, and the time it has left."""

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from covey.sandbox.inside import codec, wire
from covey.sandbox.inside.host import Broken, Ended, Program, TimedOut, Violation

SUSPICIOUS = ("ctypes", "gc", "inspect", "os", "sys")
START_SECONDS = 20.0
"""For a process to be there and to have read the program, on a busy machine."""
MIN_SECONDS = 0.05
"""A test that follows one that timed out gets at least this."""

Verdict = dict[str, Any]
"""passed, kind, message."""
PASSED: Verdict = {"passed": True, "kind": "passed", "message": ""}


def failed(kind: str, message: str) -> Verdict:
    """A test that did not pass. The message is one line without control characters: terminals obey those."""
    line = "".join(character if character.isprintable() else "?" for character in " ".join(message.split()))
    return {"passed": False, "kind": kind, "message": line}


class LoadFailed(Exception):
    """The program does not even define what is to be called; the message says why."""


class Spawner(Protocol):
    """Makes processes for programs and ends them."""

    def fresh(self, limits: dict[str, Any], is_script: bool) -> Program:
        """A new process that waits for its order."""
        ...

    def end(self, program: Program) -> None:
        """Ends it, and all it started."""
        ...


@dataclass
class Case:
    """A program, its limits, and what is known about it so far."""

    spawner: Spawner
    code: str
    entry_point: str
    limits: dict[str, Any]
    started: float = field(default_factory=time.monotonic)
    has_timed_out: bool = False
    imports: list[str] | None = None
    program: Program | None = None

    def deadline(self, num_left: int) -> float:
        """When the next answer must be there. Once a test has timed out, the others share what is left."""
        now = time.monotonic()
        seconds = min(self.limits["wall_seconds"], self.left())
        if self.has_timed_out:
            seconds = min(seconds, max(self.left() / num_left, MIN_SECONDS))
        return now + seconds

    def left(self) -> float:
        """Seconds for all that is still to come."""
        return max(0.0, self.started + self.limits["total_seconds"] - time.monotonic())

    def start(self, is_script: bool = False) -> Program:
        """A fresh process that has its order; nothing of the program has run in it yet."""
        self.end()
        began = time.monotonic()
        program = self.program = self.spawner.fresh(self.limits, is_script)
        order = {
            "code": self.code,
            "entry_point": self.entry_point,
            "is_script": is_script,
            "suspicious": SUSPICIOUS,
        }
        program.send(wire.pack(codec.dumps(order)))
        try:
            first = program.receive(began + START_SECONDS)
        except (Ended, TimedOut, Violation) as error:
            raise LoadFailed("its text ended the process that read it") from error
        if "failed" in first:
            raise Broken(f"a layer could not be put on: {first['failed']}")
        self.imports = first["imports"] if self.imports is None else self.imports
        self.started += time.monotonic() - began  # none of its own doing
        return program

    def load(self) -> Program:
        """A fresh process that has loaded the program; raises LoadFailed."""
        program = self.start()
        try:
            loaded = program.receive(self.deadline(1))
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
        """Ends the process that runs, if one does."""
        program, self.program = self.program, None
        if program is not None:
            self.spawner.end(program)


def answer_of(frame: dict[str, Any], index: int) -> tuple[bool, Any]:
    """(True, the value) or (False, the error's text); raises Violation for anything but an answer to that call."""
    if type(frame.get("i")) is not int or frame["i"] != index:
        raise Violation("an answer to another call")
    if set(frame) == {"i", "out"}:
        try:
            return True, codec.decode(frame["out"])
        except codec.FOREIGN as error:
            raise Violation("a value of unknown shape") from error
    if set(frame) == {"i", "err", "text"}:
        return False, error_text(frame)
    raise Violation("neither a value nor an error")


def error_text(frame: dict[str, Any]) -> str:
    """Type and message of an exception, on one line."""
    name, text = frame["err"], frame["text"]
    if type(name) is not str or type(text) is not str:
        raise Violation("an error without a name")
    between = " " if text.startswith("(line ") else ": "
    return f"{name[:100]}{between}{text[:400]}" if text else name[:100]
