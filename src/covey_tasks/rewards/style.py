"""Rewards for a text's form: tags, end, length in words."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covey.environments.reward_functions.texts import Completion, final_text

_WORD = re.compile(r"\w{1,30}(?:['’-]\w{1,30}){0,3}|[^\w\s]")
"""A word of at most four parts with 30 letters each: a longer chain is no single word."""


def think_format(completions: Sequence[Completion], **columns: Any) -> list[float]:
    """Return 1 for one closed `<think>` at the beginning (TRL's rule).

    An empty block and text after it pass; text before it does not.
    """
    return [_has_think_format(final_text(completion)) for completion in completions]


def _has_think_format(text: str) -> float:
    before, opening, after = text.partition("<think>")
    return float(before == "" and opening != "" and "<think>" not in after and "</think>" in after)


@dataclass(frozen=True)
class SentenceEnd:
    """1 for a text that ends in one of `marks`, else 0."""

    __name__ = "sentence_end"

    marks: str = "."

    def __post_init__(self) -> None:
        if not self.marks:
            raise ValueError("marks must name at least one character, got none")

    def __call__(self, completions: Sequence[Completion], **columns: Any) -> list[float]:
        return [float(final_text(completion).rstrip().endswith(tuple(self.marks))) for completion in completions]


@dataclass(frozen=True)
class LengthPenalty:
    """0 up to `max_words`, then `per_word` less each; punctuation counts."""

    __name__ = "length_penalty"

    max_words: int
    per_word: float = 0.001

    def __post_init__(self) -> None:
        if self.max_words < 0:
            raise ValueError(f"max_words must be >= 0, got {self.max_words}")
        if self.per_word < 0:
            raise ValueError(f"per_word must be >= 0, got {self.per_word}")

    def __call__(self, completions: Sequence[Completion], **columns: Any) -> list[float]:
        return [self._penalty(final_text(completion)) for completion in completions]

    def _penalty(self, text: str) -> float:
        excess = num_words(text) - self.max_words
        return -self.per_word * excess if excess > 0 else 0.0


def num_words(text: str) -> int:
    """Count words and punctuation marks.

    >>> num_words("Don't panic, reader.")
    5
    """
    return len(_WORD.findall(text))
