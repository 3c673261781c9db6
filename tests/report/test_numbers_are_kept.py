"""What reports say of two runs is what is written down: a change of any number is meant, and shown in the commit.

To renew it: python -m tests.report.test_numbers_are_kept
"""

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from covey_report.logs.read import RunFiles
from covey_report.page.curves import curves_of
from covey_report.text import as_lines

KEPT = Path(__file__).parents[1] / "data" / "reports.txt"
NUM_STEPS = 45
EVERY = 15


def made_up(seed: int, rate: float) -> RunFiles:
    """A run that learns at this rate: groups of 4 over 8 prompts a step, evaluations of 24 prompts in 4 samples."""
    chance = random.Random(seed)
    steps: list[dict[str, Any]] = []
    for step in range(1, NUM_STEPS + 1):
        reward = min(0.95, 0.2 + rate * step) + chance.gauss(0, 0.03)
        steps.append(
            {
                "step": step,
                "kind": "train",
                "sampled_reward_mean": reward,
                "reward_mean": reward,
                "reward/correct": reward,
                "reward/form": min(1.0, 0.6 + rate * step / 2),
                "zero_std_fraction": chance.randrange(9) / 8,
                "num_groups": 8.0,
                "num_groups_sampled": 8.0,
                "num_rollouts_trained": 32.0,
                "entropy": 1.5 * math.exp(-rate * step) + chance.gauss(0, 0.02),
                "completion_length_mean": 20 + 4 * rate * step + chance.gauss(0, 0.5),
                "truncated_fraction": chance.randrange(4) / 32,
                "kl": 0.002 * step * (1 + chance.random()),
                "grad_norm": 0.5 + chance.random() / 4,
                "loss": chance.gauss(0, 0.01),
                "mismatch": 1e-6,
                "seconds": 2 + chance.random() / 8,
                "tokens_per_second": 900 + chance.gauss(0, 20),
            }
        )
    answers, looks = [], []
    for step in range(0, NUM_STEPS + 1, EVERY):
        share = 0.2 + rate * step
        told = [[float(chance.random() < min(1, share * (0.5 + n % 2))) for _ in range(5)] for n in range(24)]
        answers += [
            {"step": step, "prompt_id": f"test-{n}", "greedy": place == 0, "correct": reward == 1.0, "reward": reward}
            | {"prompt": f"{n}?", "completion": f"{place}", "sample": place}
            for n, rewards in enumerate(told)
            for place, reward in enumerate(rewards)
        ]
        mean = sum(sum(rewards[1:]) for rewards in told) / 96
        accuracy = sum(rewards[0] for rewards in told) / 24
        looks.append({"step": step, "kind": "evaluate", "accuracy": accuracy, "reward_mean": mean, "pass_at_1": mean})
    settings = {"seed": seed, "num_steps": NUM_STEPS, "group_size": 4, "groups_per_step": 8, "optimizer.lr": rate}
    settings |= {"environment": "arithmetic", "evaluation.every": EVERY, "evaluation.num_samples": 4}
    return RunFiles(
        Path(f"run-{seed}"), settings, steps=steps, looks=looks, answers=answers, verdicts=verdicts_of(answers)
    )


def verdicts_of(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that a run writes of these greedy answers."""
    greedy = [row for row in answers if row["greedy"]]
    found = []
    for step in dict.fromkeys(row["step"] for row in greedy):
        rows = [row for row in greedy if row["step"] == step]
        names = [row["prompt_id"] for row in rows]
        right = "".join("1" if row["correct"] else "0" for row in rows)
        found.append({"step": step, "prompts": names, "ids": names, "right": right})
        found[-1]["rewards"] = [row["reward"] for row in rows]
    return found


def lines() -> Iterator[str]:
    runs = [made_up(seed, rate) for seed, rate in ((0, 0.01), (1, 0.01), (2, 0.015), (3, 0.015))]
    yield from as_lines(runs, [run.folder.name for run in runs], 120)
    for curve in curves_of(runs[0]):
        yield f"{curve['title']}: {curve['reading']}"
        for part in ("x", "raw", "y", "low", "high"):
            chosen = [*curve[part][:2], *curve[part][len(curve[part]) // 2 :][:1], *curve[part][-1:]]
            yield f"  {part} of {len(curve[part])}: " + ", ".join("-" if v is None else f"{v:.5g}" for v in chosen)


def test_every_number_is_the_one_that_is_written_down() -> None:
    assert [line.rstrip() for line in lines()] == KEPT.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    KEPT.write_text("".join(f"{line.rstrip()}\n" for line in lines()), encoding="utf-8")
