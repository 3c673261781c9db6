"""Intervals for the curves of a report, in plain Python."""

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple
from statistics import fmean
from typing import NamedTuple

from covey.algorithm.intervals import bounds_of, mean_interval, wilson

LEVEL = 0.95
MAX_POINTS = 600
"""Maximum points of a curve; longer ones are averaged over neighbouring steps."""


class Band(NamedTuple):
    """A value and its band, an interval or the spread of steps."""

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
    """Compute the interval of a mean, without bounds for few values."""
    if not values:
        return NOTHING
    found = mean_interval(values, LEVEL, bounds_of(values))
    is_known = math.isfinite(found.low) and len(values) > 1
    return Band(found.value, *((found.low, found.high) if is_known else (None, None)))


def moving_bands(values: Sequence[float | None], width: int) -> list[Band]:
    """Compute moving means with a standard deviation to both sides.

    That is no interval: a few steps that resemble each other do not tell how sure their mean is.
    """
    half = width // 2

    def around(place: int) -> Band:
        near = [value for value in values[max(0, place - half) : place + half + 1] if value is not None]
        if len(near) < 2:
            return Band(near[0] if near else None, None, None)
        mean = fmean(near)
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in near) / (len(near) - 1))
        return Band(mean, mean - spread, mean + spread)

    return _of_points(len(values), around)


def moving_shares(values: Sequence[float | None], trials: Sequence[float], width: int) -> list[Band]:
    """Compute moving shares with Wilson's interval."""
    half = width // 2

    def around(place: int) -> Band:
        near = slice(max(0, place - half), place + half + 1)
        known = [(value, count) for value, count in zip(values[near], trials[near], strict=True) if value is not None]
        return share_band(sum(value * count for value, count in known), sum(count for _, count in known))

    return _of_points(len(values), around)


def _of_points(number: int, band_at: Callable[[int], Band]) -> list[Band]:
    """Compute a band for each place, one for places drawn together."""
    size = block(number)
    middles = [start + min(size, number - start) // 2 for start in range(0, number, size)]
    found = list(map(band_at, middles))
    return [found[place // size] for place in range(number)]


def block(number: int) -> int:
    """Count the neighbours that are drawn as one point."""
    return max(1, -(-number // MAX_POINTS))


def inside(band: Band, low: float | None, high: float | None) -> Band:
    """Clamp an interval to bounds, of which None is none.

    >>> inside(Band(0.02, -0.01, 0.05), 0.0, 1.0)
    Band(value=0.02, low=0.0, high=0.05)
    """
    least, most = -math.inf if low is None else low, math.inf if high is None else high
    return Band(band.value, *(None if end is None else min(max(end, least), most) for end in (band.low, band.high)))


def window(num_steps: int) -> int:
    """Choose a moving mean's odd width, 5 % of the steps."""
    return min(max(5, num_steps // 20) | 1, max(1, (num_steps - 1) | 1))
