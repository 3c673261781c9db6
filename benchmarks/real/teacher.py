"""Does a teacher that reads the right answer help a real model? Rewards alone against rewards and teacher.

    python -m benchmarks.real.teacher run --out benchmarks/results/teacher.json
    python -m benchmarks.real.teacher table benchmarks/results/teacher.json

SmolLM2-135M-Instruct learns the four short problems of the sanity set (benchmarks/real/sanity.md), with three seeds for
each arm and the same seeds for both. The teacher is the model as it began, which reads the right answer before the
question. Reward is measured step by step, before the update of the step, and on 16 attempts before and after.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import covey
from benchmarks.real.models import model_folder
from benchmarks.real.recipes import MODEL
from benchmarks.real.sanity.problems import ATTEMPTS, read
from benchmarks.real.sanity.training import SETTINGS, SanitySet
from covey.types import Prompt

PROBLEMS = Path(__file__).parent / "sanity" / "short.jsonl"
TEACHER = {"teacher": "self", "teacher_shows": ["gold"]}
ARMS: dict[str, dict[str, Any]] = {
    "rewards alone": {},
    "rewards and teacher, coef 0.3": {**TEACHER, "teacher_coef": 0.3},
    "rewards and teacher, coef 1": {**TEACHER, "teacher_coef": 1.0},
    "teacher alone": {**TEACHER, "reward_weight": 0.0},
}
SHOWN = ("sampled_reward_mean", "teacher/kl", "completion_length_mean", "entropy")


class Problems(SanitySet):
    """The problems with their answers."""

    def gold(self, prompt: Prompt) -> str:
        return str(prompt.columns["target"][0])


def measure(arm: str, seed: int, num_steps: int, folder: Path) -> dict[str, Any]:
    """Train one run and return its curves."""
    rows, began = read(PROBLEMS), time.monotonic()
    result = covey.train(
        str(model_folder(MODEL)),
        data=Problems(rows),
        folder=folder,
        seed=seed,
        num_steps=num_steps,
        groups_per_step=len(rows),
        evaluation={"num_prompts": len(rows), "num_samples": ATTEMPTS, "k": [1], "every": 0},
        preflight={"enabled": False},
        **SETTINGS,
        **ARMS[arm],
    )
    assert result.before is not None, "runs are measured before their first step"
    assert result.after is not None, "and after their last"
    curves = {name: [row.get(name) for row in result.rows] for name in SHOWN}
    said = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    return {
        "arm": arm,
        "seed": seed,
        "seconds": round(time.monotonic() - began),
        "before": result.before.reward_mean.value,
        "after": result.after.reward_mean.value,
        **curves,
        "last_answers": [row["completion"] for row in said[-8:]],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return mean and range of each arm, and what the teacher adds to rewards alone, seed by seed."""
    lines = ["| arm | reward of each step, mean of seeds | mean over steps | after |", "|---|---|---|---|"]
    alone = {row["seed"]: row for row in rows if row["arm"] == "rewards alone"}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        steps = [statistics.fmean(values) for values in zip(*(row[SHOWN[0]] for row in own), strict=True)]
        means = [statistics.fmean(row[SHOWN[0]]) for row in own]
        after = [row["after"] for row in own]
        lines.append(
            f"| {arm} | {' '.join(f'{value:.2f}' for value in steps)} | {statistics.fmean(means):.3f} "
            f"({min(means):.3f} to {max(means):.3f}) | {statistics.fmean(after):.2f} |"
        )
        pairs = [statistics.fmean(row[SHOWN[0]]) - statistics.fmean(alone[row["seed"]][SHOWN[0]])
                 for row in own if row["seed"] in alone]  # fmt: skip
        if arm != "rewards alone" and len(pairs) > 1:
            half = 4.303 * statistics.stdev(pairs) / len(pairs) ** 0.5
            lines.append(f"| gain of the teacher, paired | | {statistics.fmean(pairs):+.3f} ± {half:.3f} (95 %) | |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real.teacher", description=__doc__)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("file", type=Path, nargs="?", default=Path("benchmarks/results/teacher.json"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS)[:2])
    asked = parser.parse_args(words)
    rows = json.loads(asked.file.read_text()) if asked.file.is_file() else []
    if asked.what == "run":
        for seed in asked.seeds:
            for arm in asked.arms:
                with tempfile.TemporaryDirectory() as folder:
                    rows.append(measure(arm, seed, asked.steps, Path(folder, "run")))
                asked.file.write_text(json.dumps(rows, indent=1) + "\n")
                print(table(rows), flush=True)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
