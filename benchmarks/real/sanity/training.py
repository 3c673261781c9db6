"""Trains the set with covey until it is learnt, and measures it before and after: 16 attempts at each problem."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import covey
from benchmarks.real.sanity.faults import FAULTS
from benchmarks.real.sanity.problems import ATTEMPTS, SAMPLING, read
from benchmarks.real.sanity.tasks import Row, solved
from covey.environments.base import Environment, Split
from covey.types import Failure, Prompt, Reward
from covey_report.doctor.health import health_of, read_for_doctor

ENOUGH = 0.98
"""Mean training reward of the latest attempts at which a run ends: it was measured before their updates."""
MOST_GROUPS, MEMBERS = 8, 8
SETTINGS: dict[str, Any] = {
    **{"group_size": MEMBERS, "sampling": SAMPLING},
    **{"precision": "float32", "lora_rank": 16, "lr": 5e-4, "warmup_steps": 2},
    "output": {"save_every": 0, "report": False, "progress": False},
}


class SanitySet(Environment):
    """The same problems to train on and to measure."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = tuple(rows)

    def prompts(self, split: Split) -> list[Prompt]:
        return [Prompt(f"{split}/{row['id']}", "sanity", tuple(row["prompt"]), row) for row in self._rows]

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        size = len(completions)
        kinds, targets = [prompt.columns["kind"]] * size, [prompt.columns["target"]] * size
        return [Reward(value) for value in solved(completions, kinds, targets)]


@dataclass
class UntilLearnt(covey.Callback):
    """Ends a run once all attempts at a problem, on the average, earn enough."""

    num_problems: int

    def __post_init__(self) -> None:
        groups = min(MOST_GROUPS, self.num_problems)
        self.latest: deque[float] = deque(maxlen=ATTEMPTS * self.num_problems // (groups * MEMBERS))

    def on_step(self, step: int, metrics: dict[str, float | None]) -> None:
        reward = metrics["sampled_reward_mean"]
        if reward is not None:
            self.latest.append(reward)
        if len(self.latest) == self.latest.maxlen and sum(self.latest) / len(self.latest) >= ENOUGH:
            raise covey.StopTraining("learnt")


def train(
    model: str, problems: Path, folder: Path, *, num_steps: int, seed: int, fault: str | None, preflight: bool
) -> dict[str, Any]:
    """Train one run in this process, with a fault of `FAULTS` planted, and return what came of it."""
    rows = read(problems)
    if fault is not None:
        FAULTS[fault].plant()
    began = time.monotonic()
    found: dict[str, Any] = {"seed": seed, "fault": fault, "problems": len(rows)}
    try:
        result = covey.train(
            model,
            data=SanitySet(rows),
            folder=folder,
            seed=seed,
            num_steps=num_steps,
            groups_per_step=min(MOST_GROUPS, len(rows)),
            callbacks=UntilLearnt(len(rows)),
            evaluation={"num_prompts": len(rows), "num_samples": ATTEMPTS, "k": [1], "every": 0},
            preflight={"enabled": preflight},
            **SETTINGS,
        )
    except (ValueError, covey.RunStopped) as refusal:
        return {**found, "refused": str(refusal).partition("\n")[0]}
    assert result.before is not None, "runs are measured before their first step"
    assert result.after is not None, "and after their last"
    return {
        **found,
        "seconds": round(time.monotonic() - began),
        "before": result.before.reward_mean.value,
        "after": result.after.reward_mean.value,
        "worst_problem": min(result.after.mean_reward),
        "curve": [round(row["sampled_reward_mean"], 3) for row in result.rows],
        "findings": findings(folder),
    }


def findings(folder: Path) -> list[str]:
    """Return what the doctor says of a run beyond notes, the worst first."""
    return [f"{one.level.word}: {one.title}" for one in health_of(read_for_doctor(folder)).findings if one.level > 1]
