"""Intervals of what a report draws, in plain Python."""

import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import NamedTuple

from covey.algorithm.intervals import mean_interval, wilson

LEVEL = 0.95


class Band(NamedTuple):
    """A value and the bounds of its 95 % interval. Bounds are None where nothing says how sure it is."""

    value: float | None
    low: float | None
    high: float | None


NOTHING = Band(None, None, None)


def share_band(successes: float, trials: float) -> Band:
    """Return Wilson's interval of a share, nothing where there were no trials.

    >>> [round(bound, 3) for bound in share_band(0, 10)]
    [0.0, 0.0, 0.278]
    """
    return Band(*astuple(wilson(successes, trials, LEVEL))) if trials > 0 else NOTHING


def mean_band(values: Sequence[float]) -> Band:
    """Return the normal interval of a mean of independent values, without bounds for fewer than two."""
    if not values:
        return NOTHING
    found = mean_interval(values, LEVEL)
    return Band(*astuple(found)) if len(values) > 1 else Band(found.value, None, None)


def moving_bands(values: Sequence[float | None], width: int) -> list[Band]:
    """Return the mean of the `width` values around each place, with the interval of that mean."""
    half = width // 2
    found = []
    for place in range(len(values)):
        near = [value for value in values[max(0, place - half) : place + half + 1] if value is not None]
        found.append(mean_band(near))
    return found


def moving_shares(values: Sequence[float | None], trials: Sequence[float], width: int) -> list[Band]:
    """Return the share of the trials in the `width` steps around each place, with Wilson's interval."""
    half = width // 2
    found = []
    for place in range(len(values)):
        near = slice(max(0, place - half), place + half + 1)
        known = [(value, count) for value, count in zip(values[near], trials[near], strict=True) if value is not None]
        found.append(share_band(sum(value * count for value, count in known), sum(count for _, count in known)))
    return found


def inside(band: Band, low: float | None, high: float | None) -> Band:
    """Cut an interval to what its value can be; None is no bound.

    >>> inside(Band(0.02, -0.01, 0.05), 0.0, 1.0)
    Band(value=0.02, low=0.0, high=0.05)
    """

    def cut(value: float | None) -> float | None:
        if value is None:
            return None
        return min(max(value, -math.inf if low is None else low), math.inf if high is None else high)

    return Band(band.value, cut(band.low), cut(band.high))


def window(num_steps: int) -> int:
    """Return how many steps a moving mean spans: 5 % of the run, 5 at least, an odd number."""
    return max(5, num_steps // 20) | 1
