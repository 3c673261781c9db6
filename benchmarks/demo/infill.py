"""Do fills get better, on every seed, for the judge that pays for them and for a check that does not?

    python -m benchmarks.demo.infill            # seeds 0, 1 and 2; writes benchmarks/demo/infill.md

Each run makes masked policy and judge from nothing, so its seconds are those of somebody's first `make demo-infill`.
Results are kept in benchmarks/results/demo_infill.json; the page is written from all of them. Exit code 1 where the
judge's score or the share of exact sentences did not rise beyond its confidence interval.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.demo.runs import HERE, estimate, machine, train

RESULTS = HERE.parent / "results" / "demo_infill.json"
PAGE = HERE / "infill.md"
LONGEST = 1500.0
"""Seconds until a run is given up."""
MEASURES = ("judge", "grammar")
"""What is paid for, and what is only watched."""


def run(seed: int, folder: Path) -> dict[str, Any]:
    """One run in its own process, whose judge and warmed policy are not there yet."""
    environment = {**os.environ, "COVEY_CACHE": str(folder.parent / "cache")}
    train(["recipe=infill_nano", f"seed={seed}"], folder, environment, LONGEST)
    return found_in(json.loads((folder / "summary.json").read_text()))


def found_in(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What the page needs of a summary."""
    threads = os.environ.get("OMP_NUM_THREADS")
    looks = {name: summary[name]["reward_parts"] for name in ("before", "after", "gain")}
    return {
        **{look: {name: parts[name] for name in (*MEASURES, "gap")} for look, parts in looks.items()},
        "accuracy": summary["environment"]["judge"]["accuracy"],
        "seconds": summary["seconds"],
        "phases": {name: phase["seconds"] for name, phase in summary["phases"].items()},
        "versions": summary["versions"],
        "machine": machine() + (f", OMP_NUM_THREADS={threads}" if threads else ""),
    }


def has_risen(result: Mapping[str, Any]) -> bool:
    """Both, each beyond the interval of its gain."""
    return all(result["gain"][name]["low"] > 0 for name in MEASURES)


def row(seed: str, result: Mapping[str, Any]) -> str:
    cells = [seed]
    for name in MEASURES:
        cells += [estimate(result["before"][name]), estimate(result["after"][name])]
        cells.append(estimate(result["gain"][name], "+"))
    cells += [estimate(result["gain"]["gap"], "+"), "yes" if has_risen(result) else "**no**"]
    cells.append(f"{result['seconds']:.0f}")
    return f"| {' | '.join(cells)} |"


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    ordered = sorted(results.items())
    first = ordered[0][1]
    machines = sorted({result["machine"] for result in results.values()})
    accuracies = [100 * result["accuracy"] for result in results.values()]
    return f"""# The fill-in demo over seeds

`make demo-infill`: a judge and a masked policy are randomly initialised and trained on generated sentences, then the
policy is trained by GRPO on the judge's score. 256 held-out inputs of which 30 % of the letters are masked, 4 fills of
each; 95 % intervals, gains paired over inputs. *Judge* is the mean score, *grammar* the share of texts that are
sentences, by a program; it is never trained on. *Gap* is judge less grammar: that it does not rise says that the
policy did not learn the judge's mistakes. "Rose" says that the intervals of both gains lie above 0.

Measured by `python -m benchmarks.demo.infill` (`covey train recipe=infill_nano seed=SEED`, nothing in the cache) on
{"; ".join(machines)}; torch {first["versions"]["torch"]}, transformers {first["versions"]["transformers"]}.
Seconds are those of the whole run, with judge, cold start and evaluations, beside whatever else the machine did. The
judges rank {min(accuracies):.1f} to {max(accuracies):.1f} % of 256 held-out texts above their corrupted versions.

| seed | judge before | after | gain | grammar before | after | gain | gain of the gap | rose | seconds |
|---|---|---|---|---|---|---|---|---|---|
{chr(10).join(row(seed, result) for seed, result in ordered)}
"""


def keep(seed: int, result: Mapping[str, Any]) -> None:
    """Add one result, and write the page anew."""
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    results[str(seed)] = dict(result)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(results))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    risen = []
    for seed in parser.parse_args(arguments).seeds:
        with tempfile.TemporaryDirectory() as parent:
            result = run(seed, Path(parent) / "run")
        keep(seed, result)
        print(row(str(seed), result), flush=True)
        risen.append(has_risen(result))
    return 0 if all(risen) else 1


if __name__ == "__main__":
    sys.exit(main())
