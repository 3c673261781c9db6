"""Counts of the tokens after each context of earlier texts, in drafts.h."""

import ctypes
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from covey.policy.kernels.compiler import KERNELS, library, struct_of

SOURCE, HEADER = KERNELS / "layer.c", KERNELS / "drafts.h"
ORDERS = (8, 4, 2)
"""Lengths of the contexts in texts of the same prompt."""
SHARED_ORDERS = (4, 2, 1)
"""Lengths of those in texts of any prompt."""
REMEMBERED = 2**22
"""Tokens of finished completions that are remembered, eight bytes each."""
SHARED = 2**16
"""Most tokens of any prompt's texts that are counted at a time: a hundred bytes each."""
TextsCall = struct_of(HEADER, "Texts")


class Contexts:
    """The tokens that followed each context, and their probabilities."""

    def __init__(self, orders: Sequence[int] = ORDERS) -> None:
        self.call, self._c = TextsCall(orders=tuple(orders)), library(SOURCE)
        weakref.finalize(self, self._c.covey_clear_texts, ctypes.byref(self.call))

    @property
    def num_tokens(self) -> int:
        return int(self.call.num_tokens)

    def clear(self) -> None:
        self._c.covey_clear_texts(ctypes.byref(self.call))

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], first: int) -> None:
        """Count the tokens from place `first` on, whose log-probs these are."""
        given = array("i", token_ids), array("f", logprobs)
        pointers = (ctypes.c_void_p(each.buffer_info()[0]) for each in given)
        numbers = ctypes.c_int64(first), ctypes.c_int64(len(logprobs))
        self._c.covey_count_text(ctypes.byref(self.call), *pointers, *numbers)


class Memory:
    """Finished completions by prompt, those of prompts unused for longest forgotten."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most
        self._texts: OrderedDict[int, list[tuple[array[int], array[float]]]] = OrderedDict()
        self._num_tokens = 0
        self.shared = Contexts(SHARED_ORDERS)
        """Contexts in texts of all prompts."""

    def keep(self, prompt_ids: tuple[int, ...], token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        key = hash(prompt_ids)
        self._texts.setdefault(key, []).append((array("i", token_ids), array("f", logprobs)))
        self._texts.move_to_end(key)
        self._num_tokens += len(token_ids)
        if self.shared.num_tokens > SHARED:
            self.shared.clear()
        tail = prompt_ids[-ORDERS[0] :]
        self.shared.add((*tail, *token_ids), logprobs, len(tail))
        while self._num_tokens > self._most:
            _, texts = self._texts.popitem(last=False)
            self._num_tokens -= sum(len(own_ids) for own_ids, _ in texts)

    def contexts(self, prompt_ids: tuple[int, ...]) -> Contexts:
        """Return the contexts of a prompt and its earlier texts."""
        known = Contexts()
        known.add(prompt_ids, [0.0] * (len(prompt_ids) - 1), 1)
        tail = prompt_ids[-ORDERS[0] :]
        for token_ids, logprobs in self._texts.get(hash(prompt_ids), ()):
            known.add((*tail, *token_ids), logprobs, len(tail))
        return known
