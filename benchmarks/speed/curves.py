"""How the time of a step grows with each axis, for covey and for TRL."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.speed.cases import FEW_256, best_trl, step
from benchmarks.speed.contest import contest
from benchmarks.speed.report import circumstances, save
from benchmarks.speed.table import figures
from benchmarks.speed.workloads import Job, Workload

SIZE = "S"
AXES: dict[str, tuple[int, ...]] = {
    "prompt length": (64, 256, 1024),
    "completion length": (32, 128, 512),
    "group size": (4, 8, 16),
    "vocabulary": (512, 4096, 32768),
}
"""One axis moves at a time; the others stay at 256, 128, 8 and 512, with two prompts."""


def workload(axis: str, value: int) -> Workload:
    base = Workload(SIZE, FEW_256)
    by_axis: dict[str, dict[str, Any]] = {
        "prompt length": {"prompt_lengths": (value,) * len(FEW_256)},
        "completion length": {"completion_length": value},
        "group size": {"group_size": value},
        "vocabulary": {"vocabulary": value},
    }
    return replace(base, **by_axis[axis])


def run(num_repetitions: int, say: Callable[[str], None]) -> None:
    """Measure each point once, also where axes meet. `make figures` draws them."""
    measured: dict[Job, dict[str, Any]] = {}
    axes: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for axis, values in AXES.items():
            axes[axis] = []
            for value in values:
                job = job_of(workload(axis, value))
                if job not in measured:
                    jobs = {"covey": job, "trl": best_trl(job)}
                    repetitions = contest(jobs, num_repetitions, Path(folder) / "models", Path(folder) / "logs")
                    measured[job] = figures(repetitions, "seconds")
                axes[axis].append({"value": value, **measured[job]})
                say(f"{axis} {value}: {measured[job]['ratio']['median']:.2f}x")
    content = {"circumstances": circumstances(), "axes": axes}
    save("curves", content)


def job_of(work: Workload) -> Job:
    """A vocabulary of its own is the default one where it is no other, so that points are recognised."""
    default = work.vocabulary == Workload(SIZE, ()).shape.vocabulary
    return replace(step(SIZE, FEW_256), workload=replace(work, vocabulary=None) if default else work)
