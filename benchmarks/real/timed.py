"""`covey train` for so many seconds, and what came of it.

    python -m benchmarks.real.timed NAME SECONDS FOLDER recipe=gsm8k model.name=MODEL data.path=ROWS
    python -m benchmarks.real.timed NAME FOLDER        # of a run that has ended

The run ends after the step that is under way, evaluated and saved; the seconds are those of steps, without loading,
preflight and evaluations. A folder that holds a run is resumed for so many seconds more. What it found is printed, and
kept in benchmarks/results/real_runs.json under its name: before, after and gain with intervals, rewards, seconds of a
step, sampled tokens a second from end to end, memory of the process (of the device where there is one).
"""

# ruff: noqa: E402

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from covey.system import machine

machine.prepare()  # before torch is imported

from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from benchmarks.demo import runs
from benchmarks.demo.runs import estimate, read_run
from covey.config import compose
from covey.config.schema import Config
from covey.config.shelves import CONF
from covey.loop import train
from covey.run.given import RunObjects
from covey.run.records.callbacks import Callback, StopTraining

RESULTS = Path(__file__).resolve().parents[1] / "results" / "real_runs.json"
KEPT = ("before", "after", "gain", "steps", "seconds", "phases", "tokens_per_second", "peak_memory_bytes", "versions")


class StopAfter(Callback):
    """Ends the run once its steps have taken so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.spent = seconds, 0.0

    def on_step(self, step: int, metrics: dict[str, float | None]) -> None:
        self.spent += metrics["seconds"] or 0.0
        if self.spent >= self.seconds:
            raise StopTraining(f"{self.seconds:.0f} s of training are over")


def composed(words: Sequence[str]) -> Config:
    """Return the settings that words of the command mean."""
    compose.register()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return compose.to_config(hydra_compose("config", overrides=list(words)))


def summary(folder: Path) -> dict[str, Any]:
    """Return what a finished run shows in a table."""
    content, _, steps = read_run(folder)
    seconds = [row["seconds"] for row in steps]
    kept = (
        "before",
        "after",
        "gain",
        "steps",
        "seconds",
        "phases",
        "tokens_per_second",
        "peak_memory_bytes",
        "versions",
    )
    return {
        **{name: content[name] for name in kept},
        "seconds_of_a_step": [median(seconds), min(seconds), max(seconds)],
        "machine": runs.machine(),
        "curve": {name: [row.get(name) for row in steps] for name in ("sampled_reward_mean", "loss", "kl", "entropy")},
    }


def main(argv: Sequence[str]) -> int:
    name, *rest = argv
    folder = Path(rest[0] if len(rest) == 1 else rest[1])
    if len(rest) > 1:
        config = composed(rest[2:])
        if (folder / "checkpoints").is_dir():
            config.resume = str(folder)
        began = time.perf_counter()
        train(config, folder, RunObjects(callbacks=[StopAfter(float(rest[0]))]))
        print(f"{time.perf_counter() - began:.0f} s in all")
    found = summary(folder)
    print(json.dumps(found))
    for part in ("reward_mean", "accuracy"):
        before, after, gain = (found[when].get(part) if found[when] else None for when in ("before", "after", "gain"))
        if before and after and gain:
            print(f"{part}: {estimate(before)} before, {estimate(after)} after, {estimate(gain, '+')}")
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    results[name] = found
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
