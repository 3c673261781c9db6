"""Inputs of golden cases: drawn from a seed, short decimals, and the degenerate shapes written out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

NAN, INF = math.nan, math.inf


@dataclass(frozen=True)
class Given:
    """What a case is asked: settings, inputs, and what it is there for."""

    note: str
    params: dict[str, Any]
    inputs: dict[str, Any]


@dataclass(frozen=True)
class Document:
    """The cases of one file of golden values."""

    name: str
    source: str
    """The algorithms, and their papers."""
    cases: Callable[["Draw"], list[Given]]


class Draw:
    """Numbers of a document, the same in every Python: `Random.random` of a string seed is guaranteed to be."""

    def __init__(self, name: str) -> None:
        self._random = Random(f"golden values of {name}")

    def number(self, low: float, high: float, digits: int = 3) -> float:
        """Return a number of a few decimals."""
        return round(low + (high - low) * self._random.random(), digits)

    def numbers(self, count: int, low: float, high: float, digits: int = 3) -> list[float]:
        """Return a list of them."""
        return [self.number(low, high, digits) for _ in range(count)]

    def table(self, rows: int, columns: int, low: float, high: float) -> list[list[float]]:
        """Return rows of them."""
        return [self.numbers(columns, low, high) for _ in range(rows)]

    def whole(self, low: int, high: int) -> int:
        """Return an integer, both ends included."""
        return low + int((high - low + 1) * self._random.random())

    def wholes(self, count: int, low: int, high: int) -> list[int]:
        """Return a list of them."""
        return [self.whole(low, high) for _ in range(count)]

    def near(self, values: Sequence[Sequence[float]], spread: float) -> list[list[float]]:
        """Return log-probs that differ from `values` by up to `spread`, and stay below 0."""
        return [[min(round(x + self.number(-spread, spread), 3), -0.001) for x in row] for row in values]


def mask_of(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Return rows of ones, padded at the end."""
    return [[int(t < length) for t in range(width)] for length in lengths]


PLAIN = mask_of([5, 3, 4, 2], 5)
HOLES = [[0, 1, 1, 0, 1], [1, 0, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0]]
EMPTY = mask_of([4, 0, 5, 3], 5)
NOTHING = mask_of([0, 0, 0, 0], 5)


def batch(draw: Draw, spread: float, mask: list[list[int]] = PLAIN, base: str = "old_log_probs") -> dict[str, Any]:
    """Return log-probs, those they are compared with, and one advantage for each row, of both signs."""
    log_probs = draw.table(len(mask), len(mask[0]), -2.5, -0.05)
    sizes = draw.numbers(len(mask), 0.2, 2.0, 2)
    return {
        "log_probs": log_probs,
        base: draw.near(log_probs, spread) if spread else [list(row) for row in log_probs],
        "advantages": [size if i % 2 else -size for i, size in enumerate(sizes)],
        "mask": mask,
    }


def per_token(draw: Draw, given: dict[str, Any]) -> dict[str, Any]:
    """Return the same rows with an advantage for each token."""
    return given | {"advantages": draw.table(len(given["mask"]), len(given["mask"][0]), -1.5, 1.5)}


def fouled(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the same rows with NaN and infinities wherever the mask is 0."""
    foul = [NAN, INF, -INF]

    def spoil(rows: list[list[float]]) -> list[list[float]]:
        pairs = zip(rows, given["mask"], strict=True)
        return [[x if m else foul[(i + t) % 3] for t, (x, m) in enumerate(zip(row, mask, strict=True))]
                for i, (row, mask) in enumerate(pairs)]  # fmt: skip

    return given | {name: spoil(given[name]) for name in names}
