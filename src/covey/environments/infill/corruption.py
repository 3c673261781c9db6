"""Real text made wrong in a few places: what a judge learns to tell from real text, and is measured by."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Places = Callable[[int, int, random.Random], Sequence[int]]
"""(length, how many, chance) -> positions."""

SINGLE = 0.4
"""Share of texts in which one token is replaced."""
PLAUSIBLE = 0.7
"""Share in which what is put in stands between the same neighbours elsewhere: wrong only in what is further off."""
ANY_TOKEN = 0.05
"""Share of the other tokens that may be any of the vocabulary."""


@dataclass(frozen=True)
class Corruption:
    """Replaces tokens by tokens of other real texts."""

    pool: Sequence[Sequence[int]]
    """Real texts as tokens; what is put in comes from them, as often as they have it."""
    places: Places
    ratios: Sequence[float]
    """Largest shares of tokens that are replaced."""
    num_tokens: int
    """Of the vocabulary: now and then any of them is put in, so that a judge knows those that no text has."""
    _between: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for ids in self.pool:
            for position, token_id in enumerate(ids):
                self._between[_neighbours(ids, position)].append(token_id)

    def __call__(self, ids: Sequence[int], chance: random.Random) -> list[int]:
        """Return the text with at least one token replaced by another."""
        most = max(1, round(chance.choice(self.ratios) * len(ids)))
        count = 1 if chance.random() < SINGLE else chance.randint(1, most)
        places = self.places(len(ids), min(count, len(ids)), chance)
        plausible = chance.random() < PLAUSIBLE
        found = list(ids)
        for position in chance.sample(places, len(places)):
            known = self._between[_neighbours(found, position)] if plausible else ()
            found[position] = chance.choice(known) if known else self._token(chance)
        while found == list(ids):
            found[chance.choice(places)] = self._token(chance)
        return found

    def _token(self, chance: random.Random) -> int:
        if chance.random() < ANY_TOKEN:
            return chance.randrange(self.num_tokens)
        return chance.choice(chance.choice(self.pool))


def _neighbours(ids: Sequence[int], position: int) -> tuple[int, int]:
    """Return the tokens before and after, -1 at an end."""
    return (
        ids[position - 1] if position > 0 else -1,
        ids[position + 1] if position + 1 < len(ids) else -1,
    )
