"""What does sampling in processes of its own cost, and what does streaming save? Runs of the command, in turns.

    python -m benchmarks.async_overhead              # ten minutes; writes benchmarks/async_overhead.md

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

PAGE = Path(__file__).resolve().parent / "async_overhead.md"
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
RAY = ("source=ray", "max_staleness=0", "devices.sampler=1")
CASES: dict[str, tuple[str, ...]] = {
    "local": SUMS,
    "ray": (*SUMS, *RAY),
    "local, waiting": ROWS,
    "local, waiting, streaming": (*ROWS, "streaming=true"),
    "ray, waiting": (*ROWS, *RAY),
    "ray, waiting, streaming": (*ROWS, *RAY, "streaming=true"),
}
PAIRS = (
    ("local", "ray"),
    ("local, waiting", "local, waiting, streaming"),
    ("ray, waiting", "ray, waiting, streaming"),
)


def step_seconds(folder: Path, name: str, words: Sequence[str], steps: int) -> float:
    """Run the command and return the median seconds of its steps."""
    run = folder / "runs" / name
    command = [sys.executable, "-m", "covey", "train", *words, *COMMON, f"num_steps={steps}", f"hydra.run.dir={run}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COVEY_CACHE": str(folder / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), environment.get("PYTHONPATH", "")])
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
        )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return median(row["seconds"] for row in rows if row["kind"] == "train" and row["step"] > FIRST)


def measure(cases: Sequence[str], steps: int, turns: int) -> dict[str, list[float]]:
    """Run each case so often, in turns."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "waiting_reward.py").write_text(WAITING)
        rows = (json.dumps({"prompt": f"row {number}:"}) for number in range(200))
        (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
        for turn in range(turns):
            for name in cases:
                found[name].append(step_seconds(folder, f"{name.replace(', ', '-')}-{turn}", CASES[name], steps))
                print(f"turn {turn}, {name}: {found[name][-1]:.4f} s a step", flush=True)
    return found


def page(found: Mapping[str, Sequence[float]], steps: int) -> str:
    """Return the report."""
    turns = len(next(iter(found.values())))
    lines = [
        "# What samplers of their own cost, and what streaming saves",
        "",
        f"Seconds of a step, the median of {steps - FIRST} steps of a run after the first {FIRST}; medians of {turns} "
        "runs of each kind (least to most), made in turns. The difference is that of the runs of one turn, the median "
        "of the turns (least to most). One thread for each process. The machine ran other work beside.",
        "",
        f"`python -m benchmarks.async_overhead` on {platform.machine()}, {os.cpu_count()} cores, Linux, no GPU.",
        "",
        "| first | step, s | second | step, s | second against first |",
        "|---|---|---|---|---|",
    ]
    for first, second in PAIRS:
        if first in found and second in found:
            ratios = [b / a - 1 for a, b in zip(found[first], found[second], strict=True)]
            spread = f"{median(ratios):+.1%} ({min(ratios):+.1%} to {max(ratios):+.1%})"
            cells = [cell for name in (first, second) for cell in (name, _spread(found[name]))]
            lines.append(f"| {' | '.join(cells)} | {spread} |")
    commands = [f"- {name}: `covey train {' '.join(CASES[name])}`" for name in found]
    waits = f"`waits` sleeps for an exponential time of {MEAN_SECONDS:g} s on average for each prompt."
    return "\n".join([*lines, "", *commands, "", waits]) + "\n"


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
