"""Stop strings: notice, token by token, the token that completes one."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included, nothing cleaned up."""

HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
MAX_HELD = 16
"""A tail that stays undecodable for so many tokens is no character in the making."""


class StopText:
    """Watches one completion for stop strings, at a cost that does not grow with its length.

    Only a window is decoded: the tokens not yet settled, after some that are, because many tokenizers drop a space at
    the start of what they decode. Tokens are unsettled while they end within a character (byte-level pieces).
    """

    def __init__(self, stop: Sequence[str], decode: Decode) -> None:
        self._stop = tuple(stop)
        self._decode = decode
        self._tail = ""
        """Settled text in which a stop string may have begun."""
        self._context_start = 0
        self._settled = 0

    def completed_by_last(self, token_ids: Sequence[int]) -> bool:
        """Return True if the newest of all tokens so far completes a stop string. To be asked after each token."""
        context = self._decode(token_ids[self._context_start : self._settled])
        window = self._decode(token_ids[self._context_start :])
        text = self._tail + window[len(context) :]
        if any(stop in text for stop in self._stop):
            return True
        if not window.endswith(HALF_CHARACTER) or len(token_ids) - self._settled >= MAX_HELD:
            longest = max(len(stop) for stop in self._stop)
            self._tail = text[len(text) - longest + 1 :] if longest <= len(text) else text
            self._context_start, self._settled = self._settled, len(token_ids)
        return False
