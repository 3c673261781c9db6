"""Values and calls as short text for messages."""

from collections import deque
from collections.abc import Iterable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Any

from covey_sandbox.inside.codec import Opaque

MAX_ITEMS = 8
MAX_DEPTH = 4
MAX_CHARACTERS = 90
"""Maximum characters of a value, so that call, expected and actual value fit into one message."""
MAX_BITS = 256


def short_repr(value: Any) -> str:
    """Return a short `repr`; never raises, and works no longer than its text.

    >>> short_repr((1, "a", [2.5] * 9))
    "(1, 'a', [2.5, 2.5, 2.5, 2.5, 2.5, 2.5, 2.5, 2.5, ...])"
    """
    return _cut(_pieces(value, 0))


def shown_call(name: str, arguments: Iterable[Any], keywords: dict[str, Any]) -> str:
    """Return a call as text, cut short."""
    parts = [_pieces(argument, 0) for argument in arguments]
    parts += [_with(f"{key}=", _pieces(value, 0)) for key, value in keywords.items()]
    return f"{name}({_cut(_separate(parts))})"


def _cut(pieces: Iterator[str]) -> str:
    text = ""
    try:
        for piece in pieces:
            text += piece[: MAX_CHARACTERS + 1]
            if len(text) > MAX_CHARACTERS:
                return text[:MAX_CHARACTERS] + "..."
    except Exception as error:  # of objects that test code made: nothing is known of their methods
        text += f"<{type(error).__name__}>"
    return text


def _pieces(value: Any, depth: int) -> Iterator[str]:
    kind = next((base for base in _PLAIN if issubclass(type(value), base)), type(value))
    if kind is int:
        yield int.__repr__(value) if value.bit_length() <= MAX_BITS else f"<integer of {value.bit_length()} bits>"
    elif kind in (str, bytes, bytearray):
        yield repr(kind(value[: MAX_CHARACTERS + 1]))
    elif kind in _BRACKETS:
        yield from _container(kind, value, depth)
    elif kind is dict:
        pairs = (_separate([_pieces(k, depth + 1), _pieces(v, depth + 1)], ": ") for k, v in dict.items(value))
        yield from _with("{", _items(pairs, depth), "}")
    elif kind is Fraction:
        yield from _with("Fraction(", _separate([_pieces(part, depth) for part in value.as_integer_ratio()]), ")")
    elif kind is range:
        step = [] if value.step == 1 else [value.step]
        numbers = [_pieces(number, depth) for number in (value.start, value.stop, *step)]
        yield from _with("range(", _separate(numbers), ")")
    else:
        yield repr(value) if kind in _SHORT else f"<{kind.__name__}>"


def _container(kind: type, value: Any, depth: int) -> Iterator[str]:
    opening, closing = _BRACKETS[kind]
    if kind is set and not value:
        opening, closing = "set(", ")"
    if kind is tuple and len(value) == 1:
        closing = ",)"
    return _with(opening, _items((_pieces(item, depth + 1) for item in value), depth), closing)


def _items(items: Iterator[Iterator[str]], depth: int) -> Iterator[str]:
    """Yield the first items, shown lazily."""
    first = list(islice(items, MAX_ITEMS + 1))
    shortened = [*first[:MAX_ITEMS], iter(["..."])] if len(first) > MAX_ITEMS else first
    return _separate(shortened) if depth < MAX_DEPTH or not first else iter(["..."])


def _separate(parts: list[Iterator[str]], separator: str = ", ") -> Iterator[str]:
    for index, part in enumerate(parts):
        yield separator if index else ""
        yield from part


def _with(opening: str, pieces: Iterator[str], closing: str = "") -> Iterator[str]:
    yield opening
    yield from pieces
    yield closing


_SHORT = (type(None), bool, float, complex, Decimal, Opaque, datetime, date, time, timedelta)
_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
    deque: ("deque([", "])"),
    type({}.keys()): ("dict_keys([", "])"),
    type({}.values()): ("dict_values([", "])"),
    type({}.items()): ("dict_items([", "])"),
}
_PLAIN = (*_SHORT, int, str, bytes, bytearray, dict, range, Fraction, *_BRACKETS)
"""bool before int, which it is a kind of."""
