"""Runs with slow rewards that are killed at random moments, and what of their sampling was lost.

OMP_NUM_THREADS=1 python -m tests.guarantees.kills    prints the table of docs/trust/reliability.md
"""

import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ..support.processes import are_gone, descendants
from .runs import SETTINGS, Process, fingerprint, finish_well, new_run, prepare, resume, saved_step, wait_until

SLOW_REWARDS = '''
import os, time, zlib

def note(text):
    with open(os.environ["CALLS"], "a") as file:
        file.write(text)

def slow(prompts, completions, **columns):
    """Takes 0.5 to 2 s, as the completions say, and notes when it is asked and when it has answered."""
    key = zlib.crc32(repr((prompts, completions)).encode())
    note(f"begin {key} {time.time()}\\\\n")
    time.sleep((0.5 + 1.5 * (key % 1000) / 1000) * float(os.environ["REWARD_SCALE"]))
    note(f"end {key} {time.time()}\\\\n")
    return [sum(text.encode()) % 5 / 4 for text in completions]
'''.replace("\\\\n", "\\n")
NUM_STEPS = 12
SLOW = (
    *(word for word in SETTINGS if not word.startswith(("rewards", "num_steps", "evaluation.every"))),
    *("rewards=[slow_reward:slow]", f"num_steps={NUM_STEPS}", "evaluation.every=6", "preflight.enabled=false"),
)


@dataclass
class Calls:
    """The calls of the reward in one life of a run."""

    begun: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)

    @staticmethod
    def of(file: Path) -> "Calls":
        found = Calls()
        for kind, key, at in (line.split() for line in file.read_text().splitlines()) if file.exists() else ():
            (found.begun if kind == "begin" else found.ended)[int(key)] = float(at)
        return found


@dataclass(frozen=True)
class Life:
    """One life of a run, and the seconds at which it was killed."""

    calls: Calls
    killed: float | None

    def lost(self, later: Sequence["Life"]) -> float:
        """Seconds of scoring that later lives had to do again: of calls that had ended or were under way."""
        again = {key for life in later for key in life.calls.begun}
        until = {key: self.calls.ended.get(key, self.killed or 0.0) for key in self.calls.begun}
        return sum(end - self.calls.begun[key] for key, end in until.items() if key in again)


def prepare_slow(folder: Path) -> None:
    prepare(folder)
    (folder / "slow_reward.py").write_text(SLOW_REWARDS)


def options(folder: Path, name: str, life: int, scale: float) -> dict[str, Any]:
    return {"environment": {"CALLS": str(folder / f"{name}.{life}.calls"), "REWARD_SCALE": scale}}


def reference(folder: Path, words: Sequence[str] = ()) -> str:
    """The fingerprint of the run that nobody killed; its rewards take no time, which changes no number."""
    finish_well(new_run(folder, "whole", *words, settings=SLOW, **options(folder, "whole", 0, 0.0)))
    return fingerprint(folder / "whole")


def kill(process: Process) -> float:
    """SIGKILL to the run and all that it has started; the time of it."""
    family = descendants(process.pid)
    process.send_signal(signal.SIGKILL)
    at = time.time()
    process.communicate(timeout=60)
    assert are_gone(family)
    return at


def killed_run(
    folder: Path, name: str, num_kills: int, seed: int, words: Sequence[str] = (), scale: float = 1.0, most: float = 4.0
) -> list[Life]:
    """The lives of a run that is killed so many times, each within `most` seconds of its first call, and then ends.

    Without a journal the first kill comes after the first checkpoint, for a run that has none begins anew.
    """
    generator, lives = random.Random(seed), list[Life]()
    while True:
        life, how = len(lives), options(folder, name, len(lives), scale)
        log = Path(how["environment"]["CALLS"])
        process = resume(folder, name, **how) if lives else new_run(folder, name, *words, settings=SLOW, **how)
        pause = generator.uniform(0.0, most)
        if life == num_kills or not (wait_until(begins(log, folder / name, words), process) and waits(pause, process)):
            finish_well(process)
            return [*lives, Life(Calls.of(log), None)]
        killed = kill(process)
        lives.append(Life(Calls.of(log), killed))


def begins(log: Path, run: Path, words: Sequence[str]) -> Callable[[], bool]:
    """Whether a life has called the reward, in a run that can be resumed."""
    return lambda: log.exists() and ("output.journal=false" not in words or saved_step(run) > 0)


def waits(seconds: float, process: Process) -> bool:
    """Wait so long; False where the process has ended before."""
    until = time.monotonic() + seconds
    return wait_until(lambda: time.monotonic() >= until, process)


def main() -> None:
    """Print seconds of scoring lost at each of 20 kills, with the journal and by checkpoints alone."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        prepare_slow(folder)
        long = ("num_steps=100",)
        whole = reference(folder, long)
        for name, words in {"journal": (), "checkpoints": ("output.journal=false",)}.items():
            lives = killed_run(folder, name, 20, 0, (*long, *words), most=20.0)
            lost = [life.lost(lives[number + 1 :]) for number, life in enumerate(lives[:-1])]
            print(f"{name}: {len(lost)} kills, seconds lost {[round(one, 2) for one in lost]}")
            print(f"median {median(lost):.2f} s, most {max(lost):.2f} s, sum {sum(lost):.1f} s")
            print(f"the same run: {fingerprint(folder / name) == whole}")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
