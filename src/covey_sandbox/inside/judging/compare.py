"""Compare an answer with the expected plain value.

Types are strict: bool is not int, list is not tuple. One exception: where a float is expected an int of equal value
passes. nan meets only nan, an infinity only itself. Sets and dicts ignore order.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tolerance:
    """Floats are close where |got - expected| <= abs + rel * |expected|."""

    rel: float = 0.0
    abs: float = 0.0
    is_json: bool = False
    """A tuple passes for a list."""


EXACT = Tolerance()


def matches(expected: Any, got: Any, tolerance: Tolerance = EXACT) -> bool:
    """Return True if `got` counts as `expected`.

    >>> matches(2.0, 2), matches(2, 2.0), matches(1, True), matches([1], (1,))
    (True, False, False, False)
    """
    kind = type(expected)
    if kind is float:
        return type(got) in (float, int) and _close(expected, got, tolerance)
    if tolerance.is_json and type(got) is tuple:
        got = list(got)
    if kind is not type(got):
        return False
    if kind in (list, tuple, deque):
        return len(expected) == len(got) and all(
            matches(one, other, tolerance) for one, other in zip(expected, got, strict=True)
        )
    special = _COMPARISONS.get(kind)
    return special(expected, got, tolerance) if special else bool(expected == got)


def _close(expected: float, got: float | int, tolerance: Tolerance) -> bool:
    if expected == got:
        return True
    if math.isnan(expected):
        return got != got
    if not tolerance.rel and not tolerance.abs:  # other numbers are rounded below: 2**53 + 1 would pass for 2.0**53
        return False
    try:
        distance = abs(float(got) - expected)
    except OverflowError:
        return False
    # "<=" and never "not >", so that nan fails; an infinity is met only by itself, above
    return math.isfinite(distance) and distance <= tolerance.abs + tolerance.rel * abs(expected)


def _complex(expected: complex, got: complex, tolerance: Tolerance) -> bool:
    return _close(expected.real, got.real, tolerance) and _close(expected.imag, got.imag, tolerance)


def _sets(expected: Any, got: Any, tolerance: Tolerance) -> bool:
    if len(expected) != len(got):
        return False
    pairs = {key_of(one): (one, None) for one in expected}
    others = {key_of(other): (other, None) for other in got}
    return _pair_up(pairs, others, tolerance)


def _dicts(expected: dict[Any, Any], got: dict[Any, Any], tolerance: Tolerance) -> bool:
    if len(expected) != len(got):
        return False
    pairs = {key_of(key): (key, value) for key, value in expected.items()}
    others = {key_of(key): (key, value) for key, value in got.items()}
    return _pair_up(pairs, others, tolerance)


def _pair_up(pairs: dict[Hashable, Any], others: dict[Hashable, Any], tolerance: Tolerance) -> bool:
    """Match each pair with one of `others`, by key or by equality."""
    if len(pairs) != len(others):
        return False
    left = []
    for key, (item, value) in pairs.items():
        if key not in others:
            left.append((item, value))
        elif not matches(value, others.pop(key)[1], tolerance):
            return False
    for item, value in left:
        found = next((key for key, (other, _) in others.items() if matches(item, other, tolerance)), None)
        if found is None or not matches(value, others.pop(found)[1], tolerance):
            return False
    return True


def key_of(value: Any) -> Hashable:
    """Return a key that is equal for equal values of equal types."""
    kind = type(value)
    if kind is float:
        return (kind, (value + 0.0).hex())  # -0.0 is 0.0, nan is nan
    if kind is complex:
        return (kind, key_of(value.real), key_of(value.imag))
    if kind is tuple:
        return (kind, tuple(key_of(item) for item in value))
    if kind is frozenset:
        return (kind, frozenset(key_of(item) for item in value))
    return (kind, value)


_COMPARISONS: dict[type, Callable[[Any, Any, Tolerance], bool]] = {
    complex: _complex,
    set: _sets,
    frozenset: _sets,
    dict: _dicts,
}
