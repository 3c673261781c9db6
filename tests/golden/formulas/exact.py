"""Numbers of 60 digits, and derivatives of them: nothing here rounds before the last step.

A formula that holds a factor constant (sg[x]) takes the same numbers twice, once to vary and once to hold.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mpmath

MP = mpmath.mp.clone()
MP.dps = 60
STEP = MP.mpf(10) ** -20
"""A central difference is off by STEP^2 and by 10^-60 / STEP: 40 digits are right."""
NOTHING = MP.mpf(10) ** -35
"""What is smaller is 0: terms that cancel."""
MARGIN = MP.mpf(10) ** -12
"""No comparison may be closer than this, unless both sides are equal: float64 must decide alike."""

Real = Any
"""A number of MP."""
Params = dict[str, Any]
Expected = dict[str, Any]


def exact(value: Any) -> Any:
    """Turn every float of a nested structure into a number of MP, and leave everything else."""
    if isinstance(value, float):
        return MP.mpf(value)
    if isinstance(value, list):
        return [exact(entry) for entry in value]
    if isinstance(value, dict):
        return {name: exact(entry) for name, entry in value.items()}
    return value


def rounded(value: Any) -> Any:
    """Turn every number of MP into the nearest float64, the inverse of `exact`."""
    if isinstance(value, MP.mpf):
        return 0.0 if abs(value) < NOTHING else float(value)
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    if isinstance(value, dict):
        return {name: rounded(entry) for name, entry in value.items()}
    return value


def over(numerator: Real, denominator: Real) -> Real:
    """Divide, of integers too; 0 where the denominator is 0."""
    return MP.mpf(numerator) / denominator if denominator != 0 else MP.mpf(0)


def mean(values: Sequence[Real]) -> Real:
    """Return the mean; 0 of no values."""
    return over(sum(values), len(values))


def clamp(value: Real, low: Real, high: Real) -> Real:
    """Return the value, or the bound it lies beyond; None is no bound."""
    if low is not None and value < low:
        return MP.mpf(low)
    return MP.mpf(high) if high is not None and value > high else value


def above(value: Real, bound: Real) -> bool:
    """Return whether value > bound, and refuse to decide where float64 could see it otherwise."""
    gap = abs(value - bound)
    assert gap < NOTHING or gap > MARGIN, f"{value} is too near {bound}"
    return bool(value > bound and gap > MARGIN)


def gradient(function: Callable[[Any], Real], at: Any) -> Any:
    """Return the derivative of `function` with respect to every number of a nested list, in its shape."""
    return _map_places(lambda place: _derivative(function, at, place), at)


def _derivative(function: Callable[[Any], Real], at: Any, place: tuple[int, ...]) -> Real:
    return (function(_moved(at, place, STEP)) - function(_moved(at, place, -STEP))) / (2 * STEP)


def _moved(nested: Any, place: tuple[int, ...], step: Real) -> Any:
    if not place:
        return nested + step
    copy = list(nested)
    copy[place[0]] = _moved(nested[place[0]], place[1:], step)
    return copy


def _map_places(function: Callable[[tuple[int, ...]], Real], nested: Any, place: tuple[int, ...] = ()) -> Any:
    if not isinstance(nested, list):
        return function(place)
    return [_map_places(function, entry, (*place, index)) for index, entry in enumerate(nested)]


def valid(mask: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield (row, position) of every token of the mask."""
    return ((i, t) for i, row in enumerate(mask) for t, counts in enumerate(row) if counts)
