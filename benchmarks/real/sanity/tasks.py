"""Candidates for the set: short questions whose answers a program judges, right or wrong, as a whole."""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
"""The prompt as messages, an id, the kind that says how it is judged, and what the judge compares with."""

NUM_OF_KIND = {"number": 24, "word": 24, "sentence": 12, "object": 12}
"""Candidates of each kind; numbers and words are cheapest, two or three tokens an answer."""
THINGS = tuple(
    word
    for line in (
        "anchor apple arrow bakery bear bell boat bridge candle castle clock cloud cow crab desert dog door drum eagle",
        "engine farm ferry flute forest fox garden ghost glove guitar harbour horse island jacket kettle kite ladder",
        "lake lamp lemon library lion magnet map market mirror moon mountain museum needle ocean owl paper parrot",
        "piano pillow planet potato rabbit river robot rose school shadow ship shoe snail spider station stone",
    )
    for word in line.split()
)
CAPITALS = {
    **{"France": "Paris", "Italy": "Rome", "Germany": "Berlin", "Japan": "Tokyo", "Egypt": "Cairo", "Greece": "Athens"},
    **{"Portugal": "Lisbon", "Austria": "Vienna", "Norway": "Oslo", "Sweden": "Stockholm", "Poland": "Warsaw"},
    **{"Hungary": "Budapest", "Kenya": "Nairobi", "Peru": "Lima", "Cuba": "Havana", "Chile": "Santiago"},
    **{"Iran": "Tehran", "Iraq": "Baghdad", "Turkey": "Ankara", "Ireland": "Dublin", "Finland": "Helsinki"},
    **{"Denmark": "Copenhagen", "China": "Beijing", "Russia": "Moscow"},
}
QUESTIONS = ("What is a {}?", "Describe the {} to a child.", "What can you do with a {}?")
OBJECTS = (
    ("Describe the {}", ("name", "colour")),
    ("Say what a {} is for", ("thing", "use")),
    ("Sell me a {}", ("product", "price")),
)
SHOWN: Mapping[str, Sequence[tuple[str, str]]] = {
    "number": (("system", "You answer with a number alone."), ("user", "4 + 3 = ?"), ("assistant", "7")),
    "word": (
        ("system", "You answer with one word alone."),
        ("user", "What is the capital of Spain?"),
        ("assistant", "Madrid"),
    ),
    "object": (
        ("system", "You answer with one JSON object alone."),
        ("user", "Describe the sun. Keys: name and size."),
        ("assistant", '{"name": "sun", "size": "large"}'),
    ),
}
"""Turns before the question that show how it is done: without one a small model seldom finds the form at all."""


def candidates(seed: int = 0) -> list[Row]:
    """Return questions of every kind, no two the same, in an order that mixes the kinds."""
    draw = random.Random(seed)
    rows = [row for kind, number in NUM_OF_KIND.items() for row in _distinct(KINDS[kind](draw), number)]
    draw.shuffle(rows)
    return [{"id": f"{row['kind']}-{place}", **row} for place, row in enumerate(rows)]


def _distinct(rows: Iterator[Row], number: int) -> list[Row]:
    found: dict[str, Row] = {}
    while len(found) < number:
        row = next(rows)
        found.setdefault(row["prompt"][-1]["content"], row)
    return list(found.values())


def _row(kind: str, question: str, *target: str) -> Row:
    turns = [*SHOWN.get(kind, ()), ("user", question)]
    prompt = [{"role": role, "content": content} for role, content in turns]
    return {"prompt": prompt, "kind": kind, "target": list(target)}


def _numbers(draw: random.Random) -> Iterator[Row]:
    while True:
        sign, a, b = draw.choice("+-*"), draw.randint(1, 9), draw.randint(1, 9)
        value = {"+": a + b, "-": a - b, "*": a * b}[sign]
        if 0 < value <= 20:
            yield _row("number", f"{a} {sign} {b} = ?", str(value))


def _words(draw: random.Random) -> Iterator[Row]:
    while True:
        country = draw.choice(list(CAPITALS))
        yield _row("word", f"What is the capital of {country}?", CAPITALS[country])


def _sentences(draw: random.Random) -> Iterator[Row]:
    while True:
        thing = draw.choice(THINGS)
        question = draw.choice(QUESTIONS).format(thing)
        yield _row("sentence", f"{question} Answer in one sentence of at most 12 words.", thing)


def _objects(draw: random.Random) -> Iterator[Row]:
    while True:
        (ask, keys), thing = draw.choice(OBJECTS), draw.choice(THINGS)
        yield _row("object", f"{ask.format(thing)}. Keys: {keys[0]} and {keys[1]}.", thing, *keys)


KINDS: Mapping[str, Callable[[random.Random], Iterator[Row]]] = {
    "number": _numbers,
    "word": _words,
    "sentence": _sentences,
    "object": _objects,
}


# ------------------------------------------------------------------------------------------------ judging


def solved(
    completions: Sequence[Any], kind: Sequence[str], target: Sequence[Sequence[str]], **rest: Any
) -> list[float]:
    """Return 1 for each answer that is right as a whole, else 0: a reward function of covey."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [float(JUDGES[k](text.strip(), t)) for text, k, t in zip(texts, kind, target, strict=True)]


def _is_said(text: str, target: Sequence[str]) -> bool:
    """Nothing but what was asked for, and a full stop at most."""
    return text.removesuffix(".") == target[0]


def _is_sentence(text: str, target: Sequence[str]) -> bool:
    """One sentence of 4 to 12 words, at least 4 of them different, that names the thing."""
    words = re.findall(r"[a-z']+", text.lower())
    is_one = text.endswith(".") and text.count(".") == 1 and "\n" not in text
    return is_one and 4 <= len(text.split()) <= 12 and target[0] in words and len(set(words)) >= 4


def _is_object(text: str, target: Sequence[str]) -> bool:
    """A JSON object of these two keys alone, whose first value names the thing and whose second is another."""
    thing, *keys = target
    try:
        found = json.loads(text)
    except ValueError:
        return False
    if not isinstance(found, dict) or set(found) != set(keys):
        return False
    name, other = (str(found[key]).strip().lower() for key in keys)
    return thing in name and len(other) > 0 and other != name


JUDGES: Mapping[str, Callable[[str, Sequence[str]], bool]] = {
    "number": _is_said,
    "word": _is_said,
    "sentence": _is_sentence,
    "object": _is_object,
}
