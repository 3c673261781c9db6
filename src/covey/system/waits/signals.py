"""Ctrl-C, SIGTERM, SIGHUP: stop once the state is whole."""

import ctypes
import faulthandler
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from covey.system.waits.running import running_clock

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

_LOOPS: "WeakValueDictionary[int, asyncio.AbstractEventLoop]" = WeakValueDictionary()
"""The quiet event loop of each thread."""
PATIENCE = 5.0
"""Seconds that a callback of the loop may take after a signal before it is interrupted."""

EXIT_STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
"""Exit code of the command after saving: 128 + signal number, as shells have it."""


class StopRequested(KeyboardInterrupt):
    """The run was asked to stop; other threads see the class alone."""

    usual = signal.SIGINT

    def __init__(self, number: int | None = None) -> None:
        given = self.usual if number is None else signal.Signals(number)
        super().__init__(f"stopped by {given.name}")
        self.status = EXIT_STATUS[given]


class Terminated(StopRequested):
    usual = signal.SIGTERM


class HungUp(StopRequested):
    """The terminal or connection of the run is gone (SIGHUP)."""

    usual = signal.SIGHUP


KINDS = {kind.usual: kind for kind in (StopRequested, Terminated, HungUp)}


@dataclass
class Stopper:
    """Turns signals into StopRequested, held back between `hold` and `release`.

    Weights change between hold and release; outside, work in flight is simply sampled again. Within an event
    loop they stop between callbacks, or a blocked one after PATIENCE. Another signal does so at once, else nothing.
    """

    shutdown_timeout: float | None = None
    """Seconds from the first signal to the end of `installed`, after which the process reports its position and exits
    with status 1. None waits."""
    together: Callable[[int], int] | None = None
    """Largest number over all ranks, so that they stop at the same `release`: a rank that stopped alone would leave the
    others waiting."""
    _held: bool = False
    _waiting: int | None = None
    _thread: int = field(default_factory=threading.get_ident)
    """The thread that is stopped; signals always arrive in the main one."""
    _previous: dict[signal.Signals, Any] = field(default_factory=dict)
    _soon: "asyncio.Handle | None" = None
    """The stop that waits for the event loop's current callback, at most PATIENCE."""

    @contextmanager
    def installed(self) -> Iterator["Stopper"]:
        """Handle the signals inside, and restore the former handlers.

        Only the main thread may; in others, signals are left alone.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        for number in EXIT_STATUS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:  # nohup
                continue
            self._previous[number] = signal.signal(number, self._handle)
        try:
            yield self
        finally:
            if self._waiting is not None:
                faulthandler.cancel_dump_traceback_later()
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def hold(self) -> None:
        """Hold back signals while the state is incomplete."""
        self._held = True

    def release(self) -> None:
        """Let signals through; raises StopRequested where one has come."""
        self._held = False
        self._take_soon()
        # Not into _waiting: a signal that comes during the vote must wait for the next one, not be lost.
        asked = self._waiting if self.together is None else self.together(self._waiting or 0) or None
        if asked is not None:
            self._held = True  # what follows is the end, which is not to be interrupted
            raise StopRequested(asked)

    @property
    def is_asked(self) -> bool:
        """Return True where a stop was requested and has not happened yet."""
        return self._waiting is not None

    def ask(self) -> None:
        """Request a stop from any thread, at the next `release`.

        No signal is sent during `hold`: it could arrive when others handle signals again.
        """
        if self._previous and not self._held:  # only a signal of the main thread ends what that waits for
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        elif self._waiting is None:
            self._waiting = signal.SIGTERM

    def _handle(self, number: int, frame: FrameType | None) -> None:
        kind = KINDS[signal.Signals(number)]
        if self._waiting is not None:
            if self._take_soon():  # code of a user blocks the event loop
                self._raise_in_thread(kind)
            return
        self._waiting = number
        if self.shutdown_timeout is not None:  # a thread of C: it fires even where Python itself is stuck
            faulthandler.dump_traceback_later(self.shutdown_timeout, exit=True, file=sys.__stderr__ or sys.stderr)
        if not self._held and self.together is None:
            self._held = True  # the save that follows is not to be interrupted
            loop = _LOOPS.get(self._thread)
            if loop is None or not loop.is_running():
                self._raise_in_thread(kind)
                return
            # Between callbacks: raised inside asyncio it loses tasks, and `close` waits for them forever.
            self._soon = loop.call_soon_threadsafe(self._raise_soon, kind)
            again = threading.Timer(PATIENCE, self._signal_again, (number,))
            again.daemon = True
            again.start()

    def _take_soon(self) -> bool:
        """Cancel the stop that waits, returning True where one did."""
        waiting, self._soon = self._soon, None
        if waiting is not None:
            waiting.cancel()
        return waiting is not None

    def _raise_soon(self, kind: type[StopRequested]) -> None:
        if self._take_soon():
            raise kind

    def _signal_again(self, number: int) -> None:
        if self._soon is not None:
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _raise_in_thread(self, kind: type[StopRequested]) -> None:
        if self._thread == threading.get_ident():
            raise kind
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(kind))

    def run_apart(self, work: Callable[[], T]) -> T:
        """Run `work` in its own thread, stopped by signals here."""
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1, "covey-run") as threads, self.installed():
            self._thread = threads.submit(threading.get_ident).result()
            return threads.submit(work).result()


def is_in_event_loop() -> bool:
    """Return True inside an event loop, as in a notebook cell."""
    from asyncio import get_running_loop  # takes as long as all else that the command needs for its help

    try:
        get_running_loop()
    except RuntimeError:
        return False
    return True


def outside_of_loops(work: Callable[[], T]) -> T:
    """Run `work`, in its own thread if an event loop runs here."""
    if not is_in_event_loop():
        return work()
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


def quiet_event_loop() -> "asyncio.AbstractEventLoop":
    """Make an event loop that ignores stopped tasks, and time of stops."""
    from asyncio import new_event_loop

    loop = new_event_loop()
    loop.time = running_clock()  # type: ignore[method-assign]

    def report(loop: "asyncio.AbstractEventLoop", context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), KeyboardInterrupt):
            loop.default_exception_handler(context)

    loop.set_exception_handler(report)
    _LOOPS[threading.get_ident()] = loop
    return loop
