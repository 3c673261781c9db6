"""Named waits with deadlines, which end a stuck run.

If something can be given up (a reward worker, a logging service, an environment), its caller does so. For all else
there is the watchdog: a process of its own (`guard_process`) that receives every wait and ends the run when one
outlasts its deadline, wherever the run is stuck. All clocks are monotonic.
"""

import asyncio
import faulthandler
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self, TextIO, runtime_checkable

from covey.system.text.format import number_of
from covey.system.waits import watchdog_process
from covey.system.waits.watchdog_process import EXPIRED

LOGGER = logging.getLogger(__name__)

REPEAT_SECONDS = 0.2
"""Signs of progress that come faster than this are not passed on."""
SEND_SECONDS = 1.0
"""A guard that does not take a line for so long is replaced."""
LOOP_SECONDS = 2.0
"""The event loop has so long to give an environment up before the guard ends the run."""

ASKED = {"score": "score", "reset": "begin", "reply": "reply to", "close": "close"}
OF = {"score": "prompt", "reset": "episode", "reply": "answer", "close": "episode"}
"""Verbs and units of calls of an environment."""


@dataclass(eq=False, slots=True)
class _Wait:
    what: str
    limit: str
    seconds: float
    told: float = 0.0


class Watchdog:
    """Ends the run, with a line that says who waited for what, where a wait outlasts its deadline.

    A context manager; it watches nothing before it is entered, so parts of a run have one of their own until they are
    given another. Waits nest: the innermost of each thread counts, and its end is a sign of progress of the one
    around it. A wait must not span an `await`, but for the one around the whole event loop.

    >>> with Watchdog({"timeouts.sampling": 600.0}, Path("covey.log")) as watchdog:
    ...     with watchdog.deadline("the engine to sample a token", "timeouts.sampling"):
    ...         tokens = engine_turn()
    """

    def __init__(
        self, limits: Mapping[str, float] | None = None, log: Path = Path(os.devnull), who: str = "the run"
    ) -> None:
        """Keep the limits, the log and the name of this process.

        `limits`: seconds by setting. `log`: file for the last line and the stacks. `who`: run or rank.
        """
        self._limits = dict(limits or {})
        self._log = log
        self._who = who
        self._waits: dict[int, list[_Wait]] = {}
        self._lock = threading.Lock()
        self._stacks: TextIO | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with suppress(OSError):  # a log that cannot be written: the stacks go to stderr
            self._stacks = self._log.open("a", encoding="utf-8")
        # In C, so that it works whatever the interpreter is doing; then the signal does what it does by itself.
        faulthandler.register(EXPIRED, file=self._stacks or sys.__stderr__ or 2, all_threads=True, chain=True)
        with self._lock:
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stop()
        faulthandler.unregister(EXPIRED)
        if self._stacks is not None:
            self._stacks.close()

    @contextmanager
    def deadline(self, what: str, setting: str, seconds: float | None = None) -> Iterator[None]:
        """End the run unless the block ends or shows progress within `seconds`.

        None takes the limit of `setting`. `what` completes "the run has waited 600 s for ...". Raises KeyError for a
        setting without a limit.
        """
        if self._guard is None:
            yield
            return
        wait = self._wait(what, setting, seconds)
        with self._lock:
            waits = self._waits.setdefault(threading.get_ident(), [])
        try:
            with self._lock:
                waits.append(wait)
                self._tell()
            yield
        finally:
            with self._lock:
                if wait in waits:  # a signal may have come before it was
                    del waits[waits.index(wait) :]
                self._tell()

    def progress(self, what: str | None = None) -> None:
        """Restart this thread's deadline; `what` is still missing."""
        waits = self._waits.get(threading.get_ident())
        if waits and what is not None:
            waits[-1].what = what
        if waits and time.monotonic() - waits[-1].told > min(REPEAT_SECONDS, waits[-1].seconds / 10):
            with self._lock:
                self._tell()

    def waited_for(self, thread: int) -> str | None:
        """Return a thread's outermost wait under the limit of its innermost."""
        waits = tuple(self._waits.get(thread, ()))
        return next((wait.what for wait in waits if wait.limit == waits[-1].limit), None)

    def now_for(self, what: str, setting: str, seconds: float | None = None) -> None:
        """Replace this thread's wait."""
        waits = self._waits.get(threading.get_ident())
        if waits:
            with self._lock:
                wait = self._wait(what, setting, seconds)
                waits[-1].what, waits[-1].limit, waits[-1].seconds = wait.what, wait.limit, wait.seconds
                self._tell()

    def _wait(self, what: str, setting: str, seconds: float | None) -> _Wait:
        limit = self._limits[setting] if seconds is None else seconds
        return _Wait(" ".join(what.split()), f"{setting}={self._limits.get(setting, limit):g}", limit)

    def _tell(self) -> None:
        if self._guard is not None and not self._send(self._guard, self._line(threading.get_ident())):
            LOGGER.warning("watchdog process not responding; restarting it")
            self._stop()
            self._start()

    def _line(self, thread: int) -> bytes:
        waits = self._waits[thread]
        if not waits:
            return json.dumps([thread]).encode() + b"\n"
        wait = waits[-1]
        wait.told = time.monotonic()
        return json.dumps([thread, wait.told, wait.seconds, wait.what[:500], wait.limit]).encode() + b"\n"

    def _start(self) -> None:
        command = [sys.executable, "-I", "-S", watchdog_process.__file__, str(os.getpid()), self._who, str(self._log)]
        try:
            self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        except OSError as error:
            LOGGER.warning("the watchdog failed to start (%s); timeouts are not enforced", error)
            return
        # Never block on its pipe; tell it of waits that began before
        assert self._guard.stdin is not None
        os.set_blocking(self._guard.stdin.fileno(), False)
        for thread in self._waits:
            self._send(self._guard, self._line(thread))

    def _send(self, guard: "subprocess.Popen[bytes]", line: bytes) -> bool:
        """Send a line; return False if the process does not read.

        A line is short enough for an atomic write to a pipe.
        """
        assert guard.stdin is not None
        for _ in range(2):
            try:
                os.write(guard.stdin.fileno(), line)
                return True
            except BlockingIOError:
                select.select([], [guard.stdin], [], SEND_SECONDS)
            except OSError:
                return False
        return False

    def _stop(self) -> None:
        guard, self._guard = self._guard, None
        if guard is None:
            return
        guard.kill()  # it has nothing to finish
        guard.wait()
        assert guard.stdin is not None
        with suppress(OSError):
            guard.stdin.close()


def exit_within(seconds: float, status: int) -> None:
    """End a finished process with `status`, despite remaining threads and handlers."""

    def leave() -> None:
        names = ", ".join(sorted(t.name for t in threading.enumerate() if t is not threading.current_thread()))
        end_now(f"shutdown took more than {seconds:g} s; forcing exit (threads still running: {names})", status)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()


def end_now(line: str, status: int) -> None:
    """End this process and its children with a last line."""
    try:
        _kill_children()
        if select.select([], [2], [], 0)[1]:  # the terminal may be what hangs
            watchdog_process.tell_terminal(f"covey: {line}\n")
    finally:
        os._exit(status)


def _kill_children() -> None:
    found: list[str] = []
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found += children.read_text().split()
    for child in found:
        with suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)


class ScoringTimeout(Exception):
    """An environment exceeded its deadline and was given up."""


@runtime_checkable
class Watchable(Protocol):
    """A part of a run that names its waits to the watchdog."""

    def watched_by(self, watchdog: Watchdog) -> None:
        """Report waits to this watchdog."""


@dataclass
class PromptWaits:
    """The waits of the prompts in flight, for engine or environment.

    All prompts share one deadline of the watchdog. Calls of the environment end after `scoring_seconds` without any
    verdict; calls of the engine have no such limit.
    """

    watchdog: Watchdog = field(default_factory=Watchdog)
    scoring_seconds: float | None = None
    """None waits as long as it takes."""
    _sampling: int = 0
    _environments: list[tuple[str, str]] = field(default_factory=list)
    _deadlines: set[asyncio.Timeout] = field(default_factory=set)
    _told: tuple[str, ...] = ()
    """Pending waits that the watchdog knows."""
    _is_due: bool = False
    """Whether it is to be told once the event loop has turned."""

    @contextmanager
    def under_way(self, num_prompts: int) -> Iterator[None]:
        """Watch the event loop."""
        self._told, self._is_due = (), False
        with self.watchdog.deadline(_to_answer(num_prompts), "timeouts.sampling"):
            yield

    @property
    def is_sampling(self) -> bool:
        """Return True where the engine works on any prompt."""
        return self._sampling > 0

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Watch the engine's work on one prompt."""
        self._sampling += 1
        self._tell()
        try:
            yield
        finally:
            self._sampling -= 1
            self._tell_soon()

    @asynccontextmanager
    async def scoring(self, environment: str, method: str = "score") -> AsyncIterator[None]:
        """Watch an environment's scoring, or another method of `ASKED`.

        Raises ScoringTimeout where there was no answer in time.
        """
        deadline = asyncio.timeout(self.scoring_seconds)
        asked = (environment, method)
        self._environments.append(asked)
        self._deadlines.add(deadline)
        try:
            async with deadline:
                self._tell()
                yield
        except TimeoutError as error:
            if not deadline.expired():  # the environment's own
                raise
            limit = f"timeouts.scoring={self.scoring_seconds:g}"
            raise ScoringTimeout(
                f"{environment}.{method} has not answered for {self.scoring_seconds:g} s ({limit})"
            ) from error
        finally:
            self._environments.remove(asked)
            self._deadlines.discard(deadline)
            # An answer shows progress: extend the deadlines of those behind it in the queue
            if not deadline.expired():
                self._extend()
            self._tell_soon()

    def _extend(self) -> None:
        """Extend the deadlines of queued prompts after a verdict."""
        if self.scoring_seconds is None:
            return
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time() + self.scoring_seconds)

    def _tell(self) -> None:
        # Environments are waited for before the engine
        waited_for = self._environments[0] if self._environments else ("the engine",) * bool(self._sampling)
        if not waited_for:
            return
        what, setting, seconds = _to_answer(self._sampling), "timeouts.sampling", None
        if self._environments:
            environment, method = self._environments[0]
            number = sum(other == method for _, other in self._environments)
            what = f"the environment {environment} to {ASKED[method]} {number_of(number, OF[method])}"
            setting = "timeouts.scoring"
            seconds = None if self.scoring_seconds is None else self.scoring_seconds + LOOP_SECONDS
        # The same wait again is progress, a new one has a limit of its own
        if waited_for == self._told:
            self.watchdog.progress(what)
        else:
            self._told = waited_for
            self.watchdog.now_for(what, setting, seconds)

    def _tell_soon(self) -> None:
        """Send once per turn of the event loop.

        A blocked loop has been named before: by the environment's call or the engine's start.
        """
        if self._is_due:
            return
        self._is_due = True
        asyncio.get_running_loop().call_soon(self._told_soon)

    def _told_soon(self) -> None:
        self._is_due = False
        self._tell()


def _to_answer(num_prompts: int) -> str:
    return f"the engine to answer {number_of(num_prompts, 'prompt')}"
