"""The waits of a run: how long they may be, and what is said meanwhile."""

import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path

from covey.config.schema import Config
from covey.run.records.terminal import Progress
from covey.system import collectives
from covey.system.ranks import log_name
from covey.system.waits.timer import PhaseTimer
from covey.system.waits.watchdog import Watchdog

BEAT_SECONDS = 1.0
OF_STEPS = ("sampling", "reward", "logprobs", "backward", "optimizer")
"""Phases that are outermost in a step alone."""


def make_watchdog(config: Config, folder: Path) -> Watchdog:
    """Make the watchdog with every deadline and this process' name, to be entered."""
    limits = {f"timeouts.{name}": seconds for name, seconds in asdict(config.timeouts).items()}
    who = f"rank {collectives.rank()}" if collectives.is_distributed() else "the run"
    return Watchdog(limits, folder / log_name(collectives.rank()), who)


@dataclass
class Pulse:
    """Tells what shows a run, every second, what is waited for: waits have names, so none needs a line of its own."""

    progress: Progress
    timer: PhaseTimer
    _of: int = field(default_factory=threading.get_ident)
    """The thread that trains."""
    _stopped: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._beat, name="covey-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            self.progress.waiting(self.what, in_step=self.timer.outermost in OF_STEPS)

    @property
    def what(self) -> str:
        """Say what the run is at.

        >>> pulse.what
        'waiting for the engine to answer 31 prompts (evaluation)'
        """
        wait, phase = self.timer.watchdog.waited_for(self._of), (self.timer.outermost or "").replace("_", " ")
        if wait is None:
            return phase or "at work"
        return f"waiting for {wait}" + (f" ({phase})" if phase and phase not in wait else "")
