"""The judge's side of a checker, whose verdicts survive its process.

A checker that dies or is late has failed that test; a new one continues behind it.
"""

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from covey_sandbox.inside import wire
from covey_sandbox.inside.case import START_SECONDS
from covey_sandbox.inside.host import Broken
from covey_sandbox.inside.link import Verdict, failed_verdict

MESSAGE_SECONDS = 10.0
"""Seconds for the rest of a message that has begun."""


class CallerGone(EOFError):
    """The caller no longer waits."""


class Helper(Protocol):
    """The checker's requests, and the processes to watch meanwhile."""

    callers: Sequence[int]
    """Descriptors on which something happens when the caller is gone."""
    look_seconds: float
    """Seconds between two looks."""

    def serve(self, message: dict[str, Any], channel: socket.socket) -> None:
        """Carry out a message, if it asks for anything."""

    def look(self) -> None:
        """End processes beyond their limits."""

    def clear(self) -> None:
        """End the processes of a lost checker."""


class Checker:
    """A forked process that runs `serve` on its end of a channel."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self.channel, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                serve(theirs)
            finally:
                os._exit(1)
        theirs.close()

    def busy_seconds(self) -> float:
        """Return its seconds of computing or waiting for a processor, if known."""
        busy = 0.0
        with suppress(OSError):
            busy += time.clock_gettime((~self.pid << 3) | 2)
        # On a busy machine, work that would take a second may have had a tenth of one
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{self.pid}/schedstat") as file:
            busy += int(file.read().split()[1]) / 1e9
        return busy

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.channel.close()


@dataclass
class TestProgress:
    """The verdicts on one program so far."""

    num_tests: int
    started: float = field(default_factory=time.monotonic)
    until: float = 0.0
    """Deadline of the checker's next message."""
    has_begun: bool = False
    """The checker has said something."""
    excused: float = 0.0
    is_charged: bool = False
    busy_seconds: float = 0.0
    """Busy seconds of the checker when it began work not charged to the program."""
    verdicts: list[Verdict] = field(default_factory=list)
    void: Verdict | None = None
    """The same verdict for all tests."""
    imports: list[str] | None = None
    unjudged: str | None = None

    def begin(self) -> None:
        """Record that a checker has the order."""
        self.until = time.monotonic() + START_SECONDS
        self.has_begun = self.is_charged = False

    def take(self, message: dict[str, Any], checker: Checker) -> None:
        """Record a checker's message."""
        self.has_begun = True
        self.verdicts += message["verdicts"]
        self.void = message.get("void", self.void)
        self.imports = message.get("imports", self.imports)
        self.unjudged = message.get("unjudged", self.unjudged)
        if "broken" in message:
            raise Broken(message["broken"])
        if "until" in message:
            self.until, self.excused = message["until"], message.get("excused", self.excused)
            self.is_charged = message["is_charged"]
            self.busy_seconds = 0.0 if self.is_charged else checker.busy_seconds()

    def fail(self, checker: Checker, *, is_late: bool) -> None:
        """Record that the checker ended before the next verdict."""
        if not self.has_begun:
            raise Broken("the process that checks programs has ended")
        if is_late and (self.is_charged or checker.busy_seconds() - self.busy_seconds < START_SECONDS / 2):
            self.verdicts.append(failed_verdict("timeout", "its answer takes too long to judge"))
        elif self.is_charged:
            self.verdicts.append(failed_verdict("crash", "its answer ended the process that judged it"))
        else:
            what = f"takes more than {START_SECONDS:g} s" if is_late else "ends the process that judges"
            self.unjudged = f"a test {what} before it calls the program"

    @property
    def state(self) -> dict[str, Any]:
        has_timed_out = any(verdict["kind"] == "timeout" for verdict in self.verdicts)
        times = {"started": self.started, "excused": self.excused}
        return {**times, "has_timed_out": has_timed_out, "imports": self.imports}

    @property
    def is_done(self) -> bool:
        return self.void is not None or self.unjudged is not None or len(self.verdicts) >= self.num_tests

    def answer(self) -> dict[str, Any]:
        if self.unjudged is not None:
            return {"unjudged": " ".join(self.unjudged.split())}
        results = self.verdicts if self.void is None else [self.void] * self.num_tests
        return {"results": results, "imports": self.imports or [], "seconds": time.monotonic() - self.started}


class Supervisor:
    """Has programs checked in turn, by one checker while it lasts."""

    def __init__(self, serve: Callable[[socket.socket], None], helper: Helper) -> None:
        self._serve = serve
        self._helper = helper
        self._checker: Checker | None = None

    def judge(self, order: dict[str, Any]) -> dict[str, Any]:
        """Return the verdicts on one program. Raises Broken, and CallerGone."""
        progress = TestProgress(len(order["tests"]))
        while not progress.is_done:
            checker = self._checker = self._checker or Checker(self._serve)
            progress.begin()
            if self._is_worn_by(checker, progress, order):
                self.close()
        return progress.answer()

    def close(self) -> None:
        checker, self._checker = self._checker, None
        if checker is not None:
            checker.close()

    def _is_worn_by(self, checker: Checker, progress: TestProgress, order: dict[str, Any]) -> bool:
        """Check the remaining tests; return True if the checker must be replaced."""
        try:
            order = {**order, "first": len(progress.verdicts), "state": progress.state}
            wire.send(checker.channel.fileno(), order)
            return self._follow(checker, progress)
        except CallerGone:
            raise
        except TimeoutError:
            progress.fail(checker, is_late=True)
        except (EOFError, ConnectionError):
            progress.fail(checker, is_late=False)
        finally:
            self._helper.clear()
        return True

    def _follow(self, checker: Checker, progress: TestProgress) -> bool:
        """Take the checker's messages; return True if it wants to be replaced."""
        while True:
            self._wait(checker, progress.until)
            message = wire.receive(checker.channel.fileno(), MESSAGE_SECONDS)
            progress.take(message, checker)
            self._helper.serve(message, checker.channel)
            if "done" in message:
                assert progress.is_done
                return bool(message["is_worn"])

    def _wait(self, checker: Checker, until: float) -> None:
        """Wait for the checker's message. Raises TimeoutError and CallerGone."""
        poll = select.poll()
        for descriptor in (checker.channel.fileno(), *self._helper.callers):
            poll.register(descriptor, select.POLLIN)
        while True:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            ready = {descriptor for descriptor, _ in poll.poll(min(left, self._helper.look_seconds) * 1000)}
            self._helper.look()
            if checker.channel.fileno() in ready:
                return
            if ready:
                raise CallerGone
