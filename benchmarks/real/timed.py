"""`covey train` for so many seconds: the run ends after the step that is under way, evaluated and saved.

    python -m benchmarks.real.timed 480 FOLDER recipe=gsm8k model.name=MODEL data.path=ROWS

The seconds are those of steps, without loading, preflight and evaluations. A folder that holds a run is resumed for so
many seconds more. What it found is printed as one line of JSON: before, after, gain, steps, seconds of each, tokens a
second from end to end, peak memory.
"""

# ruff: noqa: E402

import json
import resource
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

from benchmarks.demo.runs import estimate, read_run
from covey.config import compose
from covey.config.schema import Config
from covey.config.shelves import CONF
from covey.run.given import Given
from covey.run.records.callbacks import Callback, StopTraining
from covey.train import train


class StopAfter(Callback):
    """Ends the run once its steps have taken so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.spent, self.began = seconds, 0.0, 0.0

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
    tokens = sum(row["tokens_per_second"] * row["seconds"] for row in steps)
    return {
        "steps": len(steps),
        "seconds_of_a_step": [median(seconds), min(seconds), max(seconds)],
        "seconds_of_training": sum(seconds),
        "sampled_tokens_per_second": tokens / sum(seconds),
        "rewards": [round(row["reward_mean"], 4) for row in steps],
        "peak_gb": peak_bytes() / 1e9,
        **{name: content[name] for name in ("before", "after", "gain")},
    }


def peak_bytes() -> int:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(argv: Sequence[str]) -> int:
    seconds, folder, *words = argv
    config = composed(words)
    if (Path(folder) / "checkpoints").is_dir():
        config.resume = folder
    began = time.perf_counter()
    train(config, Path(folder), Given(callbacks=[StopAfter(float(seconds))]))
    found = {**summary(Path(folder)), "seconds_in_all": time.perf_counter() - began}
    print(json.dumps(found))
    for name in ("reward_mean", "accuracy"):
        if found["gain"].get(name):
            print(
                name, *(estimate(found[when][name]) for when in ("before", "after")), estimate(found["gain"][name], "+")
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
