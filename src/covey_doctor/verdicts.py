"""Rows of verdicts: how evaluations judged each prompt, and how two differ.

A row has `step`, `prompts` (what tells each from others), `ids` (their names), `right` (a character each: 1, 0, - for
neither) and may have `rewards` (a mean of samples each, null where none was scored).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

Row = Mapping[str, Any]
MARKS = {"1": 1.0, "0": 0.0}
FEW_PROMPTS = 20
"""Prompts needed to know the spread of values without bounds."""


def with_prompts(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Repeat prompts and ids in rows whose file names them once.

    Rows whose first one is damaged are left out.
    """
    found: list[dict[str, Any]] = []
    named: Row = {}
    for row in rows:
        named = {name: row[name] for name in ("prompts", "ids") if name in row} or named
        found += [{**named, **row}] if named else []
    return found


def of_each(row: Row, measure: str) -> list[float]:
    """Read accuracy or reward_mean of each prompt, NaN where unmeasured."""
    if measure == "accuracy":
        return [MARKS.get(mark, math.nan) for mark in row["right"]]
    return [math.nan if reward is None else float(reward) for reward in row["rewards"]]


def pair(before: Row, after: Row, measure: str) -> tuple[list[float], list[float]]:
    """Pair a measure over the prompts that two evaluations share."""
    if before["prompts"] == after["prompts"]:
        return of_each(before, measure), of_each(after, measure)
    first, last = (dict(zip(row["prompts"], of_each(row, measure), strict=False)) for row in (before, after))
    shared = [name for name in first if name in last]
    return [first[name] for name in shared], [last[name] for name in shared]


def paired_change(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Compute the mean paired difference and its standard error, NaN if unknown.

    Prompts that either side could not measure (NaN) are left out. Values between 0 and 1 have half a difference more at
    -1 and at 1, as if seen. The error is as much larger as Student's interval of 95 % is than the normal one.
    """
    pairs = [pair for pair in zip(before, after, strict=True) if not any(map(math.isnan, pair))]
    if not pairs:
        return math.nan, math.nan
    changes, number = [a - b for b, a in pairs], len(pairs)
    mean = fmean(changes)
    if all(0 <= value <= 1 for pair in pairs for value in pair):
        centre = math.fsum(changes) / (number + 1)
        square = math.fsum((one - centre) ** 2 for one in changes) + 1 + centre**2
        return mean, _student(number) * math.sqrt(square) / (number + 1)
    square = math.fsum((one - mean) ** 2 for one in changes)
    if number < FEW_PROMPTS or square <= 1e-24 * number * max(1.0, mean * mean):
        return mean, math.nan
    return mean, _student(number - 1) * math.sqrt(square / (number - 1) / number)


def _student(freedom: int) -> float:
    """Divide Student's 95 % quantile by the normal one (Abramowitz, Stegun 26.7.5)."""
    return 1 + 1.21036 / freedom + 1.44008 / freedom**2 + 1.30403 / freedom**3 + 0.811 / freedom**4
