"""Length and repetition formulas on plain numbers, without torch.

`shaping` adds these to rewards, `rewards` offers them as reward functions of their own, in workers without torch.
"""

import math
from collections.abc import Sequence


def check_soft_overlong(max_len: int, cache: int, name: str = "max_len") -> None:
    """Require 1 <= cache <= max_len, with ValueError. `name` is what the caller's users call the length."""
    if not 1 <= cache <= max_len:
        raise ValueError(f"cache must be in [1, {name}={max_len}], got {cache}")


def soft_overlong(length: float, max_len: int, cache: int, *, floor: bool = True) -> float:
    """Return 0 up to max_len - cache tokens, falling linearly to -1 at max_len (DAPO, arXiv 2503.14476).

    With `floor` no further.
    """
    excess = length - (max_len - cache)
    if excess <= 0:
        return 0.0
    return -(min(excess, cache) if floor else excess) / cache


def check_repetition(ngram: int, max_penalty: float) -> None:
    """Refuse ngram < 1 and max_penalty > 0, with ValueError."""
    if ngram < 1:
        raise ValueError(f"ngram must be >= 1, got {ngram}")
    if max_penalty > 0:
        raise ValueError(f"max_penalty must be <= 0, got {max_penalty}")


def repeated_share(token_ids: Sequence[int], ngram: int) -> float:
    """Share of the n-grams that repeat an earlier one (arXiv 2502.03373), 0 for fewer than `ngram` tokens."""
    grams = [tuple(token_ids[i : i + ngram]) for i in range(len(token_ids) - ngram + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def cosine(length: float, max_len: int, at_start: float, at_end: float) -> float:
    """Go from `at_start` at length 0 along half a cosine to `at_end` at max_len and beyond (arXiv 2502.03373)."""
    progress = min(length / max_len, 1.0)
    return at_end + 0.5 * (at_start - at_end) * (1.0 + math.cos(progress * math.pi))
