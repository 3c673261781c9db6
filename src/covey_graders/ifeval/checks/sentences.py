"""Split English sentences by untrained Punkt rules (Kiss, Strunk, CL 32:4, 2006).

The trained Punkt model knows abbreviations, words that usually begin a sentence, and tens of thousands of spellings.
Here two short lists stand for it, so that no model file is needed. docs/tasks/ifeval.md says how often they agree.

A sentence ends at the last `.`, `?` or `!` of a word that is followed by white space and more text, or by a closing
mark. A full stop does not end it after an abbreviation, an initial or an ellipsis (unless a usual first word follows),
nor after a number before a small letter. A line break alone ends nothing.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from covey_graders.tables import patterns_beside, table_beside

_RE = patterns_beside(__file__)

_WORDS = {name: frozenset(words.split()) for name, words in table_beside(__file__)["words"].items()}
ABBREVIATIONS, FIRST_WORDS = _WORDS["abbreviations"], _WORDS["first_words"]

_MARK = r"[)\";}\]*:@'({\[?!]"
_RUN = r"-{2,}|\.{2,}|(?:\.\s){2,}\."
_TOKEN = re.compile(
    rf"{_RUN}"
    rf"|(?![(\"`{{\[:;&\#*@)}}\]\-,])\S+?(?=\s|$|{_MARK}|{_RUN}|,(?=$|\s|{_MARK}|{_RUN}))"
    rf"|\S"
)
_END = re.compile(rf"[.?!](?=(?P<after>{_MARK}|\s+(?P<next>\S+)))")


def sentences(text: str) -> list[str]:
    """Return the sentences of a text, an unfinished last one included.

    >>> sentences('The U.S. Army arrived. "It left." Good')
    ['The U.S. Army arrived.', '"It left."', 'Good']
    """
    bounds = [0, *_breaks(text), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(bounds)]
    found = pieces[:1]
    for piece in pieces[1:]:
        # A closing quote or bracket belongs to the sentence before it.
        closing = _RE["closing"].match(piece)
        end = 0 if closing is None else closing.end()
        found[-1] += piece[:end]
        found.append(piece[end:])
    return [sentence.strip() for sentence in found if sentence.strip()]


def _breaks(text: str) -> Iterator[int]:
    """Yield the places at which a new sentence begins."""
    for start, end in _candidates(text):
        if _ends_sentence(text[start : end.end()] + end["after"]):
            yield end.end() if end["next"] is None else end.start("next")


def _candidates(text: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Yield a word's start and its possible end marks: last, and leading (`!!!`)."""
    starts = [word.start() for word in _RE["word"].finditer(text)]
    if starts[:1] == [1]:
        starts[0] = 0  # nltk takes a single blank before the first word for a part of it
    found = [(starts[bisect_right(starts, end.start()) - 1], end) for end in _END.finditer(text)]
    for (start, end), (next_start, _) in pairwise(found):
        if end.start() <= next_start:
            yield start, end
    yield from found[-1:]


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    is_abbreviation: bool
    is_ellipsis: bool
    ends: bool
    """Whether it ends a sentence, as far as the token alone can tell."""


def _ends_sentence(context: str) -> bool:
    """Return True if any token but the last ends a sentence."""
    tokens = [_classified(token) for token in _TOKEN.findall(context)]
    return any(_ends_before(token, after) for token, after in pairwise(tokens))


def _classified(token: str) -> _Token:
    if token in tuple(".?!"):
        return _Token(token, False, False, True)
    if _RE["ellipsis"].fullmatch(token):
        return _Token(token, False, True, False)
    if not token.endswith(".") or token.endswith(".."):
        return _Token(token, False, False, False)
    stem = token[:-1].lower()
    known = stem in ABBREVIATIONS or stem.split("-")[-1] in ABBREVIATIONS
    return _Token(token, known, False, not known)


def _ends_before(token: _Token, after: _Token) -> bool:
    # A sentence may end without a full stop
    if not token.text.endswith("."):
        return token.ends
    # After an abbreviation only a word that begins sentences begins one
    is_initial = _RE["initial"].fullmatch(token.text) is not None
    begins = after.text[0].isupper() and after.text.lower().rstrip(".") in FIRST_WORDS
    if (token.is_abbreviation or token.is_ellipsis) and not is_initial:
        return begins
    # After an initial or a number, what follows decides
    goes_on = after.text[0].islower() or after.text in tuple(";:,.!?")
    if is_initial:
        return token.ends and not goes_on and (begins or not after.text[0].isupper())
    if _RE["number"].fullmatch(token.text):
        return token.ends and not goes_on
    return token.ends
