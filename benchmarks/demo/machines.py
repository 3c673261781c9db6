"""Does a small policy learn to build machines, on every seed, from what physics says of them?

    make demo-machines                                       # cars, then catapults, three seeds each
    python -m benchmarks.demo.machines --recipes machines_nano --seeds 0

Results are kept in benchmarks/results/demo_machines.json; benchmarks/demo/machines.md is written from all of them.
Exit code 1 where a run stayed below what is asked: ten times the mean score of the cold start for cars, four times its
share of catapults that score under the strict rule.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.demo.runs import HERE, kept_with, machine, read_run, train

RESULTS = HERE.parent / "results" / "demo_machines.json"
PAGE = HERE / "machines.md"
LONGEST = 1200.0
"""Seconds until a run is given up."""


@dataclass(frozen=True)
class Target:
    """What a recipe is asked for."""

    measure: str
    """score (raw, mean) or nonzero (share of machines that score at all)."""
    factor: float
    """By how much it must have grown since the cold start."""


def run(recipe: str, seed: int, folder: Path) -> dict[str, Any]:
    """One run in a process of its own: held-out scores before and after, and the best machine seen."""
    cache = folder.parent / "cache"  # so that the time of the cold start counts
    words = [f"recipe={recipe}", f"seed={seed}", f"cold_start.cache_dir={cache}"]
    train(words, folder, {"OMP_NUM_THREADS": "1", **os.environ}, LONGEST)  # two processes simulate beside it
    return found_in(folder)


def found_in(folder: Path) -> dict[str, Any]:
    """What the table needs of a run folder."""
    summary, looks, steps = read_run(folder)
    return {
        "score": [look["environment/best_at_1"] for look in (looks[0], looks[-1])],
        "nonzero": [look["pass_at_1"] for look in (looks[0], looks[-1])],
        "best": max(row["environment/score_max"] for row in (*looks, *steps)),
        "unique": [row["environment/unique_machines"] for row in (steps[0], steps[-1])],
        "seconds": summary["seconds"],
        "physics": summary["environment"]["physics_version"],
        "machine": machine(),
    }


def factor(result: Mapping[str, Any], target: Target) -> float:
    """After over before; a start at nothing counts as the least that could have been seen."""
    before, after = result[target.measure]
    return float(after) / max(float(before), LEAST[target.measure])


def row(recipe: str, seed: str, result: Mapping[str, Any]) -> str:
    target = TARGETS[recipe]
    grown = factor(result, target)
    cells = [
        recipe,
        seed,
        f"{result['score'][0]:.2f}",
        f"{result['score'][1]:.2f}",
        f"{100 * result['nonzero'][0]:.1f}",
        f"{100 * result['nonzero'][1]:.1f}",
        f"{result['best']:.1f}",
        f"{result['unique'][0]:.0f} to {result['unique'][1]:.0f}",
        f"{target.measure} x {grown:.0f} {'(reached)' if grown >= target.factor else '(**not reached**)'}",
        f"{result['seconds']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def page(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    rows = [row(recipe, seed, result) for recipe in TARGETS for seed, result in sorted(results[recipe].items())]
    every = [result for of_seed in results.values() for result in of_seed.values()]
    asked = "; ".join(
        f"{recipe}: {target.measure} at least x {target.factor:.0f}" for recipe, target in TARGETS.items()
    )
    return f"""# Machines over seeds

`make demo-machines`: a policy of about 0.8 million parameters sees random machines (and, for catapults, some rule-based
ones) in a cold start, then is trained by GRPO on nothing but the score of the simulation. Scores of 256 machines
sampled before and after; for cars metres driven in 5 s, for catapults the strict score. "Best" is the best machine seen
at any time, "unique" the number of different valid machines among 64 answers in the first and the last step.

Asked: {asked}. Measured by `python -m benchmarks.demo.machines` on
{"; ".join(sorted({result["machine"] for result in every}))}; physics
{"; ".join(sorted({result["physics"] for result in every}))}. Seconds are those of the whole run, cold start included.

| recipe | seed | score before | after | scoring before, % | after, % | best | unique | target | seconds |
|---|---|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}
"""


def keep(recipe: str, seed: int, result: Mapping[str, Any]) -> None:
    """Add one result, and write the page anew where all recipes have one."""
    results = kept_with(RESULTS, recipe, seed, result)
    if set(results) == set(TARGETS):
        PAGE.write_text(page(results))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args(arguments)
    reached = []
    for recipe, seed in [(recipe, seed) for recipe in options.recipes for seed in options.seeds]:
        with tempfile.TemporaryDirectory() as parent:
            result = run(recipe, seed, Path(parent) / "run")
        keep(recipe, seed, result)
        print(row(recipe, str(seed), result), flush=True)
        reached.append(factor(result, TARGETS[recipe]) >= TARGETS[recipe].factor)
    return 0 if all(reached) else 1


TARGETS = {"machines_nano": Target("score", 10.0), "catapult_nano": Target("nonzero", 4.0)}
LEAST = {"score": 1e-3, "nonzero": 1 / 256}


if __name__ == "__main__":
    sys.exit(main())
