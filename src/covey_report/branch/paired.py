"""Paired differences of runs that share their random numbers."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import Any

from covey.algorithm.intervals import Estimate, bounds_of, mean_interval, student
from covey.system.jsonl import read_object
from covey.system.text.format import number_of
from covey_report.logs.read import RunFiles

CONFIDENCE = 0.95
FACTS = "branch.json"
Key = tuple[int, str, int]
"""Step, prompt, and number of the group among those of the prompt in the step."""


@dataclass(frozen=True, slots=True)
class PairedGap:
    """A difference of mean rewards over the same prompts and steps."""

    difference: Estimate
    unpaired: Estimate
    """The same, with the interval that unpaired prompts would give."""
    number: int
    steps: tuple[int, int]


def facts_of(folder: Path) -> dict[str, Any]:
    """Return the facts of a child's branch, empty for other runs."""
    found = read_object(folder / FACTS, 1 << 20)
    return found if type(found.get("at")) is int else {}


def groups_after(rows: Sequence[dict[str, Any]], at: int) -> Iterator[tuple[Key, float]]:
    """Yield mean rewards of groups that other weights sampled."""
    for row in rows:  # those of the first step after a branch are of the weights that all have
        drawn: Counter[str] = Counter()
        for group in row.get("groups", ()) if row["step"] > at + 1 else ():
            rewards = [float(reward) for reward in group["rewards"]]
            prompt = str(group["prompt_id"])
            drawn[prompt] += 1
            if rewards:
                yield (row["step"], prompt, drawn[prompt]), sum(rewards) / len(rewards)


def pair(base: RunFiles, other: RunFiles) -> PairedGap | None:
    """Compare branches of one checkpoint by trained groups, None for others."""
    facts = [facts_of(run.folder) for run in (base, other)]
    if not all(facts) or facts[0].get("checkpoint") != facts[1].get("checkpoint"):
        return None
    means = [dict(groups_after(run.updates, facts[0]["at"])) for run in (base, other)]
    return difference_of(*means)


def difference_of(base: Mapping[Key, float], other: Mapping[Key, float]) -> PairedGap | None:
    """Estimate the mean difference over the keys of both, the independent units."""
    keys = sorted(base.keys() & other.keys())
    if len(keys) < 2:
        return None
    a, b = [base[key] for key in keys], [other[key] for key in keys]
    bounds = (-1.0, 1.0) if bounds_of([*a, *b]) is not None else None
    found = mean_interval([y - x for x, y in zip(a, b, strict=True)], CONFIDENCE, bounds)
    alone = student(CONFIDENCE, len(keys) - 1) * math.sqrt((variance(a) + variance(b)) / len(keys))
    unpaired = Estimate(found.value, found.value - alone, found.value + alone)
    return PairedGap(found, unpaired, len(keys), (keys[0][0], keys[-1][0]))


def over_runs(values: Sequence[float]) -> Estimate:
    """Return Student's interval of differences, one of each parent."""
    if len(values) < 2:
        return Estimate(fmean(values), math.nan, math.nan)
    half = student(CONFIDENCE, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(fmean(values), fmean(values) - half, fmean(values) + half)


def line_of(found: PairedGap) -> str:
    """Describe a paired difference."""
    first, last = found.steps
    where = f"steps {first} to {last}" if last > first else f"step {first}"
    widths = [one.high - one.low for one in (found.difference, found.unpaired)]
    vain = "; pairing gains nothing here" if widths[0] >= widths[1] else ""
    interval = spell(found.unpaired).partition(" ")[2]
    return (
        f"mean reward of {where} {spell(found.difference)}, {number_of(found.number, 'pair')} of groups "
        f"(unpaired {interval}{vain})"
    )


def spell(found: Estimate) -> str:
    """Format a difference with its interval, if it has one."""
    interval = f" [{found.low:+.3f}, {found.high:+.3f}]" if math.isfinite(found.low) else ""
    return f"{found.value:+.3f}{interval}"
