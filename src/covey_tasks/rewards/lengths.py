"""Rewards on sampled tokens: length, and repetition."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covey.algorithm.credit import penalties

TokenIds = Sequence[Sequence[int]]
"""The tokens of each completion, the stop token included."""


@dataclass(frozen=True)
class SoftOverlong:
    """Penalty from `max_length` - `cache` tokens, down to -1 (DAPO, arXiv 2503.14476)."""

    __name__ = "soft_overlong"

    max_length: int
    cache: int

    def __post_init__(self) -> None:
        penalties.check_soft_overlong(self.max_length, self.cache, "max_length")

    def __call__(self, completion_ids: TokenIds, **columns: Any) -> list[float]:
        return [penalties.soft_overlong(len(ids), self.max_length, self.cache) for ids in completion_ids]


@dataclass(frozen=True)
class Repetition:
    """`max_penalty` times the share of repeated token n-grams (arXiv 2502.03373)."""

    __name__ = "repetition"

    ngram: int = 3
    max_penalty: float = -1.0

    def __post_init__(self) -> None:
        penalties.check_repetition(self.ngram, self.max_penalty)

    def __call__(self, completion_ids: TokenIds, **columns: Any) -> list[float]:
        shares = [penalties.repeated_share(ids, self.ngram) for ids in completion_ids]
        return [self.max_penalty * share if share else 0.0 for share in shares]
