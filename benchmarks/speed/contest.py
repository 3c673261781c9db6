"""Lets contestants take turns: a process each, one step of A, one of B, one of A, ..."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.speed.ratios import Measurement, Repetition, is_clean
from benchmarks.speed.workloads import Job

ROOT = Path(__file__).resolve().parents[2]
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
STEP_LIMIT_SECONDS = 900.0
TAIL_LINES = 3

TUNED_MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
"""glibc keeps freed memory: up to 1.4x for a TRL step. covey sets the like for itself."""
SPIN = {"GOMP_SPINCOUNT": "2000"}
VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CACHE_ROOT": str(ROOT / ".cache" / "vllm"),
}
INTEL_OPENMP = {"LD_PRELOAD": str(VLLM_PYTHON.parents[2] / "lib" / "libiomp5.so"), "KMP_BLOCKTIME": "1"}
"""The library comes with the wheel."""


class WorkerFailed(RuntimeError):
    """A worker ended, or did not answer in time; the message is the end of what it wrote."""


@dataclass
class Worker:
    """A contestant in a process of its own."""

    job: Job
    log: Path

    def __enter__(self) -> "Worker":
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command(self.job),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(self.job),
                cwd=ROOT,
                text=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def ready(self) -> None:
        """Wait until the model is loaded."""
        self._answer()

    def step(self) -> Measurement:
        """One step, from the go to the report."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerFailed(self._story()) from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        alarm = threading.Timer(STEP_LIMIT_SECONDS, self._process.kill)
        alarm.start()
        try:
            line = self._process.stdout.readline()
        finally:
            alarm.cancel()
        if not line:
            raise WorkerFailed(self._story())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _story(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{self.job.contestant} ended: {' | '.join(lines[-TAIL_LINES:])}"


def command(job: Job) -> list[str]:
    """covey and TRL run in this virtual environment, vLLM in its own."""
    python = str(VLLM_PYTHON) if job.contestant == "vllm" else sys.executable
    return [python, "-m", f"benchmarks.speed.workers.{job.contestant}_worker", job.to_json()]


def environment(job: Job, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Settings the caller has made stay; covey makes its own."""
    own: dict[str, str] = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if job.contestant == "covey":
        # The sources beside this file, also where another checkout is installed.
        path = [str(ROOT / "src"), *filter(None, [inherited.get("PYTHONPATH")])]
        return {**own, **inherited, "PYTHONPATH": os.pathsep.join(path)}
    own |= SPIN
    if job.tuned_malloc:
        own |= TUNED_MALLOC
    if job.contestant == "vllm":
        own |= VLLM | {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    if job.intel_openmp:
        own |= INTEL_OPENMP
    return {**own, **inherited}


def contest(jobs: Mapping[str, Job], num_repetitions: int, models: Path, logs: Path) -> list[Repetition]:
    """`num_repetitions` clean repetitions if that takes no more than twice as many; all that were made.

    One step of each contestant first warms up and is not among them, unless memory is what counts: then the first
    step is the one, because later ones find the memory of the step before.
    """
    from benchmarks.speed.models import saved_model

    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        workers = {}
        for name, job in jobs.items():
            placed = replace(job, model_dir=saved_model(job.workload, models))
            workers[name] = stack.enter_context(Worker(placed, logs / f"{name}.log"))
            workers[name].ready()  # one after the other: start-up must not disturb
        first = {name: worker.step() for name, worker in workers.items()}
        if any(job.phase == "training" for job in jobs.values()):
            return [with_peaks(repetition, first) for repetition in rounds(workers, num_repetitions)]
        return rounds(workers, num_repetitions)


def rounds(workers: Mapping[str, Worker], num_wanted: int) -> list[Repetition]:
    made: list[Repetition] = []
    num_clean = 0
    while num_clean < num_wanted and len(made) < 2 * num_wanted:
        made.append({name: worker.step() for name, worker in workers.items()})
        num_clean += all(map(is_clean, made[-1].values()))
    return made


def with_peaks(repetition: Repetition, first: Repetition) -> Repetition:
    """The repetition with the peak memory of the first step."""
    return {name: {**found, "peak_bytes": first[name]["peak_bytes"]} for name, found in repetition.items()}


def has_vllm(jobs: Sequence[Job]) -> bool:
    """False where a job needs vLLM and its virtual environment is not there."""
    return VLLM_PYTHON.exists() or not any(job.contestant == "vllm" for job in jobs)
