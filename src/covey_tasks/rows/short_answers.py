"""Two small tasks for real instruct models: short sentences, and JSON.

`brief` asks for one sentence about a thing, `forms` for a JSON object about it. Verdicts are programs: a sentence must
name the thing and use words listed for it (things.txt), so "The map is a map." earns nothing. Splits share no thing.
"""

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from covey.environments.reward_functions.texts import Completion, final_text

Splits = Mapping[str, list[dict[str, Any]]]

THINGS = Path(__file__).with_name("things.txt")
NUM_TEST = 48
"""Things held out."""
FEWEST_WORDS, MOST_WORDS = 5, 12
SAID = 2
"""Listed words that make full sense."""
CROWDED = 0.6
"""Share of listed words above which a sentence is a list."""
BEGUN = 0.05
"""Reward of an answer that begins with a brace and is no JSON yet."""
WRAPPED = 0.25
"""Reward of JSON with text around it."""
QUESTIONS = ("What is {a}?", "Why do people care about {a}?", "Describe {a} to a child.", "What can you do with {a}?")
FORMS = {
    "Sell me {a}.": ("product", "price"),
    "Describe {a}.": ("thing", "colour"),
    "Say what {a} is for.": ("thing", "use"),
    "Invent a person who likes {a}.": ("name", "age", "likes"),
}
COLOUR = re.compile(
    r"\b(black|blue|brown|gold|golden|gr[ae]y|green|orange|pink|purple|red|silver|tan|white|yellow|clear)\b"
)
ENDINGS = frozenset(["", *["e", "y", "s", "es", "d", "ed", "ing", "er", "ers", "r", "ies", "ied", "ying", "ier"]])


def brief() -> Splits:
    """Return rows of both splits with prompt, thing and words.

    >>> brief()["test"][0]["prompt"]
    [{'role': 'user', 'content': 'Describe a mushroom to a child. Answer in one sentence of at most 12 words.'}]
    """
    ask = f" Answer in one sentence of at most {MOST_WORDS} words."
    return _rows(lambda draw: {"ask": draw.choice(QUESTIONS) + ask})


def forms() -> Splits:
    """Return rows of both splits with prompt, thing, words and keys."""

    def ask(draw: random.Random) -> dict[str, Any]:
        question, keys = draw.choice(list(FORMS.items()))
        *others, last = keys
        named = f"{', '.join(others)} and {last}"
        return {"ask": f"{question} Answer with nothing but one JSON object with the keys {named}.", "keys": keys}

    return _rows(ask)


def _rows(draw_row: Callable[[random.Random], dict[str, Any]]) -> Splits:
    draw = random.Random("short answers")
    lines = [line for line in THINGS.read_text().splitlines() if not line.startswith("#")]
    rows = []
    for line in draw.sample(lines, len(lines)):
        asked, words = line.split(": ")
        row = draw_row(draw)
        messages = [{"role": "user", "content": row.pop("ask").format(a=asked)}]
        rows.append({"prompt": messages, "thing": asked.split()[-1], "words": words.split(), **row})
    return {"train": rows[NUM_TEST:], "test": rows[:NUM_TEST]}


def tells(
    completions: Sequence[Completion], thing: Sequence[str], words: Sequence[Sequence[str]], **columns: Any
) -> list[float]:
    """Return each answer's sense times its brevity.

    Sense is 0 where the thing is not named, and a half for each of two listed words.
    """
    texts = [final_text(completion).strip() for completion in completions]
    return [sense(text, name, listed) * brevity(text) for text, name, listed in zip(texts, thing, words, strict=True)]


def brevity(text: str) -> float:
    """Return 1 for a short sentence, 0 from twice the words.

    Else long answers, with more room for sense, would be learned.
    """
    inside, end = text[:-1], text[-1:]
    if end == "." and not re.search(r"[.!?\n]", inside) and FEWEST_WORDS <= len(text.split()) <= MOST_WORDS:
        return 1.0
    return 0.5 * min(1.0, max(0.0, 2 - len(text.split()) / MOST_WORDS))


def sense(text: str, thing: str, words: Sequence[str]) -> float:
    said = tokens(text)
    if not any(is_form(token, thing) for token in said):
        return 0.0
    found = {token: [word for word in words if is_form(token, word)] for token in said}
    listed = [token for token in said if found[token]]
    if len(listed) > CROWDED * len(said):
        return 0.0
    return min(SAID, len({hits[0] for hits in found.values() if hits})) / SAID


def fills_in(
    completions: Sequence[Completion],
    thing: Sequence[str],
    words: Sequence[Sequence[str]],
    keys: Sequence[Sequence[str]],
    **columns: Any,
) -> list[float]:
    """Return each JSON object's worth, a quarter with text around it.

    A tenth is for an object, another for the right keys, the rest is shared by the values that fit their keys.
    """
    asked = zip(completions, thing, words, keys, strict=True)
    return [worth(final_text(given).strip(), name, listed, wanted) for given, name, listed, wanted in asked]


def worth(text: str, thing: str, words: Sequence[str], keys: Sequence[str]) -> float:
    first, last = text.find("{"), text.rfind("}")
    found = parsed(text[first : last + 1]) if 0 <= first < last else None
    if found is None:
        return BEGUN if first == 0 else 0.0
    whole = 1.0 if (first, last) == (0, len(text) - 1) else WRAPPED
    if set(found) != set(keys):
        return 0.1 * whole
    right = sum(VALUES[key](found[key], thing, words) for key in keys)
    return whole * (0.2 + 0.8 * right / len(keys))


def parsed(text: str) -> dict[str, Any] | None:
    """Return the text's JSON object, None for duplicates or invalid numbers."""
    try:
        found = json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def tokens(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def is_form(token: str, word: str) -> bool:
    """Return True for a word's English form, such as carries of carry."""
    if any(token.startswith(stem) and token[len(stem) :] in ENDINGS for stem in _stems(word)):
        return True
    return token in (word + word[-1] + "ing", word + word[-1] + "ed", word + word[-1] + "er")


@cache
def _stems(word: str) -> tuple[str, ...]:
    return (word, word[:-1]) if len(word) > 3 and word[-1] in "ey" else (word,)


def _text(value: Any, most_words: int) -> list[str]:
    """Return a short text's words, else none."""
    said = tokens(value) if isinstance(value, str) and value.isprintable() else []
    return said if len(said) <= most_words else []


def _names(value: Any, thing: str, words: Sequence[str]) -> bool:
    return any(is_form(token, thing) for token in _text(value, 4))


def _is_price(value: Any, thing: str, words: Sequence[str]) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


def _is_age(value: Any, thing: str, words: Sequence[str]) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 120


def _is_colour(value: Any, thing: str, words: Sequence[str]) -> bool:
    return COLOUR.search(" ".join(_text(value, 3))) is not None


def _is_use(value: Any, thing: str, words: Sequence[str]) -> bool:
    said = _text(value, MOST_WORDS)
    return any(is_form(token, word) for token in said for word in words)


def _is_name(value: Any, thing: str, words: Sequence[str]) -> bool:
    said = _text(value, 3)
    return bool(said) and value[0].isupper() and not {"name", "person", thing} & set(said)


VALUES: dict[str, Callable[[Any, str, Sequence[str]], bool]] = {
    "product": _names,
    "thing": _names,
    "likes": _names,
    "price": _is_price,
    "age": _is_age,
    "colour": _is_colour,
    "use": _is_use,
    "name": _is_name,
}
"""Key to whether a value fits it, given the thing and the words listed for it."""
