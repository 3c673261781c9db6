"""What a run is at is told every second, from the names that its waits and phases have anyway."""

import asyncio
import threading
import time
from pathlib import Path

from covey.run.records.terminal import Progress
from covey.run.records.waits import at, pulse_of
from covey.system.waits.running import Pulse
from covey.system.waits.timer import PhaseTimer
from covey.system.waits.watchdog import PromptWaits, Watchdog

LIMITS = {"timeouts.loading": 600.0, "timeouts.sampling": 600.0, "timeouts.scoring": 600.0}


class Heard(Progress):
    def __init__(self) -> None:
        self.lines: list[tuple[str, bool]] = []
        self.is_told = threading.Event()

    def waiting(self, what: str, *, in_step: bool) -> None:
        self.lines.append((what, in_step))
        self.is_told.set()


def test_the_outermost_wait_and_the_phase_say_what_a_run_is_at(tmp_path: Path) -> None:
    with Watchdog(LIMITS, tmp_path / "log") as watchdog:
        timer = PhaseTimer(watchdog=watchdog)
        me = threading.get_ident()
        assert at(timer, me) == "at work"
        with timer.phase("cold_start"):
            assert at(timer, me) == "cold start"
        with watchdog.deadline("the model m to be loaded", "timeouts.loading"):
            assert at(timer, me) == "waiting for the model m to be loaded"
        with timer.phase("evaluation"), watchdog.deadline("the engine to answer 9 prompts", "timeouts.sampling"):
            with watchdog.deadline("the engine to sample a token", "timeouts.sampling"), timer.phase("reward"):
                assert at(timer, me) == "waiting for the engine to answer 9 prompts (evaluation)"
            watchdog.progress("the engine to answer 3 prompts")
            assert at(timer, me) == "waiting for the engine to answer 3 prompts (evaluation)"
        with watchdog.deadline("the environment e to score 4 prompts", "timeouts.scoring"):
            assert at(timer, me) == "waiting for the environment e to score 4 prompts"
            with watchdog.deadline("the engine to sample a token", "timeouts.sampling"):
                assert at(timer, me) == "waiting for the engine to sample a token"


def test_another_thread_tells_it_while_the_run_is_stuck(tmp_path: Path) -> None:
    heard = Heard()
    with Watchdog(LIMITS, tmp_path / "log") as watchdog:
        timer = PhaseTimer(watchdog=watchdog)
        with pulse_of(heard, timer), timer.phase("sampling"):
            assert heard.is_told.wait(60)
        assert heard.lines[0] == ("sampling", True)
        number = len(heard.lines)
        time.sleep(1.2)
        assert len(heard.lines) == number


def test_what_is_left_of_an_evaluation_is_told(tmp_path: Path) -> None:
    async def two_prompts(waits: PromptWaits, timer: PhaseTimer) -> None:
        me = threading.get_ident()
        with waits.sampling():
            with waits.sampling():
                assert at(timer, me) == "waiting for the engine to answer 2 prompts"
            await asyncio.sleep(0)
            assert at(timer, me) == "waiting for the engine to answer 1 prompt"

    with Watchdog(LIMITS, tmp_path / "log") as watchdog:
        waits, timer = PromptWaits(watchdog), PhaseTimer(watchdog=watchdog)
        with waits.under_way(2):
            asyncio.run(two_prompts(waits, timer))


def test_a_pulse_counts_the_seconds_and_ends_with_what_it_stands_beside() -> None:
    beats: list[float] = []
    done = threading.Event()

    def beat(seconds: float) -> None:
        beats.append(seconds)
        if len(beats) == 3:
            done.set()

    with Pulse(beat, 0.01):
        assert done.wait(60)
    number = len(beats)
    assert beats == sorted(beats)
    assert beats[2] >= 0.03
    time.sleep(0.05)
    assert len(beats) == number
