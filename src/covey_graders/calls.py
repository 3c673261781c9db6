"""Compare calls of tools with the right ones.

Right are as many calls, in any order, each with its name and its arguments: no more, no fewer, and of the same types.
5 is 5.0 and not "5". A null argument is an absent one, and so is one of its default's value. A right call that has
`any_of` in place of `arguments` lists what each argument may be, "" where it may be absent (BFCL); texts are compared
there without case, blanks and punctuation.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

Call = Mapping[str, Any]
Defaults = Mapping[str, Mapping[str, Any]]
"""Defaults of each tool's arguments."""
_LOOSE = re.compile(r"[\s,./\-_*^]+")


def same_calls(given: Sequence[Call], wanted: Sequence[Call], defaults: Defaults | None = None) -> bool:
    """Return True for the right calls, in any order.

    >>> same_calls([{"name": "f", "arguments": {"a": 1}}], [{"name": "f", "arguments": {"a": 1.0}}])
    True
    """
    left = list(wanted)
    for call in given:
        place = next((place for place, due in enumerate(left) if _same_call(call, due, defaults or {})), None)
        if place is None:
            return False
        del left[place]
    return not left


def _same_call(call: Call, due: Call, defaults: Defaults) -> bool:
    given, usual = call.get("arguments"), defaults.get(due["name"], {})
    if call.get("name") != due["name"] or not isinstance(given, Mapping):
        return False
    if "any_of" in due:
        return _is_allowed(given, due["any_of"])
    ours, theirs = (
        {name: value for name, value in one.items() if value is not None and not _is_usual(usual, name, value)}
        for one in (given, due["arguments"])
    )
    return same_value(ours, theirs)


def _is_usual(usual: Mapping[str, Any], name: str, value: Any) -> bool:
    return name in usual and same_value(usual[name], value)


def same_value(one: Any, other: Any) -> bool:
    """Return True for equal JSON values of equal types."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_value(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, str) and isinstance(other, str):
        return one.strip() == other.strip()
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _is_allowed(given: Mapping[str, Any], choices: Mapping[str, Any]) -> bool:
    """Return True where each argument is one of its choices."""
    absent = [name for name in choices if given.get(name) is None]
    return all(any(value in ("", None) for value in choices[name]) for name in absent) and all(
        name in choices and any(choice != "" and _is_choice(value, choice) for choice in choices[name])
        for name, value in given.items()
        if value is not None
    )


def _is_choice(value: Any, choice: Any) -> bool:
    if isinstance(value, Mapping) and isinstance(choice, Mapping):
        return _is_allowed(value, {name: one if isinstance(one, list) else [one] for name, one in choice.items()})
    if isinstance(value, list | tuple) and isinstance(choice, list | tuple):
        return len(value) == len(choice) and all(map(_is_choice, value, choice))
    if isinstance(value, str) and isinstance(choice, str):
        return _LOOSE.sub("", value).lower() == _LOOSE.sub("", choice).lower()
    return same_value(value, choice)
