"""Read columns of tasks' rows: questions, lists, answers as verl keeps them."""

import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from covey.environments.base import is_message, text_of
from covey.environments.data.columns import VERLS, Row, from_text, value_in
from covey.system.jsonl import as_lists

ASKING = ("system", "developer", "user")
"""Roles of a question."""
LETTERS = "ABCDEFGHIJK"
CHOICES = ("choices", "options", "endings")
RIGHT = ("answer", "answerKey", "answer_index", "label", "correct", "Correct Answer", "correct_answer")
"""Columns of choices, and of the right one."""
OWN_LETTER = re.compile(r"^\s*\(?[A-K][).:] ?(?=\S)")
"""A letter that a choice begins with already."""
WRONG = ("incorrect answer", "distractor")
"""Beginnings of columns of wrong choices, each in its own."""


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


def of_choices(row: Row, problem: str, answer: str) -> Row:
    """Return a row of multiple choice with its choices under the question.

    Its answer is the letter and text of one: a label, a place counted from 0, or the text itself tells which.
    """
    found = next((from_text(row[name]) for name in CHOICES if row.get(name) is not None), None)
    labels = list(LETTERS)
    if isinstance(found, list) and found and all(isinstance(one, Mapping) and len(one) > 1 for one in found):
        found = dict(list(one.values())[:2] for one in found)
    if isinstance(found, Mapping):
        is_table = {"text", "label"} <= found.keys()
        labels, found = (found["label"], found["text"]) if is_table else (list(found), list(found.values()))
    right = next((row[name] for name in (answer, *RIGHT) if row.get(name) is not None), None)
    if found is None and isinstance(right, str):
        wrong = [str(value) for name, value in row.items() if name.lower().startswith(WRONG) and value is not None]
        found = Random(right).sample([right, *wrong], len(wrong) + 1) if wrong else None
    asked = value_in(row, problem)
    if not isinstance(found, list) or not 1 < len(found) <= len(LETTERS) or not isinstance(asked, str):
        return row
    texts = [OWN_LETTER.sub("", str(text)).strip() for text in found]
    shown = [f"({letter}) {text}" for letter, text in zip(LETTERS, texts, strict=False)]
    places = range(len(texts))
    named = dict(zip(map(str, places), places, strict=True)) | dict(zip(texts, places, strict=True))
    named |= dict(zip(map(str, labels), places, strict=False))
    place = right if isinstance(right, int) else named.get(str(right).strip(), -1)
    return {**row, problem: "\n".join([asked, *shown]), answer: shown[place] if place in places else None}


def nothing_in(row: Row, *columns: str) -> str:
    """Describe missing columns, empty or absent.

    >>> nothing_in({"answer": None, "problem": "?"}, "answer", "solution")
    "column 'answer' is empty"
    """
    there = [column for column in columns if column in row]
    if there:
        return " and ".join(f"column {column!r} is empty" for column in there)
    return f"has no column {' or '.join(map(repr, columns))} (has: {', '.join(row)})"
