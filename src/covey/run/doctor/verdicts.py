"""The verdicts on all prompts of each evaluation, compactly: what rules and comparisons of evaluations read."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from covey.algorithm.intervals import Estimate, pass_of_each
from covey.run.records.summary import paired_gain
from covey.system.text.format import timestamp

if TYPE_CHECKING:  # covey.run.evaluate imports torch
    from covey.run.evaluate import Evaluation

Row = dict[str, Any]
MARKS = {1.0: "1", 0.0: "0"}


def row_of(step: int, found: "Evaluation", prompts: Sequence[str], ids: Sequence[str]) -> Row:
    """Return a line of verdicts.jsonl.

    `prompts` has what tells each from others (`fingerprint.of_prompts`), `right` a character each: 1, 0, - for neither;
    `rewards` are means of samples, of six digits, null where none was scored.
    """
    return {
        "step": step,
        "kind": "evaluate",
        "time": timestamp(),
        "prompts": prompts,
        "ids": ids,
        "right": "".join(MARKS.get(value, "-") for value in found.correct_greedy),
        "rewards": [None if math.isnan(value) else float(f"{value:.6g}") for value in found.mean_reward],
        "num_right": list(found.num_right) if found.accuracy else [],
        "num_scored": list(found.num_scored) if found.accuracy else [],
    }


def filled(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return rows of the file with the prompts of each, which it does not repeat."""
    found: list[Row] = []
    for row in rows:
        found.append({**{name: found[-1][name] for name in ("prompts", "ids") if found}, **row})
    return found


def of_answers(answers: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return what greedy answers tell of each evaluation, for a run that kept no verdicts."""
    of_step: dict[int, list[Mapping[str, Any]]] = {}
    for row in answers:
        if row.get("greedy"):
            of_step.setdefault(row["step"], []).append(row)
    return [
        {
            "step": step,
            "prompts": [json.dumps([row["prompt_id"], row.get("prompt")]) for row in rows],
            "ids": [str(row["prompt_id"]) for row in rows],
            "right": "".join(MARKS.get(row.get("correct", math.nan), "-") for row in rows),
            "rewards": [row.get("reward") for row in rows],
        }
        for step, rows in sorted(of_step.items())
    ]


def of_each(row: Mapping[str, Any], measure: str) -> list[float]:
    """Return accuracy, reward_mean or pass@K of each prompt of a row, NaN where it was not measured."""
    if measure == "accuracy":
        return [{"1": 1.0, "0": 0.0}.get(mark, math.nan) for mark in row["right"]]
    if measure == "reward_mean":
        return [math.nan if reward is None else float(reward) for reward in row["rewards"]]
    k = int(measure.removeprefix("pass@"))
    return pass_of_each(row.get("num_scored", ()), row.get("num_right", ()), k)


def paired(before: Mapping[str, Any], after: Mapping[str, Any], measure: str) -> tuple[list[float], list[float]]:
    """Return a measure of the prompts that two evaluations share, before and after."""
    if before["prompts"] == after["prompts"]:
        return of_each(before, measure), of_each(after, measure)
    first, last = (dict(zip(row["prompts"], of_each(row, measure), strict=False)) for row in (before, after))
    shared = [name for name in first if name in last]
    return [first[name] for name in shared], [last[name] for name in shared]


def measures_of(*rows: Mapping[str, Any]) -> list[str]:
    """Return what all rows have: what they are judged by first."""
    most = [min(row.get("num_scored") or [0]) for row in rows]
    passes = [f"pass@{k}" for k in (1, 2, 4, 8, 16, 32, 64) if k <= min(most)]
    tells = all(set(row["right"]) - {"-"} for row in rows)
    return [*(["accuracy", *passes] if tells else []), "reward_mean"]


def gain_of(before: Mapping[str, Any], after: Mapping[str, Any], measure: str, confidence: float = 0.95) -> Estimate:
    """Return how much more the second evaluation measured on the prompts that both share."""
    return paired_gain(*paired(before, after, measure), confidence)
