"""Ctrl-C, SIGTERM, SIGHUP: stop at once where nothing is half done, else as soon as it is whole, to be saved."""

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

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

EXIT_STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
"""What the command exits with after it has saved: 128 + the number of the signal, as shells have it."""


class StopRequested(KeyboardInterrupt):
    """Somebody asked the run to stop. Exceptions for other threads are named by their class alone."""

    usual = signal.SIGINT

    def __init__(self, number: int | None = None) -> None:
        given = self.usual if number is None else signal.Signals(number)
        super().__init__(f"stopped by {given.name}")
        self.status = EXIT_STATUS[given]


class Terminated(StopRequested):
    """The same by SIGTERM."""

    usual = signal.SIGTERM


class HungUp(StopRequested):
    """The same by SIGHUP: the terminal or the connection that the run was started from is gone."""

    usual = signal.SIGHUP


KINDS = {kind.usual: kind for kind in (StopRequested, Terminated, HungUp)}


@dataclass
class Stopper:
    """Turns the signals into StopRequested. While `hold` is in force it waits until `release`.

    Weights change between hold and release; outside, dropping what is in flight loses nothing that is not sampled
    again. A signal that comes while another is waiting changes nothing: the save it waits for is on its way.
    """

    shutdown_timeout: float | None = None
    """Longest time from the first signal to the end of `installed`: then the process says where it stands and exits
    with status 1, whatever it waits for. None waits as long as it takes."""
    together: Callable[[int], int] | None = None
    """Of several ranks: the largest number that any of them gives. They stop at the same `release`, wherever the signal
    came: a rank that stopped alone would leave the others waiting."""
    _held: bool = False
    _waiting: int | None = None
    _thread: int = field(default_factory=threading.get_ident)
    """The thread that is stopped; signals always arrive in the main one."""
    _previous: dict[signal.Signals, Any] = field(default_factory=dict)

    @contextmanager
    def installed(self) -> Iterator["Stopper"]:
        """Handle the signals inside, restoring the former handlers afterwards.

        Signals are left to others where this is not the main thread, which alone may handle them.
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
        """Hold back signals: from here on the state is not whole."""
        self._held = True

    def release(self) -> None:
        """Let signals through, as the state is whole again.

        Raises StopRequested where a stop was requested in the meantime.
        """
        self._held = False
        # Not into _waiting: a signal that comes during the vote must wait for the next one, not be lost.
        asked = self._waiting if self.together is None else self.together(self._waiting or 0) or None
        if asked is not None:
            self._held = True  # what follows is the end, which is not to be interrupted
            raise StopRequested(asked)

    @property
    def is_asked(self) -> bool:
        """Tell whether a stop was requested that has not come about yet, or is under way."""
        return self._waiting is not None

    def ask(self) -> None:
        """Request a stop from any thread, as SIGTERM would. At the next `release` where signals are left to others.

        While `hold` is in force no signal is sent, which could come once somebody else handles them again.
        """
        if self._previous and not self._held:  # only a signal of the main thread ends what that waits for
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        elif self._waiting is None:
            self._waiting = signal.SIGTERM

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._waiting is not None:
            return
        self._waiting = number
        if self.shutdown_timeout is not None:  # a thread of C: it fires even where Python itself is stuck
            faulthandler.dump_traceback_later(self.shutdown_timeout, exit=True, file=sys.__stderr__ or sys.stderr)
        # Outside of held sections, raise in the thread that trains
        if not self._held and self.together is None:
            self._held = True  # the save that follows is not to be interrupted
            if self._thread == threading.get_ident():
                raise StopRequested(number)
            kind = KINDS[signal.Signals(number)]
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(kind))

    def run_apart(self, work: Callable[[], T]) -> T:
        """Return what `work` does in a thread of its own, stopped by the signals that arrive here."""
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1, "covey-run") as threads, self.installed():
            self._thread = threads.submit(threading.get_ident).result()
            return threads.submit(work).result()


def is_in_event_loop() -> bool:
    """Check that an event loop runs in this thread, as in the cell of a notebook: another cannot run in it."""
    from asyncio import get_running_loop  # takes as long as all else that the command needs for its help

    try:
        get_running_loop()
    except RuntimeError:
        return False
    return True


def outside_of_loops(work: Callable[[], T]) -> T:
    """Return what `work` does, in a thread of its own where an event loop runs in this one."""
    if not is_in_event_loop():
        return work()
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


def quiet_event_loop() -> "asyncio.AbstractEventLoop":
    """Make a loop that reports no tasks that a signal stopped: who stopped the run knows."""
    from asyncio import new_event_loop

    loop = new_event_loop()

    def report(loop: "asyncio.AbstractEventLoop", context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), KeyboardInterrupt):
            loop.default_exception_handler(context)

    loop.set_exception_handler(report)
    return loop
