"""Next tokens guessed from earlier texts of a prompt.

A draw inverts the distribution in the order of token ids, by a uniform number that is known before. So the guess is
where this number falls in the distribution that earlier texts tell, from the probabilities they were drawn with.
"""

import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence

ORDERS = (4, 2, 1)
"""Lengths of the contexts in texts of the same prompt."""
SHARED_ORDERS = (3, 2, 1)
"""Lengths of those in texts of any prompt."""
REST = 0.1
"""Probability of other tokens below which shorter contexts are not looked at."""
DEVIATION = 0.02
"""Standard deviation of what is known of a cumulative probability, however often its context was seen."""
MANY = 2**17
"""Token ids that an unknown one is thought to be among."""
REMEMBERED = 2**22
"""Tokens of finished completions that are remembered, eight bytes each."""
SHARED = 2**16
"""Most tokens of any prompt's texts that are counted at a time: a kilobyte each."""

Seen = dict[tuple[int, ...], dict[int, tuple[int, float]]]
"""Tokens that followed each context: their number, and the sum of their probabilities."""


class Contexts:
    """The tokens that followed each context, and their probabilities."""

    def __init__(self, orders: Sequence[int] = ORDERS, beside: "Contexts | None" = None) -> None:
        """Look into `beside` too."""
        self._orders, self._seen, self.num_tokens = orders, Seen(), 0
        tables: list[tuple[int, Seen]] = [(order, self._seen) for order in orders]
        tables += [] if beside is None else beside._tables
        self._tables: list[tuple[int, Seen]] = sorted(tables, key=lambda table: -table[0])

    def clear(self) -> None:
        self._seen.clear()
        self.num_tokens = 0

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], first: int) -> None:
        """Count the tokens from place `first` on, whose log-probs these are."""
        self.num_tokens += len(logprobs)
        for place, logprob in enumerate(logprobs, first):
            for order in self._orders:
                if order <= place:
                    after = self._seen.setdefault(tuple(token_ids[place - order : place]), {})
                    count, total = after.get(token_ids[place], (0, 0.0))
                    after[token_ids[place]] = count + 1, total + math.exp(logprob)

    def guess(self, context: Sequence[int], uniform: float) -> tuple[int, float] | None:
        """Return the token that `uniform` draws and its chance, None without any."""
        told, rest, num_seen = self._tell(context)
        below = 0.0
        for token_id in sorted(told):
            unknown = rest * min(1.0, token_id / MANY)  # of smaller ids
            low, below = below + unknown, below + told[token_id]
            if below + unknown > uniform:
                sides = _beyond(uniform, low, num_seen) - _beyond(uniform, below + unknown, num_seen)
                return token_id, max(0.0, 0.5 * sides)
        return (max(told, key=told.__getitem__), 0.0) if told else None

    def _tell(self, context: Sequence[int]) -> tuple[dict[int, float], float, int]:
        """Return next tokens' probabilities, the rest, and the tokens seen."""
        told: dict[int, float] = {}
        rest, num_seen = 1.0, 0
        for order, seen in self._tables:
            after = seen.get(tuple(context[-order:]))
            if after is None:
                continue
            number = sum(count for count, _ in after.values())
            num_seen, left = num_seen or number, rest
            for token_id, (count, total) in after.items():
                chance = rest * min(count / number, total / count)
                told[token_id] = told.get(token_id, 0.0) + chance
                left -= chance
            rest = max(0.0, left)
            if rest < REST:
                break
        return told, rest, num_seen


def _beyond(uniform: float, bound: float, num_seen: int) -> float:
    """Return 1 for a number far above an estimated bound, -1 below."""
    if not 1e-9 < bound < 1.0 - 1e-9:
        return 1.0 if bound < 0.5 else -1.0
    return math.erf((uniform - bound) / math.sqrt(bound * (1.0 - bound) / (num_seen + 1) + DEVIATION**2))


class Memory:
    """Finished completions by prompt, those of prompts unused for longest forgotten."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._texts: OrderedDict[int, list[tuple[array[int], array[float]]]] = OrderedDict()
        self._num_tokens = 0
        self._shared = Contexts(SHARED_ORDERS)  # texts of all prompts

    def keep(self, prompt_ids: tuple[int, ...], token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        key = hash(prompt_ids)
        self._texts.setdefault(key, []).append((array("i", token_ids), array("f", logprobs)))
        self._texts.move_to_end(key)
        self._num_tokens += len(token_ids)
        if self._shared.num_tokens > SHARED:
            self._shared.clear()
        tail = prompt_ids[-ORDERS[0] :]
        self._shared.add((*tail, *token_ids), logprobs, len(tail))
        while self._num_tokens > self._most:
            _, texts = self._texts.popitem(last=False)
            self._num_tokens -= sum(len(own_ids) for own_ids, _ in texts)

    def contexts(self, prompt_ids: tuple[int, ...]) -> Contexts:
        """Return the contexts of a prompt and its earlier texts."""
        known = Contexts(beside=self._shared)
        known.add(prompt_ids, [0.0] * (len(prompt_ids) - 1), 1)
        tail = prompt_ids[-ORDERS[0] :]
        for token_ids, logprobs in self._texts.get(hash(prompt_ids), ()):
            known.add((*tail, *token_ids), logprobs, len(tail))
        return known
