"""Whether an answer is about what was asked: rules judge form alone, and one text without content follows many."""

import re
from bisect import bisect_left
from collections.abc import Collection
from functools import lru_cache

SHARE_OF_TOPICS = 6
"""A text that names more than one in so many of all topics is a list of topics, and about none of them."""
FEWEST_TOPICS = 2
MAX_LETTERS = 12
"""Longer runs of letters outside ASCII are in a script without blanks, and count as a word for every four letters."""

_WORD = re.compile(r"[^\W\d_]{2,}")
_ENDING = re.compile(r"(?<=..)(?:(?<=(.))\1ings?|ings?|ies|s)$")


def num_different_words(text: str, asked: str = "") -> int:
    """Count different words of two letters and more, whatever their case.

    Args:
        asked: words of the question, which do not count.

    >>> num_different_words("<<a>> *a* [b] ... P.S. Oh, oh, well")
    2
    """
    words = {word.casefold() for word in _WORD.findall(text)} - {word.casefold() for word in _WORD.findall(asked)}
    return sum(1 if word.isascii() or len(word) <= MAX_LETTERS else len(word) // 4 for word in words)


def repeats(text: str, asked: str) -> bool:
    """Check whether a text has all words of the question, in their order and with none between."""
    said, wanted = (" ".join(_WORD.findall(words.casefold())) for words in (text, asked))
    return f" {wanted} " in f" {said} "


def is_about(text: str, topic: str, topics: Collection[str]) -> bool:
    """Check that a text names its topic, each word of it in some form, and not many other topics besides."""
    words = sorted({word.casefold() for word in _WORD.findall(text.replace("-", ""))})
    if not _is_named(topic, words):
        return False
    return sum(_is_named(other, words) for other in topics) <= max(FEWEST_TOPICS, len(topics) // SHARE_OF_TOPICS)


def _is_named(topic: str, words: list[str]) -> bool:
    return all(_begins_one_of(words, stem) for stem in _stems(topic))


def _begins_one_of(words: list[str], stem: str) -> bool:
    place = bisect_left(words, stem)
    return place < len(words) and words[place].startswith(stem)


@lru_cache(maxsize=256)
def _stems(topic: str) -> tuple[str, ...]:
    """Return the words of a topic without their endings: `winter swimming` is winter, swim."""
    words = _WORD.findall(topic.casefold().replace("-", ""))
    return tuple(_ENDING.sub("", word) for word in words)
