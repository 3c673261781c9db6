"""The judge's own time limit: hostile values can make even trusted code slow (sets of numbers with one hash)."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

HARD_FACTOR = 3
"""C code that never returns to the interpreter is ended by the kernel, and the judge with it."""


class TooSlow(BaseException):
    """Judging took too long; no `except Exception` of a test is to catch it."""


@contextmanager
def limited(cpu_seconds: float) -> Iterator[None]:
    """The block raises TooSlow after that much CPU time of this process; waiting for a program takes none."""
    signal.signal(signal.SIGVTALRM, _stop)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds * HARD_FACTOR)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooSlow
