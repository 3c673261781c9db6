"""Rewards whose module imports nothing heavy: workers that call them start in a moment."""

from collections.abc import Sequence
from typing import Any


def by_bytes(completions: Sequence[str], **columns: Any) -> list[float]:
    """A reward that random completions differ in."""
    return [sum(text.encode()) % 5 / 4 for text in completions]


def share_of_digits(completion: str) -> float:
    """A reward that a policy without any training earns a part of."""
    return sum(letter.isdigit() for letter in completion) / 8


def digits(completions: Sequence[str], **columns: Any) -> list[float]:
    return [share_of_digits(completion) for completion in completions]


def vowels(completions: Sequence[str], **columns: Any) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / 8 for text in completions]
