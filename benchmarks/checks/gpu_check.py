"""One GPU, looked at once: `python -m benchmarks.checks.gpu_check [--tiny] [PART ...]` from the repository.

Every part is a process of its own with a deadline, so none spoils the next. Parts that measure no time run together.
What a part found is written as it ends, as a line of JSON and into a table of Markdown, its prediction beside it. A
wrong result ends the check before anything is measured: no figure of one is worth having. A slow result, or a part past
its deadline, does not. `--tiny` runs the same on a model of nothing without a GPU, one part after the other, which
tries this script and nothing else. Exit code 1 where something was wrong.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

NAME = "gpu_check"
TINY_SECONDS = 120


@dataclass(frozen=True)
class Part:
    """One thing that is looked at."""

    name: str
    function: str
    """In benchmarks/checks/gpu_parts.py."""
    seconds: int
    """Its deadline; a quiet machine needs about half."""
    prediction: str
    """What is expected of an H100, from benchmarks/results_gpu.md."""
    decides: bool = False
    """Whether all after it is worth nothing where it fails."""
    variables: tuple[tuple[str, str], ...] = ()
    is_timed: bool = False
    """Whether it measures time or memory, so that nothing may run beside it."""


WITHOUT_LIGER = (("GPU_CHECK_KERNELS", "torch"),)

PARTS = (
    Part("facts", "facts", 60, "about 790 TFLOP/s; 3.0 (H100) or 4.3 TB/s (H200)", is_timed=True),
    Part("exact", "exact", 120, "float32 < 1e-4 nats, < 1e-3 of the CPU's gradient; bfloat16 < 0.1", decides=True),
    Part("waits", "waits", 60, "at most 2 a decode step, 10 a micro-batch"),
    Part("guarantees", "guarantees", 120, "float64 < 1e-9, float32 < 1e-5 and 1e-4 nats, bfloat16 < 0.1", decides=True),
    Part("crashes", "crashes", 120, "every step ends", decides=True),
    Part("quantised", "quantised", 90, "4 bits: gradient within 0.6; 8-bit AdamW within 0.1", decides=True),
    Part("learns", "learns", 180, "reward rises; resumed to the same bits, with model.deterministic", decides=True),
    Part("decode", "decode", 150, "8 to 10 ms at 512 rows, below 4 at 32; 50 % of the floor or more", is_timed=True),
    Part("training", "training", 200, "new shapes cost what known ones do; 40 % of peak or more", is_timed=True),
    Part(
        "decode without Liger", "decode", 100, "slower: a norm is six kernels", variables=WITHOUT_LIGER, is_timed=True
    ),
    Part("training without Liger", "training", 80, "slower: more passes", variables=WITHOUT_LIGER, is_timed=True),
    Part("memory", "memory", 100, "within 10 % of what `covey config` tells", is_timed=True),
    Part("step", "step", 300, "13 s (0.5B), 26 to 60 s (1.5B)", is_timed=True),
    Part("against TRL", "against_trl", 300, "5 times TRL with transformers' generation or more", is_timed=True),
)


def main(argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    chosen = [part for part in PARTS if not arguments.parts or part.name in arguments.parts]
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    if arguments.tiny:
        importlib.import_module("benchmarks.checks.gpu_parts")  # once, before processes are forked
    for batch in batches(chosen, together=not arguments.tiny):
        for row in look_at(batch, tiny=arguments.tiny):
            rows.append(row)
            write(arguments.out, rows)
            print(f"{row['part']}: {verdict(row)} ({row['seconds']:.0f} s)", flush=True)
        wrong = [part.name for part in batch for row in rows if row["part"] == part.name and is_worthless(part, row)]
        if wrong:
            print(f"{', '.join(wrong)} wrong: no figure after it would be worth having", file=sys.stderr)
            return 1
    return int(any(row.get("right") is False for row in rows))


def batches(parts: Sequence[Part], *, together: bool) -> Iterator[list[Part]]:
    """Parts that may run at the same time: each alone, or neighbours that measure no time."""
    batch: list[Part] = []
    for part in parts:
        if batch and (not together or part.is_timed or batch[-1].is_timed):
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


def look_at(parts: Sequence[Part], *, tiny: bool) -> Iterator[dict[str, Any]]:
    """Run parts at the same time, and give what each found as it ends."""
    if len(parts) == 1:
        yield look(parts[0], tiny=tiny)
        return
    with ThreadPoolExecutor(len(parts)) as pool:
        yield from (done.result() for done in as_completed([pool.submit(look, part, tiny=tiny) for part in parts]))


def is_worthless(part: Part, row: dict[str, Any]) -> bool:
    """Tell whether what was found says that no figure after it counts."""
    return part.decides and not row.get("right", False) and "skipped" not in row


def look(part: Part, *, tiny: bool) -> dict[str, Any]:
    """Run a part in a process of its own until its deadline."""
    # A fork would take a device that is in use along; without one it saves the start.
    context: Any = multiprocessing.get_context("fork" if tiny else "spawn")
    mine, theirs = context.Pipe(duplex=False)
    started, deadline = time.monotonic(), min(part.seconds, TINY_SECONDS) if tiny else part.seconds
    with _variables(dict(part.variables)):
        process = context.Process(target=_run, args=(part.function, tiny, theirs))
        process.start()
    theirs.close()
    found: dict[str, Any] = {"error": f"longer than {deadline} s"}
    if mine.poll(deadline):
        try:
            found = mine.recv()
        except EOFError:
            process.join()
            found = {"error": f"ended with code {process.exitcode}"}
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    if "error" in found and part.decides:
        found["right"] = False
    return {"part": part.name, "seconds": round(time.monotonic() - started, 1), "predicted": part.prediction, **found}


def verdict(row: dict[str, Any]) -> str:
    """Say in a word how a part ended."""
    if "error" in row:
        return row["error"].strip().splitlines()[-1]
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    if row.get("right") is False:
        return "WRONG"
    return {True: "as predicted", False: "not as predicted", None: "right" if row.get("right") else "seen"}[
        row.get("good")
    ]


def write(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the lines and the table anew."""
    (folder / f"{NAME}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    lines = ["| part | verdict | predicted | found | seconds |", "|---|---|---|---|---|"]
    for row in rows:
        figures = {k: v for k, v in row.items() if k not in ("part", "seconds", "predicted", "error", "right", "good")}
        shown = json.dumps(figures).replace("|", "/")
        lines.append(f"| {row['part']} | {verdict(row)} | {row['predicted']} | {shown} | {row['seconds']} |")
    (folder / f"{NAME}.md").write_text("\n".join(lines) + "\n")


def _run(function: str, tiny: bool, answer: Connection) -> None:
    """Compute a part and send what it found. What it prints goes to standard error."""
    os.setsid()
    with redirect_stdout(sys.stderr):
        try:
            from benchmarks.checks import gpu_parts

            answer.send(getattr(gpu_parts, function)(tiny))
        except Exception:  # a part that fails is a finding
            answer.send({"error": traceback.format_exc(limit=-12)})
    answer.close()


@contextmanager
def _variables(values: dict[str, str]) -> Any:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checks.gpu_check", description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[[], *(part.name for part in PARTS)])
    parser.add_argument("--tiny", action="store_true", help="a model of nothing, without a GPU")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder of what was found")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
