"""What stands in a column of somebody's row: within another one, as JSON text, as messages, as verl has it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from covey.environments.base import is_message, text_of

Row = Mapping[str, Any]

VERLS = "reward_model.ground_truth"
"""Where rows of verl hold the right answer."""
ASKING = ("system", "developer", "user")
"""Who speaks in a question."""


def value_in(row: Row, column: str) -> Any:
    """Return what stands in a column, or at the end of a path of dots. None where there is nothing.

    >>> value_in({"reward_model": {"ground_truth": "9"}}, "reward_model.ground_truth")
    '9'
    """
    if column in row:
        return row[column]
    found: Any = row
    for name in column.split("."):
        found = from_json(found)
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def from_json(value: Any) -> Any:
    """Return the list or object that a text spells as JSON, as copies of nested columns do. Anything else as it is.

    >>> from_json("[{}]"), from_json("a list")
    ([{}], 'a list')
    """
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def text_in(row: Row, column: str) -> str:
    """Return the text in a column, or the one question that its messages ask. ValueError for anything else."""
    found = value_in(row, column)
    if isinstance(found, str):
        return found
    if isinstance(found, Sequence) and found and all(_asks(message) for message in found):
        return "\n\n".join(text_of(message) for message in found)
    raise ValueError(f"column {column!r} must be text, got {found!r:.80}")


def _asks(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") in ASKING and is_message(message)


def list_in(row: Row, column: str) -> list[Any]:
    """Return the list in a column, whose entries may be JSON text too. ValueError for anything else."""
    found = from_json(value_in(row, column))
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise ValueError(f"column {column!r} must be a list, got {found!r:.80}")
    return [from_json(entry) for entry in found]


def of_verl(row: Row, problem: str, answer: str, form: str = "{}") -> Row:
    """Return a row of verl's with the columns that are read here, if it has them not. Another row as it is.

    Args:
        form: how the answer is put, where it is not in that form already.
    """
    truth = value_in(row, VERLS)
    if truth is None:
        return row
    put = truth if form.partition("{}")[0] in str(truth) else form.format(truth)
    return {problem: row.get("prompt"), answer: put} | {name: value for name, value in row.items() if value is not None}


def nothing_in(row: Row, *columns: str) -> str:
    """Say that a row has nothing in any of the columns: null is not the same as a name that is not there.

    >>> nothing_in({"answer": None, "problem": "?"}, "answer", "solution")
    "column 'answer' is null"
    """
    null = [column for column in columns if column in row]
    if null:
        return " and ".join(f"column {column!r} is null" for column in null)
    return f"has neither a column {' nor '.join(map(repr, columns))} (has: {', '.join(row)})"
