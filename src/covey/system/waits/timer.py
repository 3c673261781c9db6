"""Seconds by named phase, measured exclusively."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from covey.system.waits.watchdog import Watchdog

PHASES = (
    *("judge", "cold_start", "preflight", "samplers", "sampling", "reward", "logprobs", "backward", "optimizer"),
    "evaluation",
)
"""Phases of a training run; time outside of them is "other"."""


@dataclass
class PhaseTimer:
    """Seconds spent in each phase, at most the wall clock in total.

    A phase inside another pauses it. A timer belongs to one thread; it does not follow tasks or threads.

    >>> timer = PhaseTimer()
    >>> with timer.phase("sampling"):
    ...     with timer.phase("reward"):
    ...         pass
    >>> sorted(timer.seconds)
    ['reward', 'sampling']
    """

    clock: Callable[[], float] = time.monotonic
    """Seconds from any origin, never going back."""
    watchdog: Watchdog = field(default_factory=Watchdog)
    """Takes every change of phase for progress; timed code can name its waits to it."""
    _totals: dict[str, float] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)
    _since: float = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the block's time to `name`, without phases inside."""
        self._charge()
        self.watchdog.progress()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            assert self._open.pop() == name, f"phase {name} closed out of order"

    def charge(self, name: str, seconds: float) -> None:
        """Move seconds measured elsewhere from the open phase to `name`.

        For work that overlaps its phase, such as rewards computed while other completions are sampled.
        """
        self._charge()
        if self._open:
            here = self._open[-1]
            seconds = min(seconds, self._totals[here])
            self._totals[here] -= seconds
        self._totals[name] = self._totals.get(name, 0.0) + seconds

    @property
    def outermost(self) -> str | None:
        """Return the open phase that is inside no other."""
        return next(iter(self._open), None)

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase, the open one included."""
        self._charge()
        return dict(self._totals)

    def _charge(self) -> None:
        """Charge the time since the last change to the innermost phase."""
        now = self.clock()
        if self._open:
            name = self._open[-1]
            self._totals[name] = self._totals.get(name, 0.0) + now - self._since
        self._since = now
