"""A small grammar: sentences drawn from it, and their exact check.

    sentence -> subject verb [object | manner] "."

Subject and verb agree in number, a determiner with its noun, and "a" or "an" with the sound that follows. So what is
right in one place depends on what stands in another, near or far.
"""

import random
import re
from collections.abc import Iterable

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
"""One sentence in this many is held out."""


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
    """Return distinct sentences, held out or not, by the arguments alone."""
    chance = random.Random(f"grammar/{seed}")
    found: dict[str, None] = {}
    while len(found) < count:
        drawn = sentence(chance)
        if is_held_out(drawn) == held_out:
            found[drawn] = None
    return list(found)


def is_held_out(sentence: str) -> bool:
    """Return True for held-out sentences, by a checksum of the text."""
    return sum(sentence.encode()) % HELD_OUT == 0


def is_sentence(text: str) -> bool:
    """Check whether the whole text is exactly one sentence of the language.

    >>> is_sentence("an old cat sleeps."), is_sentence("a old cat sleeps."), is_sentence("an old cats sleeps.")
    (True, False, False)
    """
    return _SENTENCE.fullmatch(text) is not None


def _noun_phrase(chance: random.Random, plural: bool) -> list[str]:
    words = [_noun(chance.choice(NOUNS), plural)]
    if chance.random() < 0.4:
        words.insert(0, chance.choice(ADJECTIVES))
    return [chance.choice(SEVERAL if plural else (*ONE, "an" if words[0][:1] in SOUNDS else "a")), *words]


def _noun(noun: str, plural: bool) -> str:
    ending = "es" if noun.endswith("x") else "s"
    return noun + ending if plural else noun


def _verb(verb: str, plural: bool) -> str:
    return verb if plural else f"{verb}s"


def _one_of(words: Iterable[str]) -> str:
    return f"(?:{'|'.join(words)})"


def _phrase_pattern(plural: bool) -> str:
    """Return a pattern of noun phrases, with the right article."""
    articles = SEVERAL if plural else (*ONE, f"an(?= [{SOUNDS}])", f"a(?= [^{SOUNDS}])")
    return f"{_one_of(articles)} (?:{_one_of(ADJECTIVES)} )?{_one_of(_noun(noun, plural) for noun in NOUNS)}"


def _sentence_pattern(plural: bool) -> str:
    verbs, alone = (_one_of(_verb(verb, plural) for verb in verbs) for verbs in (VERBS, ALONE))
    objects = _one_of(map(_phrase_pattern, (False, True)))
    return rf"{_phrase_pattern(plural)} (?:{verbs} {objects}|{alone}(?: {_one_of(MANNERS)})?)\."


_SENTENCE = re.compile(_one_of(map(_sentence_pattern, (False, True))))
