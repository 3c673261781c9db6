"""What does sampling in processes of its own cost, and what does streaming save? Runs of the command, in turns.

    python -m benchmarks.scale.async_overhead              # ten minutes; writes async_overhead.md beside it

Overhead: `recipe=arithmetic`, whose rewards are instant, in process and with one sampler and max_staleness=0: the same
work in the same order, so that what is longer is the way there and back. Streaming: rewards that wait for something
else than this machine, an exponential time for each prompt, with and without `streaming=true`.
Seconds are those of a step in metrics.jsonl, the first FIRST steps left out.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

PAGE = Path(__file__).resolve().parent / "async_overhead.md"
POLL_SECONDS = 0.1
FIRST = 5
"""Steps in which caches fill and samplers start."""
MEAN_SECONDS = 0.5
"""Of a reward that waits."""
WAITING = f"""
import asyncio, random

async def waits(prompts, completions, **columns):
    await asyncio.sleep(random.Random(prompts[0]).expovariate(1 / {MEAN_SECONDS}))
    return [sum(text.encode()) % 5 / 4 for text in completions]
"""
COMMON = ("preflight.enabled=false", "output.progress=false", "output.report=false", "evaluation.num_prompts=8")
SUMS = ("recipe=arithmetic", "cold_start.num_steps=40", "cold_start.target_accuracy=null")
ROWS = (
    *("environment=reward_functions", "rewards=[waiting_reward:waits]", "environment.in_process=true"),
    *("data.path=rows.jsonl", "sampling.max_tokens=32", "groups_per_step=16", "group_size=8"),
)
SYNCHRONOUS = ("source=ray", "max_staleness=0")
RAY = (*SYNCHRONOUS, "devices.sampler=1")
IN_PLACE = (*SYNCHRONOUS, "devices.sampler=0")
TWO = (*SYNCHRONOUS, "devices.sampler=2")
LARGER = (*SUMS, "model.nano_hidden_size=256", "model.nano_num_layers=6")
LONGER = (*LARGER, "groups_per_step=128")
CASES: dict[str, tuple[str, ...]] = {
    "local": SUMS,
    "ray": (*SUMS, *RAY),
    "local, larger": LARGER,
    "ray, larger": (*LARGER, *RAY),
    "local, longer steps": LONGER,
    "ray, longer steps": (*LONGER, *RAY),
    "ray, in place": (*SUMS, *IN_PLACE),
    "ray, larger, in place": (*LARGER, *IN_PLACE),
    "local, larger, both processors": LARGER,
    "ray, larger, both processors": (*LARGER, *TWO),
    "local, longer steps, both processors": LONGER,
    "ray, longer steps, both processors": (*LONGER, *TWO),
    "local, waiting": ROWS,
    "local, waiting, streaming": (*ROWS, "streaming=true"),
    "ray, waiting": (*ROWS, *RAY),
    "ray, waiting, streaming": (*ROWS, *RAY, "streaming=true"),
}
PAIRS = (
    ("local", "ray"),
    ("local, larger", "ray, larger"),
    ("local, longer steps", "ray, longer steps"),
    ("local", "ray, in place"),
    ("local, larger", "ray, larger, in place"),
    ("local, larger, both processors", "ray, larger, both processors"),
    ("local, longer steps, both processors", "ray, longer steps, both processors"),
    ("local, waiting", "local, waiting, streaming"),
    ("ray, waiting", "ray, waiting, streaming"),
)


@dataclass(frozen=True)
class Measured:
    """Seconds of one step of one run."""

    wall: float
    """Median of the steps."""
    cpu: float
    """Of all processes of the run, Ray's own too, on average over the steps."""


def run_once(folder: Path, name: str, words: Sequence[str], steps: int) -> Measured:
    """Run the command and return what a step took."""
    run = folder / "runs" / name
    command = [sys.executable, "-m", "covey", "train", *words, *COMMON, f"num_steps={steps}", f"hydra.run.dir={run}"]
    num_threads = 2 if "both processors" in name else 1
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads), "COVEY_CACHE": str(folder / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), environment.get("PYTHONPATH", "")])
    with (folder / f"{name}.out").open("w+") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        # Look at the processor time of all processes whenever a step is over.
        seen: dict[int, float] = {}
        while process.poll() is None:
            seen[len(train_rows(run))] = cpu_seconds(process.pid)
            time.sleep(POLL_SECONDS)
        if process.returncode != 0:
            output.seek(0)
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {output.read()[-3000:]}")
    wall = median(row["seconds"] for row in train_rows(run) if row["step"] > FIRST)
    first, last = min(n for n in seen if n >= FIRST), max(n for n in seen if n < steps)
    return Measured(wall, (seen[last] - seen[first]) / (last - first))


def train_rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of the steps until now."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [row for row in rows if row["kind"] == "train"]


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and of all below it, those that ended left out."""
    parents, used = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
                used[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(used.get(member, 0.0) for member in family)


def measure(cases: Sequence[str], steps: int, turns: int) -> dict[str, list[Measured]]:
    """Run each case so often, in turns."""
    found: dict[str, list[Measured]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "waiting_reward.py").write_text(WAITING)
        rows = (json.dumps({"prompt": f"row {number}:"}) for number in range(200))
        (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
        for turn in range(turns):
            for name in cases:
                found[name].append(run_once(folder, f"{name.replace(', ', '-')}-{turn}", CASES[name], steps))
                print(f"turn {turn}, {name}: {found[name][-1]}", flush=True)
    return found


def page(found: Mapping[str, Sequence[Measured]], steps: int) -> str:
    """Return the report."""
    lines = [
        "# What samplers of their own cost, and what streaming saves",
        "",
        f"Seconds of a step of runs of {steps} steps, the first {FIRST} left out: on the clock (median of the steps), "
        "and of processor time of all processes together, Ray's too. Medians of runs made in turns (least to most). "
        "The difference is that of the runs of one turn, the median of the turns (least to most). One thread for each "
        "process, two for the trainer where both processors are named. "
        "The machine ran other work beside, which the clock counts and processor time does not.",
        "",
        f"`python -m benchmarks.scale.async_overhead` on {platform.machine()}, {os.cpu_count()} cores, Linux, no GPU.",
        "",
        "| first | second | turns | clock, s | difference | processor, s | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for first, second in PAIRS:
        if first in found and second in found:
            pairs = list(zip(found[first], found[second], strict=True))
            cells = [_compared([(getattr(a, kind), getattr(b, kind)) for a, b in pairs]) for kind in ("wall", "cpu")]
            lines.append(f"| {first} | {second} | {len(pairs)} | {' | '.join(cells)} |")
    commands = [f"- {name}: `covey train {' '.join(CASES[name])}`" for name in found]
    waits = f"`waits` sleeps for an exponential time of {MEAN_SECONDS:g} s on average for each prompt."
    return "\n".join([*lines, "", *commands, "", waits]) + "\n"


def _compared(pairs: Sequence[tuple[float, float]]) -> str:
    before, after = ([pair[place] for pair in pairs] for place in (0, 1))
    ratios = [b / a - 1 for a, b in pairs]
    spread = f"{median(ratios):+.1%} ({min(ratios):+.1%} to {max(ratios):+.1%})"
    return f"{_spread(before)}, {_spread(after)} | {spread}"


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(CASES), help="cases, by name")
    chosen = parser.parse_args()
    found = measure(chosen.only, chosen.steps, chosen.turns)
    text = page(found, chosen.steps)
    if set(found) == set(CASES):
        PAGE.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
