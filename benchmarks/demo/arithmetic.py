"""Does the demo learn, on every seed, and only from its rewards?

    python -m benchmarks.demo                                       # seeds 0 to 4, each with its control
    python -m benchmarks.demo --seeds 3 --kinds reward

A control is the same run with the rewards of each group shuffled among its completions: it must not rise. Results are
kept in benchmarks/results/demo.json, by kind and seed; benchmarks/demo.md is written from all of them.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.demo.runs import HERE, kept_with, machine, read_run
from covey.environments.arithmetic import Arithmetic
from covey.environments.settings import ArithmeticConfig
from covey.types import Failure, Prompt, Reward

RESULTS, PAGE = HERE.parent / "results" / "demo.json", HERE.parent / "demo.md"
COMMAND = "covey train recipe=arithmetic seed=SEED"
EVALUATE_EVERY = 50
"""Steps; the recipe's own 100 would give the curve five points."""
CURVE = ("step", "accuracy", "reward_mean", "pass_at_1", "pass_at_4", "pass_at_8")
"""What is kept of each evaluation."""
PANEL = ("reward/correct", "entropy", "tokens_per_second", "completion_length_mean", "truncated_fraction", "seconds")
"""What is kept of each training step of the first seed besides the reward: a figure shows it."""


class ShuffledRewards(Arithmetic):
    """Arithmetic whose training rewards are dealt out at random within the group; the held-out split is honest."""

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        verdicts = await super().score(prompt, completions)
        if prompt.id.startswith("train"):
            random.Random("\n".join([prompt.id, *completions])).shuffle(verdicts)
        return verdicts


def run(seed: int, folder: Path, *, is_control: bool, keeps_panel: bool) -> dict[str, Any]:
    """Train one seed in a process of its own. Return what the page and the figures need of its run folder."""
    arguments = ["train", "recipe=arithmetic", f"seed={seed}", f"hydra.run.dir={folder}", "output.progress=false"]
    program = [sys.executable, "-m", *(("benchmarks.demo", "--control-run") if is_control else ("covey",))]
    # The control imports torch before `covey` can set this.
    environment = {"GOMP_SPINCOUNT": "2000", **os.environ}
    subprocess.run([*program, *arguments, f"evaluation.every={EVALUATE_EVERY}"], check=True, env=environment)
    return measured(folder, keeps_panel)


def measured(folder: Path, keeps_panel: bool) -> dict[str, Any]:
    """Return estimates of a finished run, the curve of its evaluations, the columns of its training steps."""
    summary, looks, steps = read_run(folder)
    columns = ("sampled_reward_mean", *(PANEL if keeps_panel else ()))
    cold_start = summary["phases"].get("cold_start", {"seconds": 0.0})["seconds"]
    return {
        "before": estimates(summary["before"]),
        "after": estimates(summary["after"]),
        "gain": estimates(summary["gain"]),
        "curve": [{name: row[name] for name in CURVE} for row in looks],
        "steps": {name: [round(row[name], 4) for row in steps] for name in columns},
        "cold_start_seconds": cold_start,
        "seconds": summary["seconds"],
        "versions": summary["versions"],
        "machine": f"{machine()}, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}",
    }


def estimates(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part[name] for name in ("accuracy", "reward_mean")}


def run_control(arguments: Sequence[str]) -> int:
    """`covey` with the shuffled environment in place of arithmetic."""
    from covey.cli.main import main

    def build(settings: Any, run: Any, say: Any) -> ShuffledRewards:
        return ShuffledRewards(settings.levels, settings.num_train, settings.num_test, settings.problem_seed)

    ArithmeticConfig.build = build
    return main(arguments)


def row(name: str, result: Mapping[str, Any]) -> str:
    before, after, gain = result["before"], result["after"], result["gain"]["accuracy"]
    cells = [
        name,
        percent(before["accuracy"]),
        percent(after["accuracy"]),
        f"{100 * gain['value']:+.1f} [{100 * gain['low']:+.1f}, {100 * gain['high']:+.1f}]",
        f"{before['reward_mean']['value']:.3f} -> {after['reward_mean']['value']:.3f}",
        f"{result['cold_start_seconds']:.0f}",
        f"{result['seconds'] - result['cold_start_seconds']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def percent(estimate: Mapping[str, float]) -> str:
    return f"{100 * estimate['value']:.1f} [{100 * estimate['low']:.1f}, {100 * estimate['high']:.1f}]"


def spread(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the median, the smallest and the largest gain in points of accuracy."""
    gains = [100 * result["gain"]["accuracy"]["value"] for result in results.values()]
    return f"median {statistics.median(gains):+.1f}, smallest {min(gains):+.1f}, largest {max(gains):+.1f}"


def page(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return the page of all seeds and their controls."""
    honest, shuffled = results["reward"], results.get("control", {})
    rows = [row(seed, result) for seed, result in sorted(honest.items())]
    rows += [row(f"{seed}, control", result) for seed, result in sorted(shuffled.items())]
    every = [*honest.values(), *shuffled.values()]
    machines = "; ".join(sorted({result["machine"] for result in every}))
    versions = every[0]["versions"]
    return f"""# The demo over seeds

![Held-out accuracy over the steps of each seed, and of the controls](../docs/figures/front/demo.svg)

`make demo`: a policy of about 0.8 million parameters learns two-digit addition by supervised learning until it solves
about a third of the sums, and then by GRPO (no supervised loss) on exact-match rewards. Greedy accuracy on 512 held-out
problems, which are in neither phase; 95 % intervals, the gain paired over problems.

Measured by `python -m benchmarks.demo` (`{COMMAND} evaluation.every={EVALUATE_EVERY}`) on {machines};
torch {versions["torch"]}, transformers {versions["transformers"]}.

| seed | accuracy before, % | accuracy after, % | gain, points | mean reward | cold start, s | rest, s |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}

Gain over {len(honest)} seeds, points: {spread(honest)}. {control_line(shuffled)}
"""


def control_line(results: Mapping[str, Mapping[str, Any]]) -> str:
    if not results:
        return ""
    return f"""Over {len(results)} controls: {spread(results)}.

A control is the same seed with the rewards of each training group shuffled among its completions. Nothing but the
reward separates the two runs. Every update of the control is noise, and noise wears the policy down. Times are of a
machine that ran other work beside the runs; a control finds the cold start of its seed in the cache."""


def keep(kind: str, seed: int, result: Mapping[str, Any]) -> None:
    """Add one result, and write the page again."""
    PAGE.write_text(page(kept_with(RESULTS, kind, seed, result, indent=None)))


def main() -> int:
    if sys.argv[1:2] == ["--control-run"]:
        return run_control(sys.argv[2:])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--kinds", nargs="+", default=["reward", "control"], choices=["reward", "control"])
    options = parser.parse_args()
    for seed in options.seeds:
        for kind in options.kinds:
            is_control = kind == "control"
            with tempfile.TemporaryDirectory() as parent:
                keeps_panel = seed == 0 and not is_control
                result = run(seed, Path(parent) / "run", is_control=is_control, keeps_panel=keeps_panel)
            keep(kind, seed, result)
            print(kind, row(str(seed), result), flush=True)
    return 0
