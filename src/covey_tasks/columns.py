"""Read columns of tasks' rows: questions, lists, answers as verl keeps them."""

from collections.abc import Mapping, Sequence
from typing import Any

from covey.environments.base import is_message, text_of
from covey.environments.data.columns import VERLS, Row, from_text, value_in
from covey.system.jsonl import as_lists

ASKING = ("system", "developer", "user")
"""Roles of a question."""


def text_in(row: Row, column: str) -> str:
    """Return a column's text, or its messages' single question. ValueError."""
    found = as_lists(value_in(row, column))
    if isinstance(found, str):
        return found
    if isinstance(found, Sequence) and found and all(_asks(message) for message in found):
        return "\n\n".join(text_of(message) for message in found)
    raise ValueError(f"column {column!r} must be text, got {found!r:.80}")


def _asks(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") in ASKING and is_message(message)


def list_in(row: Row, column: str) -> list[Any]:
    """Return a column's list, possibly of JSON text. ValueError."""
    found = from_text(value_in(row, column))
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise ValueError(f"column {column!r} must be a list, got {found!r:.80}")
    return [from_text(entry) for entry in found]


def of_verl(row: Row, problem: str, answer: str, form: str = "{}") -> Row:
    """Return verl's row with the columns read here, others unchanged.

    Args:
        form: how the answer is put, where it is not in that form already.
    """
    truth = value_in(row, VERLS)
    if truth is None:
        return row
    put = truth if form.partition("{}")[0] in str(truth) else form.format(truth)
    return {problem: row.get("prompt"), answer: put} | {name: value for name, value in row.items() if value is not None}


def nothing_in(row: Row, *columns: str) -> str:
    """Describe missing columns, empty or absent.

    >>> nothing_in({"answer": None, "problem": "?"}, "answer", "solution")
    "column 'answer' is empty"
    """
    there = [column for column in columns if column in row]
    if there:
        return " and ".join(f"column {column!r} is empty" for column in there)
    return f"has no column {' or '.join(map(repr, columns))} (has: {', '.join(row)})"
