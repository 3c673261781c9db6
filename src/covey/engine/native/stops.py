"""Stop strings: detect the token that completes one."""

from collections.abc import Callable, Container, Sequence

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included, nothing cleaned up."""

HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"
MAX_HELD = 16
"""Tokens after which an undecodable tail is no partial character."""


class QuietTokens:
    """Tokens after which no stop string is complete or begun.

    A stop string neither contains their text, with or without a space before it, nor begins or ends within it.
    """

    def __init__(self, stop: Sequence[str], decode: Decode) -> None:
        self._stop = tuple(stop)
        self._decode = decode
        self._known: dict[int, bool] = {}

    def __contains__(self, token_id: object) -> bool:
        assert isinstance(token_id, int), "tokens are numbers"
        if token_id not in self._known:
            text = self._decode([token_id])
            # Half a character, and a piece that others decode to another text, say nothing alone.
            is_whole = bool(text) and HALF_CHARACTER not in text and not text.startswith("##")
            touches = any(_touches(shown, stop) for shown in (text, f" {text}") for stop in self._stop)
            self._known[token_id] = is_whole and not touches
        return self._known[token_id]


def _touches(text: str, stop: str) -> bool:
    """Return True if a stop string can overlap a text."""
    if text in stop or stop in text:
        return True
    lengths = range(1, min(len(text), len(stop)) + 1)
    return any(text.endswith(stop[:length]) or text.startswith(stop[-length:]) for length in lengths)


class StopText:
    """Watches a completion for stop strings, at constant cost per token.

    Only a window is decoded: the unsettled tokens after some settled ones, because many tokenizers drop a space at the
    start of what they decode. Tokens are unsettled while they end within a character (byte-level pieces).
    """

    def __init__(self, stop: Sequence[str], decode: Decode, quiet: Container[int] = ()) -> None:
        """Decode nothing after tokens that are `quiet`."""
        self._stop = tuple(stop)
        self._decode = decode
        self._quiet = quiet
        self._tail = ""
        """Settled text in which a stop string may have begun."""
        self._context_start = 0
        self._settled = 0

    def completed_by_last(self, token_ids: Sequence[int]) -> bool:
        """Check after each token if it completes a stop string."""
        if token_ids[-1] in self._quiet:
            self._tail, self._context_start, self._settled = "", len(token_ids) - 1, len(token_ids)
            return False
        # Decode with context: the text of a token depends on those before
        context = self._decode(token_ids[self._context_start : self._settled])
        window = self._decode(token_ids[self._context_start :])
        text = self._tail + window[len(context) :]
        if any(stop in text for stop in self._stop):
            return True
        # A character may be split over tokens, whose rest is awaited
        if not window.endswith(HALF_CHARACTER) or len(token_ids) - self._settled >= MAX_HELD:
            longest = max(len(stop) for stop in self._stop)
            self._tail = text[len(text) - longest + 1 :] if longest <= len(text) else text
            self._context_start, self._settled = self._settled, len(token_ids)
        return False
