"""Time for deadlines: without stops of this process (Ctrl-Z, SIGSTOP)."""

import threading
import time
from collections.abc import Callable
from functools import cache

from covey.system.waits.timer import Pulse

BEAT_SECONDS, STOPPED_SECONDS = 0.5, 2.0
"""Seconds between beats, and the least pause that shows a stop."""


class RunningClock:
    """Monotonic seconds without those of stops."""

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
    """Call `ring` after `seconds` of running; return what cancels it."""
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
