"""Check that an answer is on topic: one empty text follows many rules."""

import re
from bisect import bisect_left
from collections.abc import Collection
from functools import lru_cache

from covey_graders.tables import table_beside

SHARE_OF_TOPICS = 6
"""A text that names more than 1/n of all topics is a list of topics, about none of them."""
FEWEST_TOPICS = 2
SHARE_OF_CONTENT = 0.2
"""Least share of content words among an answer's different words; stories and letters have 0.4 and more."""
ECHO, FEWEST_TOLD = 0.75, 5
"""Share of the words of a question that a text repeats to be its echo, and how many such words there must be."""
_WORDS = {name: frozenset(words.split()) for name, words in table_beside(__file__).items()}
FUNCTION_WORDS, DESCRIBING = _WORDS["function_words"], _WORDS["describing"]
MAX_LETTERS = 12
"""Longer runs of letters outside ASCII are in a script without blanks, and count as a word for every four letters."""

_WORD = re.compile(r"[^\W\d_]{2,}")
FEWEST_LETTERS = 4
"""A shorter stem names what it begins only where nothing but an ending follows: bees, and not been."""
_ENDING = re.compile(r"(?<=..)(?:(?<=(.))\1ings?|ings?|ies|s)$")


def num_different_words(text: str, besides: Collection[str] = ()) -> int:
    """Count different words of two letters and more, without `besides`.

    >>> num_different_words("<<a>> *a* [b] ... P.S. Oh, oh, well")
    2
    """
    words = words_of(text).difference(besides)
    return sum(1 if word.isascii() or len(word) <= MAX_LETTERS else len(word) // 4 for word in words)


def words_of(text: str) -> frozenset[str]:
    return frozenset(word.casefold() for word in _WORD.findall(text))


def has_content(text: str, asked: str, fewest: int) -> bool:
    """Check that a text has enough content words of its own.

    Words of the question, with any ending, and function words, do not count.
    """
    told = words_of(asked)
    begun = tuple(_stem(word) for word in told if len(_stem(word)) >= FEWEST_LETTERS)
    own = num_different_words(text, told | FUNCTION_WORDS | {w for w in words_of(text) if w.startswith(begun)})
    return own >= max(fewest, SHARE_OF_CONTENT * num_different_words(text, told))


def echoes(text: str, asked: str, wanted: str) -> bool:
    """Return True if a text repeats most of a question's words.

    Args:
        wanted: what a right answer has to say, which is not counted.
    """
    said, whole = (" ".join(_WORD.findall(words.casefold())) for words in (text, asked))
    told = words_of(asked) - words_of(wanted) - FUNCTION_WORDS
    repeated = len(told & words_of(text)) > ECHO * len(told) and len(told) >= FEWEST_TOLD
    return f" {whole} " in f" {said} " or repeated


def is_about(text: str, topic: str, topics: Collection[str]) -> bool:
    """Check that a text names its topic and not many others besides.

    One word of a topic names it, in some form, where it is no describing one; so does the topic in one word.

    >>> is_about("They built treehouses.", "tree houses", ["tree houses", "paper kites"])
    True
    """
    words = frozenset(word.casefold() for word in _WORD.findall(text.replace("-", "")))
    if not _is_named(topic, words):
        return False
    return sum(_is_named(other, words) for other in topics) <= max(FEWEST_TOPICS, len(topics) // SHARE_OF_TOPICS)


def _is_named(topic: str, words: frozenset[str]) -> bool:
    sorted_words, stems = _forms(words)
    return any(
        stem in stems if len(stem) < FEWEST_LETTERS else _begins_one_of(sorted_words, stem) for stem in _names(topic)
    )


@lru_cache(maxsize=1)  # every topic is looked for in the same text
def _forms(words: frozenset[str]) -> tuple[list[str], frozenset[str]]:
    """Return words in order, and without their endings."""
    return sorted(words), frozenset(map(_stem, words))


def _begins_one_of(words: list[str], stem: str) -> bool:
    place = bisect_left(words, stem)
    return place < len(words) and words[place].startswith(stem)


@lru_cache(maxsize=256)
def _names(topic: str) -> tuple[str, ...]:
    """Return a topic's names without endings: swim and winterswim."""
    words = _WORD.findall(topic.casefold().replace("-", ""))
    naming = [word for word in words if word not in DESCRIBING] or words
    return tuple(map(_stem, (*naming, "".join(words))))


def _stem(word: str) -> str:
    return _ENDING.sub("", word)
