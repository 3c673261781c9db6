"""The waits of a run: deadlines and messages."""

import threading
from dataclasses import asdict
from pathlib import Path

from covey.config.schema import TimeoutsConfig
from covey.run.records.terminal import Progress
from covey.system import collectives
from covey.system.ranks import log_name
from covey.system.waits.running import Pulse
from covey.system.waits.timer import PhaseTimer
from covey.system.waits.watchdog import Watchdog

BEAT_SECONDS = 1.0
OF_STEPS = ("sampling", "reward", "logprobs", "backward", "optimizer")
"""Phases that are outermost in a step alone."""


def make_watchdog(timeouts: TimeoutsConfig, folder: Path) -> Watchdog:
    """Make the watchdog with every deadline and this process's name."""
    limits = {f"timeouts.{name}": seconds for name, seconds in asdict(timeouts).items()}
    who = f"rank {collectives.rank()}" if collectives.is_distributed() else "the run"
    return Watchdog(limits, folder / log_name(collectives.rank()), who)


def pulse_of(progress: Progress, timer: PhaseTimer) -> Pulse:
    """Make the thread that shows this thread's wait, every second."""
    show, thread = progress.waiting, threading.get_ident()
    return Pulse(lambda seconds: show(at(timer, thread), in_step=timer.outermost in OF_STEPS), BEAT_SECONDS)


def at(timer: PhaseTimer, thread: int) -> str:
    """Describe a thread's wait.

    >>> at(timer, threading.get_ident())
    'waiting for the engine to answer 31 prompts (evaluation)'
    """
    wait, phase = timer.watchdog.waited_for(thread), (timer.outermost or "").replace("_", " ")
    if wait is None:
        return phase or "at work"
    return f"waiting for {wait}" + (f" ({phase})" if phase and phase not in wait else "")
