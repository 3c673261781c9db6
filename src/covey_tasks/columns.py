"""Read columns of tasks' rows: questions, lists, answers as verl keeps them."""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from random import Random
from typing import Any

from covey.environments.base import is_message, text_of
from covey.environments.data.columns import VERLS, Row, as_messages, from_text, value_in

ASKING = ("system", "developer", "user")
"""Roles of a question."""
LETTERS = "ABCDEFGHIJK"
CHOICES = ("choices", "options", "endings")
RIGHT = (
    *("answer", "answerKey", "answer_index", "label", "correct", "Correct Answer", "correct_answer", "cop"),
    *("correct_option", "correct_answer_num"),
)
"""Columns of choices, and of the right one."""
COLUMNS = {
    **dict.fromkeys(["option_?([a-kA-K])", "op([a-k])", "([A-K])", "sol(\\d)", "choice_?(\\d)", "answer(\\d)"], 0),
    **dict.fromkeys(["option_?(\\d)", "mc_answer(\\d)", "answer_?([A-K])"], 1),
}
"""Choices in columns of their own, and the number that the right one's column counts from."""
IN_TEXT = re.compile(r"([a-k]) \) (.*?)(?= ?, ?[a-k] \) |$)")
"""A choice of MathQA's text of all."""
PASSAGES = ("passage", "flores_passage", "context", "article", "narrative", "story", "body", "premise")
"""Columns of a text that a question is about."""
OWN_LETTER = re.compile(r"^\s*\(?[A-K][).:] ?(?=\S)")
"""A letter that a choice begins with already."""
WRONG = ("incorrect answer", "distractor")
"""Beginnings of columns of wrong choices, each in its own."""


def text_in(row: Row, column: str) -> str:
    """Return a column's text, or its messages' single question. ValueError."""
    found = as_messages(value_in(row, column))
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


def as_question(row: Row, problem: str, answer: str) -> Row:
    """Return a row with turns, a passage and choices as one question.

    Its answer to choices is the letter and text of one: a label, a place, or the text itself tells which.
    """
    row = _of_turns(of_verl(row, problem, answer), problem, answer)
    asked = value_in(row, problem)
    if not isinstance(asked, str):
        return row
    passage = next((_text_of(row[name]) for name in row if name.lower() in PASSAGES and name != problem), "").strip()
    asked = asked if passage in asked else f"{passage}\n\n{asked}"
    row = {**row, problem: asked}
    found, labels, first = _choices(row, answer)
    if not 1 < len(found) <= len(LETTERS) or any(isinstance(text, list | Mapping) for text in found):
        return row
    right = next((row[name] for name in (answer, *RIGHT) if row.get(name) is not None), None)
    texts = [OWN_LETTER.sub("", str(text)).strip() for text in found]
    shown = [f"({letter}) {text}" for letter, text in zip(LETTERS, texts, strict=False)]
    places = range(len(texts))
    named = {str(place + first): place for place in places} | dict(zip(texts, places, strict=True))
    named |= dict(zip(map(str, labels), places, strict=False))
    place = right - first if isinstance(right, int) else named.get(str(right).strip(), -1)
    if place not in places and all(row.get(name) is None for name in CHOICES):
        return row
    return {**row, problem: "\n".join([asked, *shown]), answer: shown[place] if place in places else None}


def _choices(row: Row, answer: str) -> tuple[list[Any], list[Any], int]:
    """Return a row's choices, their labels, and the number of the first."""
    found = next((from_text(row[name]) for name in CHOICES if row.get(name) is not None), None)
    if isinstance(found, str):
        found = dict(IN_TEXT.findall(found))
    if isinstance(found, list) and found and all(isinstance(one, Mapping) and len(one) > 1 for one in found):
        found = dict(list(one.values())[:2] for one in found)
    if isinstance(found, Mapping):
        is_table = {"text", "label"} <= found.keys()
        return (found["text"], found["label"], 0) if is_table else (list(found.values()), list(found), 0)
    if found is not None:
        return found if isinstance(found, list) else [], list(LETTERS), 0
    for pattern, first in COLUMNS.items():
        own = {match[1]: row[name] for name in row if (match := re.fullmatch(pattern, name)) and row[name] is not None}
        if {"a", "A", "0", "1"} & own.keys() and len(own) > 1:
            return list(own.values()), [key.upper() for key in own if key.isalpha()], first
    right = next((row[name] for name in (answer, *RIGHT) if row.get(name) is not None), None)
    wrong = [str(value) for name, value in row.items() if name.lower().startswith(WRONG) and value is not None]
    is_told = isinstance(right, str) and bool(wrong)
    return Random(right).sample([right, *wrong], len(wrong) + 1) if is_told else [], list(LETTERS), 0


def _text_of(passage: Any) -> str:
    """Return a passage's text, of titles and sentences too."""
    found = from_text(passage)
    if isinstance(found, Mapping) and {"title", "sentences"} <= found.keys():
        parts = zip(found["title"], found["sentences"], strict=False)
        return "\n".join(f"{title}: {''.join(sentences)}" for title, sentences in parts)
    return found if isinstance(found, str) else ""


def _of_turns(row: Row, problem: str, answer: str) -> Row:
    """Return a row with the first question as problem, its answer apart."""
    turns = from_text(value_in(row, problem) or row.get("conversations"))
    said = as_messages(turns)
    is_told = isinstance(said, list) and all(map(is_message, said[:1])) and isinstance(said[-1], Mapping)
    if not is_told or said[-1].get("role") != "assistant":
        return row
    asked = [text_of(message) for message in takewhile(_asks, said)]
    truth = turns[-1].get("ground_truth")
    found = {answer: truth, "solution": said[-1].get("content")} | {n: v for n, v in row.items() if v is not None}
    return {**found, problem: "\n\n".join(asked)}


def nothing_in(row: Row, *columns: str) -> str:
    """Describe missing columns, empty or absent.

    >>> nothing_in({"answer": None, "problem": "?"}, "answer", "solution")
    "column 'answer' is empty"
    """
    there = [column for column in columns if column in row]
    if there:
        return " and ".join(f"column {column!r} is empty" for column in there)
    return f"has no column {' or '.join(map(repr, columns))} (has: {', '.join(row)})"
