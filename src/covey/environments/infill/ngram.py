"""A language model that has nothing in common with policy or judge: characters, counted.

Each order is interpolated with the one below by Witten and Bell's rule (IEEE Trans. Inf. Theory 37:1085, 1991); below
the first, all byte values are equally likely.
"""

import math
from collections import Counter
from collections.abc import Iterable

NUM_VALUES = 256


class NgramModel:
    """Log-probability of texts by the characters before each."""

    def __init__(self, texts: Iterable[str], order: int = 5) -> None:
        self._order = order
        self._counts: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        for text in texts:
            for end in range(1, len(text) + 1):
                self._count(text[max(0, end - order) : end])

    def log_prob(self, text: str) -> float:
        """Return nats per character. 0 for an empty text."""
        found = [self._log_prob(text[max(0, end - self._order) : end]) for end in range(1, len(text) + 1)]
        return sum(found) / len(found) if found else 0.0

    def _count(self, stretch: str) -> None:
        for start in range(len(stretch)):
            gram = stretch[start:]
            self._kinds[gram[:-1]] += gram not in self._counts
            self._counts[gram] += 1
            self._totals[gram[:-1]] += 1

    def _log_prob(self, stretch: str) -> float:
        probability = 1 / NUM_VALUES
        for start in range(len(stretch) - 1, -1, -1):
            gram = stretch[start:]
            kinds, total = self._kinds[gram[:-1]], self._totals[gram[:-1]]
            if total == 0:
                break
            probability = (self._counts[gram] + kinds * probability) / (total + kinds)
        return math.log(probability)
