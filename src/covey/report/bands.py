"""Intervals of what a report draws, in plain Python."""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

LEVEL = 0.95
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


class Band(NamedTuple):
    """A value and the bounds of its 95 % interval; bounds are None where nothing says how sure it is."""

    value: float | None
    low: float | None
    high: float | None


def wilson(successes: float, trials: float) -> Band:
    """Return Wilson's interval of a share (JASA 22:209, 1927).

    >>> [round(bound, 3) for bound in wilson(0, 10)]
    [0.0, 0.0, 0.278]
    """
    if trials <= 0:
        return Band(None, None, None)
    p = successes / trials
    centre = (p + Z * Z / (2 * trials)) / (1 + Z * Z / trials)
    half = Z / (1 + Z * Z / trials) * math.sqrt(p * (1 - p) / trials + Z * Z / (4 * trials * trials))
    return Band(p, max(0.0, centre - half), min(1.0, centre + half))


def mean_band(values: Sequence[float]) -> Band:
    """Return the normal interval of a mean of independent values, without bounds for fewer than two."""
    if not values:
        return Band(None, None, None)
    mean = fmean(values)
    if len(values) < 2:
        return Band(mean, None, None)
    half = Z * stdev(values) / math.sqrt(len(values))
    return Band(mean, mean - half, mean + half)


def moving_bands(values: Sequence[float | None], width: int) -> list[Band]:
    """Return the mean of the `width` values around each place, with the interval of that mean."""
    half = width // 2
    found = []
    for place in range(len(values)):
        near = [value for value in values[max(0, place - half) : place + half + 1] if value is not None]
        found.append(mean_band(near))
    return found


def window(num_steps: int) -> int:
    """Return how many steps a moving mean spans: 5 % of the run, 5 at least, an odd number."""
    return max(5, num_steps // 20) | 1
