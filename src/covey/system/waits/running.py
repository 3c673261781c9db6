"""Time for deadlines without stops of this process, and a regular beat."""

import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Self

BEAT_SECONDS, STOPPED_SECONDS = 0.5, 2.0
"""Seconds between beats, and the least pause that shows a stop."""


class RunningClock:
    """Monotonic seconds without those of stops (Ctrl-Z, SIGSTOP)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._beat, self._stopped = time.monotonic(), 0.0
        Pulse(lambda seconds: self(), BEAT_SECONDS).__enter__()

    def __call__(self) -> float:
        # Whoever looks first after a stop counts it, the heart or a deadline
        with self._lock:
            now, before = time.monotonic(), self._beat
            self._beat = now
            self._stopped += (now - before) * (now - before > STOPPED_SECONDS)
            return now - self._stopped


running_clock = cache(RunningClock)
"""Returns the clock of this process."""


def set_alarm(seconds: float, ring: Callable[[], None]) -> Callable[[], bool]:
    """Call `ring` after `seconds` of running; return a function that cancels it."""
    clock, is_over, first = running_clock(), threading.Event(), threading.Lock()
    until = clock() + seconds

    def wait() -> None:
        while (left := until - clock()) > 0 and not is_over.wait(min(left, BEAT_SECONDS)):
            pass
        if first.acquire(blocking=False):
            ring()

    def cancel() -> bool:
        has_cancelled = first.acquire(blocking=False)
        is_over.set()
        return has_cancelled

    threading.Thread(target=wait, name="covey-alarm", daemon=True).start()
    return cancel


class Pulse:
    """Calls `beat` with the elapsed seconds, regularly, from its own thread.

    A context manager. Code in C that holds the interpreter holds the beat as well.

    >>> with Pulse(lambda seconds: print(f"importing, {seconds:.0f} s"), 9.0):
    ...     import torch
    """

    def __init__(self, beat: Callable[[float], object], seconds: float) -> None:
        self._beat, self._seconds = beat, seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="covey-pulse", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _go_on(self) -> None:
        began = time.monotonic()
        while not self._stopped.wait(self._seconds):
            self._beat(time.monotonic() - began)
