"""Intervals of what a report draws, in plain Python."""

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


def window(num_steps: int) -> int:
    """Return how many steps a moving mean spans: 5 % of the run, 5 at least, an odd number."""
    return max(5, num_steps // 20) | 1
