"""A thread that reports regularly during a long wait."""

import threading
import time
from collections.abc import Callable
from typing import Self


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
