"""Make wrong edits one at a time and see that the tests find them: `python -m tests.mutants.run [--only WORD ...]`.

Everything happens in copies of the repository. The tests of a mutant are run without it first, and it counts as found
only if they pass without and one of them fails with it. The exit status is 0 if all are found.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from .catalogue import CATALOGUE, ROOT, Mutant, mutated, read_catalogue

WORKER = Path(__file__).with_name("worker.py")
LIBRARIES = (
    "pytest",
    "torch",
    "torch.distributed",
    "torch.utils.checkpoint",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.bert.modeling_bert",
    "safetensors.torch",
    "peft",
    "omegaconf",
    "hydra",
)
"""What takes seconds to import and is the same for every mutant."""
NOT_COPIED = shutil.ignore_patterns(".*", "outputs", "multirun", "build", "dist", "wandb", "*.egg-info")
OPTIONS = (
    "-x",
    "-q",
    "-rfE",
    "--tb=line",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "--timeout=120",
    "-m",
    "not slow and not long",
)
PASSED, FAILED = 0, 1
BROKEN = re.compile(r"\b(NameError|ImportError|ModuleNotFoundError|UnboundLocalError|SyntaxError)\b")
"""An edit that leaves such code behind is not plausible: any test would find it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tests said of a mutant."""

    mutant: Mutant
    is_found: bool
    said: str
    """The test that found it, else what is wrong."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """How a run of pytest ended."""

    status: int
    output: str

    @property
    def first_failure(self) -> str:
        """The test that failed first, with its message; empty where none did."""
        found = re.search(r"^(?:FAILED|ERROR) (.+)$", self.output, re.MULTILINE)
        return found[1] if found else ""


class Worker:
    """A copy of the repository, and a process that runs tests there."""

    def __init__(self, root: Path, folder: Path, libraries: Sequence[str]) -> None:
        shutil.copytree(root, folder, ignore=NOT_COPIED, symlinks=True)
        self._folder = folder
        self._edits = itertools.count(1)
        threads = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), *libraries],
            cwd=folder,
            env=os.environ | threads | {"PYTHONPATH": str(folder / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tests: Sequence[str]) -> Run:
        """Run tests on the copy as it is."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([*OPTIONS, *tests]) + "\n")
        self._process.stdin.flush()
        return Run(**json.loads(self._process.stdout.readline()))

    @contextmanager
    def edited(self, mutant: Mutant) -> Iterator[None]:
        """Change the copy. Bytecode is valid for a time in seconds and a size, so each edit gets a time of its own."""
        path = mutant.path(self._folder)
        text, before = path.read_text(encoding="utf-8"), path.stat()
        path.write_text(mutated(text, mutant), encoding="utf-8")
        later = int(before.st_mtime) + next(self._edits)
        os.utime(path, (later, later))
        try:
            yield
        finally:
            path.write_text(text, encoding="utf-8")
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Workers:
    """Several of them, each taken by one thread at a time."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._free: Queue[Worker] = Queue()
        for worker in self._workers:
            self._free.put(worker)

    @contextmanager
    def taken(self) -> Iterator[Worker]:
        worker = self._free.get()
        try:
            yield worker
        finally:
            self._free.put(worker)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def judged(workers: Workers, mutant: Mutant, before: Run) -> Verdict:
    """Return whether the tests find a mutant; `before` is how they ended without it."""
    started = time.monotonic()
    if before.status != PASSED:
        why = before.first_failure or f"pytest exits with {before.status}: {before.output[-300:]}"
        return Verdict(mutant, False, f"its tests fail without it: {why}", 0.0)
    with workers.taken() as worker, worker.edited(mutant):
        run = worker.run(mutant.tests)
    seconds = time.monotonic() - started
    if run.status == PASSED:
        return Verdict(mutant, False, "SURVIVED", seconds)
    if run.status != FAILED or BROKEN.search(run.first_failure):
        why = run.first_failure or run.output[-300:]
        return Verdict(mutant, False, f"broken, pytest exits with {run.status}: {why}", seconds)
    return Verdict(mutant, True, run.first_failure, seconds)


def judge_all(root: Path, mutants: Sequence[Mutant], number: int, libraries: Sequence[str]) -> list[Verdict]:
    """Judge every mutant with so many workers, telling of each as it is done."""
    selections = list(dict.fromkeys(mutant.tests for mutant in mutants))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="covey-mutants-")))
        workers = Workers([Worker(root, folder / str(index), libraries) for index in range(number)])
        stack.callback(workers.close)
        threads = stack.enter_context(ThreadPoolExecutor(number))

        def unmutated(tests: tuple[str, ...]) -> Run:
            with workers.taken() as worker:
                return worker.run(tests)

        def judge(mutant: Mutant) -> Verdict:
            verdict = judged(workers, mutant, before[mutant.tests])
            print(line(verdict), flush=True)
            return verdict

        before = dict(zip(selections, threads.map(unmutated, selections), strict=True))
        return list(threads.map(judge, mutants))


def line(verdict: Verdict) -> str:
    mark = "found " if verdict.is_found else "MISSED"
    return f"{mark} {verdict.seconds:5.1f} s  {verdict.mutant.area}: {verdict.mutant.name}  <- {verdict.said[:160]}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="mutants whose area, file or name holds one"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="copies that are worked on at a time")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    parser.add_argument("--catalogue", type=Path, default=CATALOGUE, help=argparse.SUPPRESS)
    parser.add_argument("--libraries", nargs="*", default=LIBRARIES, help=argparse.SUPPRESS)
    chosen = parser.parse_args(words)
    catalogue = read_catalogue(chosen.catalogue)
    mutants = [m for m in catalogue if any(word in f"{m.area}: {m.file}: {m.name}" for word in chosen.only)]
    started = time.monotonic()
    verdicts = judge_all(chosen.root, mutants, chosen.jobs, chosen.libraries)
    missed = [verdict for verdict in verdicts if not verdict.is_found]
    print(f"\n{len(verdicts)} mutants, {len(missed)} not found, {time.monotonic() - started:.0f} s")
    for verdict in missed:
        print(f"{line(verdict)}\n    {verdict.mutant.file}: {verdict.mutant.old}  ->  {verdict.mutant.new}")
    return 1 if missed or not verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
