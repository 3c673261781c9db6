"""GRPO beside the Pass@k family on cars: mean and best score, entropy and different machines, step by step.

    python -m benchmarks.demo.machines_passk                  # five estimators, three seeds each; a quarter of an hour
    python -m benchmarks.demo.machines_passk --estimators GRPO --seeds 3
    python -m benchmarks.demo.machines_passk --estimators     # draw what is kept

Every run of a seed begins with the same cold start. Curves are kept in benchmarks/results/machines_passk.json, by
estimator and seed, and drawn into docs/figures/tasks/machines_passk.png.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.demo.runs import HERE, machine, train

RESULTS = HERE.parent / "results" / "machines_passk.json"
FIGURE = HERE.parents[1] / "docs" / "figures" / "tasks" / "machines_passk.png"
ESTIMATORS: Mapping[str, tuple[str, ...]] = {
    "GRPO": (),
    "Pass@8, analytic": ("algorithm=pass_at_k_analytic", "algorithm.advantage_options.k=8"),
    "Pass@8, PKPO": ("algorithm=pass_at_k", "algorithm.advantage_options.k=8"),
    "best minus second": ("algorithm=best_minus_second",),
    "GRPO on the top 8": ("algorithm.selection=top_k", "+algorithm.selection_options.k=8"),
}
CURVES = {
    "environment/score_mean": "mean score, m",
    "environment/best_at_64": "best of a group, m",
    "entropy": "entropy, nats a token",
    "environment/unique_machines": "different machines of 64",
}
LONGEST = 1200.0


def run(words: Sequence[str], seed: int, num_steps: int, parent: Path) -> dict[str, Any]:
    """The curves of one run, and what it ended with."""
    folder = parent / f"run-{len(list(parent.iterdir()))}"
    typed = ["recipe=machines_nano", f"seed={seed}", f"num_steps={num_steps}", *words]
    unchecked = ["preflight.enabled=false", f"cold_start.cache_dir={parent / 'cache'}"]
    train([*typed, *unchecked], folder, {"OMP_NUM_THREADS": "1", **os.environ}, LONGEST)
    return found_in(folder)


def found_in(folder: Path) -> dict[str, Any]:
    """The curves of a run folder."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps, looks = ([row for row in rows if row["kind"] == kind] for kind in ("train", "evaluate"))
    return {
        **{name: [step.get(name) for step in steps] for name in CURVES},
        "seen": max(row["environment/score_max"] for row in rows),
        "before": looks[0]["environment/best_at_1"],
        "after": looks[-1]["environment/best_at_1"],
        "after_best": looks[-1]["environment/best_at_32"],
    }


def draw(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """A panel for each curve; a thin line for each seed, a thick one for their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(CURVES), figsize=(4 * len(CURVES), 3.6), layout="constrained")
    for panel, (curve, label) in zip(panels, CURVES.items(), strict=True):
        for index, (name, of_seed) in enumerate(results.items()):
            lines = [carried(result[curve]) for result in of_seed.values()]
            for line in lines:
                panel.plot(line, color=f"C{index}", alpha=0.25, linewidth=0.8)
            panel.plot([fmean(at) for at in zip(*lines, strict=True)], color=f"C{index}", linewidth=2, label=name)
        panel.set(xlabel="step", title=label)
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.savefig(FIGURE, dpi=90)
    pyplot.close(figure)


def carried(values: Sequence[float | None]) -> list[float]:
    """A curve without gaps: steps without a signal have no entropy, and the last one stays."""
    found: list[float] = []
    for value in values:
        found.append(value if value is not None else (found[-1] if found else 0.0))
    return found


def table(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Rows for docs/tasks/machines.md: each seed's figures, in the order of the seeds."""
    lines = [
        "| estimator | mean score after | best of 32 after | best seen | entropy at the end | machines at the end |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for name, of_seed in results.items():
        every = [of_seed[seed] for seed in sorted(of_seed)]
        cells = [
            name,
            ", ".join(f"{result['after']:.1f}" for result in every),
            ", ".join(f"{result['after_best']:.1f}" for result in every),
            ", ".join(f"{result['seen']:.1f}" for result in every),
            ", ".join(f"{carried(result['entropy'])[-1]:.2f}" for result in every),
            ", ".join(f"{result['environment/unique_machines'][-1]:.0f}" for result in every),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def kept() -> dict[str, dict[str, Any]]:
    """By estimator and seed, in the order of the table."""
    results = json.loads(RESULTS.read_text())["results"] if RESULTS.is_file() else {}
    return {name: results.get(name, {}) for name in ESTIMATORS}


def keep(name: str, seed: int, found: Mapping[str, Any]) -> None:
    results = kept()
    results[name][str(seed)] = dict(found)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--estimators", nargs="*", choices=list(ESTIMATORS), default=list(ESTIMATORS))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as parent:
        for seed in options.seeds:
            for name in options.estimators:
                found = run(ESTIMATORS[name], seed, options.steps, Path(parent))
                keep(name, seed, found)
                print(f"{name}, seed {seed}: {found['after']:.1f} m, best {found['seen']:.1f} m", flush=True)
    results = kept()
    draw(results)
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
