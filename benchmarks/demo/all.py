"""Does every recipe that runs offline learn, on every seed?

    make demo-all                                                  # all recipes, three seeds, one table
    python -m benchmarks.demo.all --recipes code tldr_nano --seeds 0 1 --at-once 2

Results are kept in benchmarks/results/demo_all.json, by recipe and seed; benchmarks/demo/all.md is written from all of
them. Exit code 1 where a held-out reward did not rise beyond its confidence interval.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.demo.runs import HERE, estimate, kept_with, machine, train

RECIPES = (
    "arithmetic",
    "arithmetic_curriculum",
    "code",
    "countdown_nano",
    "gsm8k_nano",
    "math_nano",
    "ifeval_nano",
    "infill_nano",
    "tldr_nano",
)
RESULTS = HERE.parent / "results" / "demo_all.json"
LONGEST = 1500.0
"""Seconds until a run is given up."""


def run(recipe: str, seed: int, num_threads: int) -> dict[str, Any]:
    """One run in its own process: what the table needs of its summary."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
        train([f"recipe={recipe}", f"seed={seed}"], folder, environment, LONGEST)
        content = json.loads((folder / "summary.json").read_text())
    return {
        "before": content["before"]["reward_mean"],
        "after": content["after"]["reward_mean"],
        "gain": content["gain"]["reward_mean"],
        "seconds": content["seconds"],
        "steps": content["steps"],
        "versions": content["versions"],
        "machine": f"{machine()}, {num_threads} thread{'s' if num_threads > 1 else ''} a run",
    }


def has_risen(result: Mapping[str, Any]) -> bool:
    return bool(result["gain"]["low"] > 0)


def row(recipe: str, seed: str, result: Mapping[str, Any]) -> str:
    cells = [
        recipe,
        seed,
        estimate(result["before"]),
        estimate(result["after"]),
        estimate(result["gain"], "+"),
        "yes" if has_risen(result) else "**no**",
        f"{result['seconds']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def table(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """The page; every recipe closes with the median of its gains."""
    rows = []
    for recipe, of_seed in sorted(results.items()):
        rows += [row(recipe, seed, result) for seed, result in sorted(of_seed.items())]
        gains = [result["gain"]["value"] for result in of_seed.values()]
        middle, smallest, largest = median(gains), min(gains), max(gains)
        rows.append(f"| | | | | median {middle:+.3f} ({smallest:+.3f} to {largest:+.3f}) | | |")
    machines = sorted({result["machine"] for of_seed in results.values() for result in of_seed.values()})
    versions = next(iter(next(iter(results.values())).values()))["versions"]
    return f"""# Every offline recipe over seeds

`make demo-all`: each recipe initialises a small policy at random, trains it on demonstrations and trains it by GRPO.
Mean reward on held-out prompts before and after GRPO with 95 % intervals; the gain is paired over prompts, and "rose"
says that its interval lies above 0. Seconds are those of the whole run, start and evaluations included. The
evaluations of `ifeval_nano` and `tldr_nano` were two and four times as large as the recipes' are now.

Measured by `python -m benchmarks.demo.all` (`covey train recipe=RECIPE seed=SEED`) on {"; ".join(machines)};
torch {versions["torch"]}, transformers {versions["transformers"]}.

| recipe | seed | before | after | gain | rose | seconds |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}
"""


def keep(recipe: str, seed: int, result: Mapping[str, Any]) -> None:
    """Add one result, and write the page anew."""
    (HERE / "all.md").write_text(table(kept_with(RESULTS, recipe, seed, result)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--at-once", type=int, default=1, help="runs beside each other, which share the cores")
    options = parser.parse_args(arguments)
    jobs = [(recipe, seed) for seed in options.seeds for recipe in options.recipes]
    num_threads = max(1, len(os.sched_getaffinity(0)) // options.at_once)
    with ThreadPoolExecutor(options.at_once) as pool:
        found = pool.map(lambda job: run(job[0], job[1], num_threads), jobs)
        risen = []
        for (recipe, seed), result in zip(jobs, found, strict=True):
            keep(recipe, seed, result)
            print(row(recipe, str(seed), result), flush=True)
            risen.append(has_risen(result))
    return 0 if all(risen) else 1


if __name__ == "__main__":
    sys.exit(main())
