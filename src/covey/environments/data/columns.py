"""Read columns of rows: nested, or as text."""

import ast
import json
from collections.abc import Mapping
from typing import Any

from covey.system.jsonl import as_lists

Row = Mapping[str, Any]

VERLS = "reward_model.ground_truth"
"""Column of the right answer in rows of verl."""


def value_in(row: Row, column: str) -> Any:
    """Return a column's value, by a path of dots, else None.

    >>> value_in({"reward_model": {"ground_truth": "9"}}, "reward_model.ground_truth")
    '9'
    """
    if column in row:
        return row[column]
    found: Any = row
    for name in column.split("."):
        found = from_text(found)
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def as_messages(value: Any) -> Any:
    """Return turns of `from` and `value` as messages, other values unchanged.

    >>> as_messages([{"from": "human", "value": "6 * 7?"}])
    [{'role': 'user', 'content': '6 * 7?'}]
    """
    turns = as_lists(value)
    if not isinstance(turns, list | tuple) or not turns or not all(map(is_turn, turns)):
        return turns
    return [{"role": SPEAKERS.get(turn["from"], turn["from"]), "content": turn.get("value")} for turn in turns]


def is_turn(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("from"), str)


def from_text(value: Any) -> Any:
    """Return the list or mapping that a text spells, other values unchanged.

    JSON, or Python as tables of CSV have it; an array becomes a list.

    >>> from_text("[{}]"), from_text("[{'a': None}]"), from_text("{1, 2}")
    ([{}], [{'a': None}], '{1, 2}')
    """
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return as_lists(value)
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(value.strip())
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        return found if isinstance(found, list | dict) else value
    return value


SPEAKERS = {
    "human": "user",
    **dict.fromkeys(("gpt", "bot", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response"), "tool"),
}
"""Names of ShareGPT's speakers, and of those that data sets of tool calls added."""
