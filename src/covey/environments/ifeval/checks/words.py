"""Counting words: runs of letters, and words in capitals by the rules of the Penn Treebank as nltk reads them."""

import re

from covey.environments.ifeval.checks.sentences import sentences

_WORD = re.compile(r"\w+")
_SINGLE_LETTER = re.compile(r"'(?=[^\Wmtsdn]\b)", re.IGNORECASE)
_OPENING = re.compile(r"[«“‘„`]|^\"|(?<=[ (\[{<«“‘„`])(?:\"|'')")
_OUTER_MARK = re.compile(r"[;@#$%&?!`]|\.{2,}|[:,](?!\d)|(?<=[^.])\.(?=[\])}>\"'»”’ ]*\s*$)")
_LAST_APOSTROPHE = re.compile(r"(?<=[^'])'(?= )")
_INNER_MARK = re.compile(r"[*()<>{}\[\]\"»”’]|''|--")
_CLITICS = (
    re.compile(r"(?<=[^' ])(?='[smdSMD] |' )"),
    re.compile(r"(?<=[^' ])(?=(?:'ll|'LL|'re|'RE|'ve|'VE|n't|N'T) )"),
)
_JOINED = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        *(r"\b(can)(not)\b", r"\b(d)('ye)\b", r"\b(gim|lem)(me)\b", r"\b(gon)(na)\b", r"\b(got)(ta)\b"),
        *(r"\b(more)('n)\b", r"\b(wan)(na)(?=\s)", r" ('t)(is)\b", r" ('t)(was)\b"),
    )
)
"""CANNOT, GIMME and 'TIS are two words each."""


def count_words(text: str) -> int:
    """Count runs of letters, digits and underscores: don't is two, snake_case one, a run of Chinese one."""
    return sum(1 for _ in _WORD.finditer(text))


def count_capital_words(text: str) -> int:
    """Count words with an upper-case letter and no lower-case one: I, U.S. and 3D count, DON'T counts twice."""
    return sum(word.isupper() for sentence in sentences(text) for word in _words(sentence))


def _words(sentence: str) -> list[str]:
    """Return the words of a sentence less its punctuation. The order of the steps is nltk's, and matters."""
    text = _SINGLE_LETTER.sub("' ", _OPENING.sub(" ` ", sentence))
    text = _LAST_APOSTROPHE.sub(" ' ", _OUTER_MARK.sub("  ", text))
    text = f" {' '.join(_INNER_MARK.sub('  ', text).split())} "
    for clitic in _CLITICS:
        text = clitic.sub(" ", text)
    for joined in _JOINED:
        text = joined.sub(r" \1 \2 ", text)
    return text.split()
