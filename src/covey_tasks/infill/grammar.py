"""A language small enough to be judged exactly: sentences drawn from a grammar, and the check that takes nothing else.

    sentence -> subject verb [object | manner] "."

Subject and verb agree in number, a determiner with its noun, and "a" or "an" with the sound that follows. So what is
right in one place depends on what stands in another, near or far.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

NOUNS = ("cat", "dog", "owl", "ant", "fox", "king")
ADJECTIVES = ("old", "red", "tall", "angry")
VERBS = ("see", "like", "find")
ALONE = ("sleep", "sing", "run")
MANNERS = ("well", "today", "here")
ONE = ("the", "one", "this")
SEVERAL = ("the", "two", "many")
SOUNDS = "aeiou"
"""Letters before which "a" is "an"."""

HELD_OUT = 10
"""Of so many sentences one is held out."""


def sentence(chance: random.Random) -> str:
    """Return a sentence of the language.

    >>> sentence(random.Random(1))
    'two angry cats like a cat.'
    """
    plural = chance.random() < 0.5
    words = _noun_phrase(chance, plural)
    if chance.random() < 0.5:
        words += [_verb(chance.choice(VERBS), plural), *_noun_phrase(chance, chance.random() < 0.5)]
    else:
        words.append(_verb(chance.choice(ALONE), plural))
        words += [chance.choice(MANNERS)] if chance.random() < 0.5 else []
    return " ".join(words) + "."


def sentences(count: int, seed: str, *, held_out: bool) -> list[str]:
    """Return different sentences, of those that are held out or of the others: a pure function of the arguments."""
    chance = random.Random(f"grammar/{seed}")
    found: dict[str, None] = {}
    while len(found) < count:
        drawn = sentence(chance)
        if is_held_out(drawn) == held_out:
            found[drawn] = None
    return list(found)


def is_held_out(sentence: str) -> bool:
    """Decide by its own letters, so that no sentence is in both splits."""
    return sum(sentence.encode()) % HELD_OUT == 0


def is_sentence(text: str) -> bool:
    """Return whether the whole text is exactly one sentence of the language.

    >>> is_sentence("an old cat sleeps."), is_sentence("a old cat sleeps."), is_sentence("an old cats sleeps.")
    (True, False, False)
    """
    if not text.endswith("."):
        return False
    words = text[:-1].split(" ")
    return any(rest == len(words) for plural in (False, True) for rest in _sentence_ends(words, plural))


@dataclass(frozen=True, slots=True)
class _Match:
    """A noun phrase that was found, and where it ends."""

    plural: bool
    end: int


def _sentence_ends(words: Sequence[str], plural: bool) -> Iterator[int]:
    for subject in _noun_phrases(words, 0):
        if subject.plural == plural:
            yield from _predicate_ends(words, subject.end, plural)


def _predicate_ends(words: Sequence[str], start: int, plural: bool) -> Iterator[int]:
    if start >= len(words):
        return
    if words[start] in {_verb(verb, plural) for verb in VERBS}:
        yield from (found.end for found in _noun_phrases(words, start + 1))
    if words[start] in {_verb(verb, plural) for verb in ALONE}:
        yield start + 1
        if start + 1 < len(words) and words[start + 1] in MANNERS:
            yield start + 2


def _noun_phrases(words: Sequence[str], start: int) -> Iterator[_Match]:
    for length in (2, 3):
        phrase = words[start : start + length]
        if len(phrase) < length or (length == 3 and phrase[1] not in ADJECTIVES):
            continue
        for plural in (False, True):
            is_noun = phrase[-1] in {_noun(noun, plural) for noun in NOUNS}
            if is_noun and phrase[0] in _determiners(plural, phrase[1]):
                yield _Match(plural, start + length)


def _determiners(plural: bool, next_word: str) -> tuple[str, ...]:
    return SEVERAL if plural else (*ONE, "an" if next_word[:1] in SOUNDS else "a")


def _noun_phrase(chance: random.Random, plural: bool) -> list[str]:
    words = [_noun(chance.choice(NOUNS), plural)]
    if chance.random() < 0.4:
        words.insert(0, chance.choice(ADJECTIVES))
    return [chance.choice(_determiners(plural, words[0])), *words]


def _noun(noun: str, plural: bool) -> str:
    ending = "es" if noun.endswith("x") else "s"
    return noun + ending if plural else noun


def _verb(verb: str, plural: bool) -> str:
    return verb if plural else f"{verb}s"
