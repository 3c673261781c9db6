"""Measure what pairing by random numbers saves: `python -m benchmarks.scale.branches PARENTS --at 40 --steps 10`.

PARENTS are runs of one recipe that differ in the seed, with a checkpoint of that step. Each gets a child with another
learning rate. The effect is the child's mean reward less the parent's, over the steps after the branch; its spread over
seeds is compared with that of runs that share nothing, child and parent of different seeds.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev, variance

from covey.algorithm.intervals import student
from covey_report.branch.command import run_branch
from covey_report.branch.paired import groups_after
from covey_report.logs.read import read_run


def means_of(folders: Sequence[Path], at: int) -> list[float]:
    """Return the mean reward of each run after the branch."""
    return [fmean(value for _, value in groups_after(read_run(folder).updates, at)) for folder in folders]


def summary(parents: Sequence[float], children: Sequence[float], at: int, steps: int) -> dict[str, float]:
    """Compare paired and independent runs: intervals, and steps for intervals of one width."""
    gaps, number = [b - a for a, b in zip(parents, children, strict=True)], len(parents)
    paired = student(0.95, number - 1) * stdev(gaps) / math.sqrt(number)
    apart = variance(parents) + variance(children)
    independent = student(0.95, 2 * number - 2) * math.sqrt(apart / number)
    share = variance(gaps) / apart
    return {
        "seeds": number,
        "effect": fmean(gaps),
        "paired_half_width": paired,
        "independent_half_width": independent,
        "variance_ratio": share,
        "steps_paired": number * (at + 2 * steps),
        "steps_independent_for_equal_width": number * 2 * (at + steps) / share,
        "share_of_steps": share * (at + 2 * steps) / (2 * (at + steps)),
        "share_of_steps_where_parents_are_there": share * 2 * steps / (2 * (at + steps)),
    }


def main() -> None:
    """Branch each run, and print the comparison as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--at", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--setting", default="optimizer.lr=6e-4")
    parser.add_argument("--out", type=Path, default=Path("branches"))
    asked = parser.parse_args()
    if not asked.out.exists():
        words = [*map(str, asked.runs), "--at", str(asked.at), "--steps", str(asked.steps), asked.setting]
        run_branch([*words, "--out", str(asked.out)])
    roots = [asked.out / run.name if len(asked.runs) > 1 else asked.out for run in asked.runs]
    parents, children = (means_of([root / name for root in roots], asked.at) for name in ("parent", asked.setting))
    print(json.dumps(summary(parents, children, asked.at, asked.steps), indent=1))


if __name__ == "__main__":
    main()
