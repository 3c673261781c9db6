"""Check that a small policy learns to use what it is told, on every seed, and nothing where it is told nonsense.

    make demo-tools                                          # guess and lookup, their controls, credit by turn
    python -m benchmarks.demo.tools --cases guess --seeds 0

Results are kept in benchmarks/results/demo_tools.json; benchmarks/demo/tools.md is written from all of them. Exit code
1 where held-out success rose by less than 0.3 or within its interval, where a control ended above chance, or where a
run took longer than four minutes.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.demo.runs import HERE, estimate, kept_with, machine, read_run, train

RESULTS = HERE.parent / "results" / "demo_tools.json"
PAGE = HERE / "tools.md"
LONGEST = 900.0
"""Seconds until a run is given up."""
ASKED, MOST_SECONDS = 0.3, 240.0
"""What held-out success must rise by, and the seconds that a run may take."""


@dataclass(frozen=True)
class Case:
    """What is trained, and what is asked of it."""

    words: tuple[str, ...]
    chance: float | None = None
    """Of a control: the share that a policy wins which learns nothing from what it is told; None must learn."""
    counts: bool = True
    """Whether the exit code depends on it."""


CASES = {
    "guess": Case(("recipe=guess_nano",)),
    "guess, shuffled": Case(("recipe=guess_nano", "environment.shuffled=true"), chance=6 / 32),
    "lookup": Case(("recipe=lookup_nano",)),
    "lookup, shuffled": Case(("recipe=lookup_nano", "environment.shuffled=true"), chance=1 / 10),
    "guess, halving, by episode": Case(("recipe=guess_nano", "environment.halving_reward=0.1"), counts=False),
    "guess, halving, by turn": Case(
        ("recipe=guess_nano", "environment.halving_reward=0.1", "algorithm.turn_credit=discounted"), counts=False
    ),
}


def run(case: Case, seed: int, folder: Path) -> dict[str, Any]:
    """Train in a process of its own, the cold start included: held-out success before and after."""
    cache = folder.parent / "cache"  # so that the time of the cold start counts
    words = [*case.words, f"seed={seed}", f"cold_start.cache_dir={cache}", "evaluation.every=10"]
    train(words, folder, dict(os.environ), LONGEST)
    return found_in(folder)


def found_in(folder: Path) -> dict[str, Any]:
    """Return what the table needs of a run folder."""
    summary, looks, steps = read_run(folder)
    return {
        "before": summary["before"]["reward_parts"]["won"],
        "after": summary["after"]["reward_parts"]["won"],
        "gain": summary["gain"]["reward_parts"]["won"],
        "curve": [(look["step"], look["reward/won"]) for look in looks],
        "turns": [mean(row["turns_mean"] for row in part) for part in (steps[:3], steps[-3:])],
        "seconds": summary["seconds"],
        "machine": machine(),
    }


def is_reached(case: Case, result: Mapping[str, Any]) -> bool:
    """Tell whether a run did what is asked: a control must not end above chance by more than its interval."""
    if case.chance is not None:
        return bool(result["after"]["low"] <= case.chance)
    gain = result["gain"]
    return bool(gain["value"] >= ASKED and gain["low"] > 0 and result["seconds"] <= MOST_SECONDS)


def row(name: str, seed: str, result: Mapping[str, Any]) -> str:
    case, turns = CASES[name], result["turns"]
    verdict = "reached" if is_reached(case, result) else "**not reached**"
    cells = [
        name,
        seed,
        estimate(result["before"]),
        estimate(result["after"]),
        estimate(result["gain"], "+"),
        f"{turns[0]:.1f} to {turns[1]:.1f}",
        f"{result['seconds']:.0f}",
        verdict if case.counts else "",
    ]
    return f"| {' | '.join(cells)} |"


def page(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    known = [name for name in CASES if name in results]
    rows = [row(name, seed, result) for name in known for seed, result in sorted(results[name].items())]
    every = [result for of_seed in results.values() for result in of_seed.values()]
    curves = []
    for name in known:
        of_seeds = [dict(map(tuple, result["curve"])) for result in results[name].values()]
        steps = sorted(of_seeds[0])
        cells = [f"{mean(curve[step] for curve in of_seeds):.2f}" for step in steps]
        curves.append(f"| {name} | {' | '.join(cells)} |")
    heads = " | ".join(str(step) for step in sorted(dict(map(tuple, every[0]["curve"]))))
    return f"""# Small tasks of several turns, over seeds

`make demo-tools`: a policy of about 0.8 million parameters is shown a player who errs, then trained by GRPO. `guess`
hides a number from 0 to 31 behind six guesses, `lookup` a value behind two dependent queries. Shares of held-out
episodes that are won, sampled, with 95 % intervals; seconds are those of the whole run, cold start included. A control
is told nonsense: blind play wins 0.19 of `guess`, a constant answer 0.10 of `lookup`.

Asked: a gain of at least {ASKED} outside its interval within {MOST_SECONDS:.0f} s; controls not above chance. Measured
by `python -m benchmarks.demo.tools` on {"; ".join(sorted({result["machine"] for result in every}))}.

| case | seed | before | after | gain | turns | seconds | |
|---|---|---|---|---|---|---|---|
{chr(10).join(rows)}

Mean over seeds by step:

| case | {heads} |
|---|{"---|" * len(heads.split(" | "))}
{chr(10).join(curves)}
"""


def keep(name: str, seed: int, result: Mapping[str, Any]) -> None:
    """Add one result, and write the page anew."""
    PAGE.write_text(page(kept_with(RESULTS, name, seed, result)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args(arguments)
    reached = []
    for name, seed in [(name, seed) for name in options.cases for seed in options.seeds]:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as parent:
            result = run(case, seed, Path(parent) / "run")
        keep(name, seed, result)
        print(row(name, str(seed), result), flush=True)
        reached.append(is_reached(case, result) or not case.counts)
    return 0 if all(reached) else 1


if __name__ == "__main__":
    sys.exit(main())
