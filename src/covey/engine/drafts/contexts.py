"""Earlier texts of a prompt, and counts of their next tokens."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

ORDERS = (4, 2, 1)
"""Lengths of the contexts whose next tokens are counted."""
DOUBT = 0.5
"""Weight of shorter contexts for each kind of token that was seen after a longer one."""
REST = 0.1
"""Weight below which shorter contexts are not looked at."""
REMEMBERED = 2**23
"""Tokens of finished completions that are remembered, four bytes each."""


class Contexts:
    """Counts of the tokens that followed each context."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], dict[int, int]] = {}

    def add(self, token_ids: Sequence[int], first: int) -> None:
        """Count the tokens from place `first` on."""
        for place in range(first, len(token_ids)):
            token_id = token_ids[place]
            for order in ORDERS:
                if order <= place:
                    counts = self._next.setdefault(tuple(token_ids[place - order : place]), {})
                    counts[token_id] = counts.get(token_id, 0) + 1

    def guess(self, context: Sequence[int]) -> tuple[int, float] | None:
        """Return the likeliest next token and its probability, None without any."""
        mixed: dict[int, float] = {}
        rest = 1.0
        for order in ORDERS:
            counts = self._next.get(tuple(context[-order:]))
            if counts is None:
                continue
            total = sum(counts.values())
            own = total / (total + DOUBT * len(counts))
            for token_id, count in counts.items():
                mixed[token_id] = mixed.get(token_id, 0.0) + rest * own * count / total
            rest *= 1.0 - own
            if rest < REST:
                break
        if not mixed:
            return None
        token_id = max(mixed, key=mixed.__getitem__)
        return token_id, mixed[token_id]


class Memory:
    """Finished completions by prompt, those of prompts unused for longest forgotten."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._texts: OrderedDict[int, list[array[int]]] = OrderedDict()
        self._num_tokens = 0

    def keep(self, prompt_ids: tuple[int, ...], token_ids: Sequence[int]) -> None:
        key = hash(prompt_ids)
        self._texts.setdefault(key, []).append(array("i", token_ids))
        self._texts.move_to_end(key)
        self._num_tokens += len(token_ids)
        while self._num_tokens > self._most:
            _, texts = self._texts.popitem(last=False)
            self._num_tokens -= sum(map(len, texts))

    def contexts(self, prompt_ids: tuple[int, ...]) -> Contexts:
        """Return the counts of a prompt and its earlier texts."""
        known = Contexts()
        known.add(prompt_ids, 1)
        tail = prompt_ids[-ORDERS[0] :]
        for text in self._texts.get(hash(prompt_ids), ()):
            known.add((*tail, *text), len(tail))
        return known
