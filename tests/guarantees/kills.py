"""Runs with slow rewards that are killed at random moments, and what of their sampling was lost.

OMP_NUM_THREADS=1 python -m tests.guarantees.kills journal        prints a row of the table of docs/trust/reliability.md
OMP_NUM_THREADS=1 python -m tests.guarantees.kills checkpoints    the other
"""

import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Call:
    """A call of the reward, and its seconds until it had answered or was killed."""

    key: int
    seconds: float
    is_whole: bool


def calls_in(file: Path, killed: float) -> list[Call]:
    """The calls of one life of a run, which ended then."""
    begun: dict[int, float] = {}
    found: list[Call] = []
    for kind, key, at in (line.split() for line in file.read_text().splitlines()):
        if kind == "begin":
            begun[int(key)] = float(at)
        else:
            found.append(Call(int(key), float(at) - begun.pop(int(key)), is_whole=True))
    return found + [Call(key, killed - at, is_whole=False) for key, at in begun.items()]


def seconds_lost(lives: Sequence[Sequence[Call]], whole: Sequence[Call]) -> list[float]:
    """Seconds of scoring lost in each life: of calls that were cut, or made once more than in the whole run."""
    again = Counter(call.key for life in lives for call in life if call.is_whole)
    again.subtract(call.key for call in whole)
    lost = []
    for life in lives:
        seconds = 0.0
        for call in life:
            if not call.is_whole or again[call.key] > 0:
                seconds += call.seconds
                again[call.key] -= call.is_whole
        lost.append(seconds)
    assert sum(again.values()) == 0, "every call of the whole run was made"
    return lost


def prepare_slow(folder: Path) -> None:
    prepare(folder)
    (folder / "slow_reward.py").write_text(SLOW_REWARDS)


def options(folder: Path, name: str, life: int, scale: float) -> dict[str, Any]:
    return {"environment": {"CALLS": str(folder / f"{name}.{life}.calls"), "REWARD_SCALE": scale}}


def reference(folder: Path, words: Sequence[str] = ()) -> tuple[str, list[Call]]:
    """Fingerprint and calls of the run that nobody killed; its rewards take no time, which changes no number."""
    finish_well(new_run(folder, "whole", *words, settings=SLOW, **options(folder, "whole", 0, 0.0)))
    return fingerprint(folder / "whole"), calls_in(folder / "whole.0.calls", 0.0)


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
) -> list[list[Call]]:
    """The lives of a run that is killed so many times, each within `most` seconds of its first call, and then ends.

    Without a journal the first kill comes after the first checkpoint, for a run that has none begins anew.
    """
    generator, lives = random.Random(seed), list[list[Call]]()
    while True:
        life, how = len(lives), options(folder, name, len(lives), scale)
        log = Path(how["environment"]["CALLS"])
        process = resume(folder, name, **how) if lives else new_run(folder, name, *words, settings=SLOW, **how)
        pause = generator.uniform(0.0, most)
        if life == num_kills or not (wait_until(begins(log, folder / name, words), process) and waits(pause, process)):
            finish_well(process)
            return [*lives, calls_in(log, 0.0)]
        killed = kill(process)
        lives.append(calls_in(log, killed))


def begins(log: Path, run: Path, words: Sequence[str]) -> Callable[[], bool]:
    """Whether a life has called the reward, in a run that can be resumed."""
    return lambda: log.exists() and ("output.journal=false" not in words or saved_step(run) > 0)


def waits(seconds: float, process: Process) -> bool:
    """Wait so long; False where the process has ended before."""
    until = time.monotonic() + seconds
    return wait_until(lambda: time.monotonic() >= until, process)


KEPT_BY = {"journal": (), "checkpoints": ("output.journal=false",)}
MEASURED = ("num_steps=40", "output.save_every=2")
"""100 s of rewards, and a checkpoint after each 5 s of them."""


def main() -> None:
    """Print seconds of scoring lost at each of 20 kills, with the journal or by checkpoints alone."""
    name = sys.argv[1]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        prepare_slow(folder)
        whole, calls = reference(folder, MEASURED)
        lives = killed_run(folder, name, 20, 0, (*MEASURED, *KEPT_BY[name]), most=8.0)
        *lost, _ = seconds_lost(lives, calls)
        print(f"{name}: {len(lost)} kills, seconds lost {[round(one, 2) for one in lost]}")
        print(f"median {median(lost):.2f} s, most {max(lost):.2f} s, sum {sum(lost):.1f} s")
        print(f"the same run: {fingerprint(folder / name) == whole}")


if __name__ == "__main__":
    main()
