"""One GPU, looked at once: `python -m benchmarks.checks.gpu_check [--tiny] [PART ...]` from the repository.

Every part is a process of its own with a deadline, so none spoils the next. Parts that measure no time run together.
What a part found is written as it ends, as a line of JSON and into a table of Markdown, its prediction beside it. A
wrong result ends the check before anything is measured: no figure of one is worth having. A slow result, or a part past
its deadline, does not. `--limit SECONDS` bounds all parts together: later ones get what is left, or wait for another
call, which leaves out what `--done FOLDER` shows to be found. `--tiny` runs the same on a model of nothing without a
GPU, one part after the other, which tries this script and nothing else. Exit code 1 where something was wrong.
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
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

NAME = "gpu_check"
TINY_SECONDS = 120
LEAST_SECONDS = 20
"""Left of the limit: a part is not begun with less."""


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
    Part("kernels", "kernels", 90, "as plain operations; 109 us of 512 rows, 18 of 64, 13 of 32", is_timed=True),
    Part("sharing", "sharing", 120, "2 ms less of a step of 512 rows, 0.4 of 64", is_timed=True),
    Part("hybrid", "hybrid", 120, "0.8B of Qwen3.5: < 0.1 nats; training at 20 % of peak or more", is_timed=True),
    Part(
        "fits",
        "fits",
        240,
        "8 GB: 1.5B under adapters, 3B in 4 bits; 24 GB: 7B, 14B; 40 GB: 14B, 1.5B whole",
        is_timed=True,
    ),
    Part("rates", "rates", 200, "8,000 tokens/s (0.5B), 5,000 (1.5B)", is_timed=True),
    Part("fits TRL", "fits_trl", 200, "one size less than covey, or one card more", is_timed=True),
    Part("memory", "memory", 100, "within 10 % of what `covey config` tells", is_timed=True),
    Part("step", "step", 300, "13 s (0.5B), 26 to 60 s (1.5B)", is_timed=True),
    Part("against TRL", "against_trl", 300, "5 times TRL with transformers' generation or more", is_timed=True),
)


def main(argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    named = {part.name: part for part in PARTS}
    chosen = [named[name] for name in arguments.parts or named]
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"GPU_CHECK_OUT": str(arguments.out), "GPU_CHECK_DONE": str(arguments.done or arguments.out)}
    rows: list[dict[str, Any]] = []
    chosen = [part for part in chosen if part.name not in found_before(arguments.done)]
    end = time.monotonic() + arguments.limit
    if arguments.tiny:
        importlib.import_module("benchmarks.checks.gpu_parts")  # once, before processes are forked
    for batch in batches(chosen, together=not arguments.tiny):
        left = int(end - time.monotonic())
        if left < LEAST_SECONDS:
            print(f"{', '.join(part.name for part in batch)}: left for another call", flush=True)
            continue
        batch = [replace(part, seconds=min(part.seconds, left)) for part in batch]
        for row in look_at(batch, tiny=arguments.tiny):
            rows.append(row)
            write(arguments.out, rows)
            print(f"{row['part']}: {verdict(row)} ({row['seconds']:.0f} s)", flush=True)
        wrong = [part.name for part in batch for row in rows if row["part"] == part.name and is_worthless(part, row)]
        if wrong:
            print(f"{', '.join(wrong)} wrong: no figure after it would be worth having", file=sys.stderr)
            return 1
    return int(any(row.get("right") is False for row in rows))


def found_before(folder: Path | None) -> set[str]:
    """Names of the parts that an earlier call has ended without an error."""
    file = folder / f"{NAME}.jsonl" if folder else None
    if file is None or not file.is_file():
        return set()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["part"] for row in rows if "error" not in row}


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
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds of all parts together")
    parser.add_argument("--done", type=Path, help="folder of what an earlier call found")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
