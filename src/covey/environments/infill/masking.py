"""Which tokens of an input are masked. Everything follows from a seed, so there is nothing to remember."""

import random
from collections.abc import Callable, Mapping


def random_tokens(length: int, count: int, span_length: int, chance: random.Random) -> list[int]:
    """Mask each token by itself."""
    return sorted(chance.sample(range(length), count))


def spans(length: int, count: int, span_length: int, chance: random.Random) -> list[int]:
    """Mask stretches of `span_length` tokens, which may touch. The last is cut so that exactly `count` are masked."""
    chosen: set[int] = set()
    while len(chosen) < count:
        size = min(span_length, count - len(chosen))
        start = chance.randint(0, length - size)
        chosen.update(range(start, start + size))
    return sorted(chosen)


def num_masked(length: int, ratio: float) -> int:
    """Return the share as a number of tokens: at least one is masked, and at least one is seen."""
    return max(1, min(length - 1, round(ratio * length)))


MASKINGS: Mapping[str, Callable[[int, int, int, random.Random], list[int]]] = {"random": random_tokens, "spans": spans}
"""Name of a strategy -> (length, how many, span_length, chance) -> positions in rising order."""
