"""Values and calls as short text for messages; of hostile values too, so no `repr` of large numbers."""

from typing import Any

MAX_ITEMS = 8
MAX_DEPTH = 4
MAX_CHARACTERS = 120
MAX_BITS = 256


def shown(value: Any, depth: int = 0) -> str:
    """Like `repr`, cut short.

    >>> shown((1, "a", [2.5] * 9))
    "(1, 'a', [2.5, 2.5, 2.5, 2.5, 2.5, 2.5, 2.5, 2.5, ...])"
    """
    kind = type(value)
    if depth > MAX_DEPTH:
        return "..."
    if kind is int and value.bit_length() > MAX_BITS:
        return f"<integer of {value.bit_length()} bits>"
    if kind in (str, bytes, bytearray):
        return repr(value) if len(value) <= MAX_CHARACTERS else repr(value[:MAX_CHARACTERS]) + "..."
    if kind is dict:
        return _joined(
            "{", (f"{shown(k, depth + 1)}: {shown(v, depth + 1)}" for k, v in _some(value.items())), value, "}"
        )
    if kind in (list, tuple, set, frozenset):
        opening, closing = _BRACKETS[kind] if value or kind is not set else ("set(", ")")
        end = "," + closing if kind is tuple and len(value) == 1 else closing
        return _joined(opening, (shown(item, depth + 1) for item in _some(value)), value, end)
    return repr(value)


def shown_call(name: str, arguments: tuple[Any, ...] | list[Any], keywords: dict[str, Any]) -> str:
    """A call as it is written."""
    parts = [shown(argument) for argument in arguments] + [f"{key}={shown(value)}" for key, value in keywords.items()]
    return f"{name}({', '.join(parts)})"


def _some(values: Any) -> list[Any]:
    return [item for item, _ in zip(values, range(MAX_ITEMS), strict=False)]


def _joined(opening: str, items: Any, value: Any, closing: str) -> str:
    return opening + ", ".join([*items, *(["..."] if len(value) > MAX_ITEMS else [])]) + closing


_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
}
