"""The two small tasks for real models: rows that share no thing, and verdicts that empty answers cannot earn."""

import json
from typing import Any

import pytest

from covey_tasks.rows.short_answers import FORMS, NUM_TEST, QUESTIONS, THINGS, brief, fills_in, forms, tells

Row = dict[str, Any]
BRIEF = {row["thing"]: row for rows in brief().values() for row in rows}


def worth(text: str, row: Row) -> float:
    columns = {name: [value] for name, value in row.items() if name != "prompt"}
    judge = fills_in if "keys" in row else tells
    return judge(completions=[[{"role": "assistant", "content": text}]], **columns)[0]


def form_of(keys: tuple[str, ...], thing: str = "axe") -> Row:
    return {"thing": thing, "words": BRIEF[thing]["words"], "keys": keys}


@pytest.mark.parametrize("rows", [brief, forms])
def test_rows_are_the_same_every_time_and_no_thing_is_in_both_splits(rows: Any) -> None:
    assert rows() == rows()
    things = {split: {row["thing"] for row in found} for split, found in rows().items()}
    assert len(things["test"]) == NUM_TEST
    assert not things["train"] & things["test"]


def test_no_question_gives_away_a_word_that_is_listed_and_each_thing_has_many() -> None:
    questions = [*QUESTIONS, "Say what {a} is for."]  # the form whose value is judged by the words
    assert questions[-1] in FORMS
    asked = {word for question in questions for word in question.lower().strip("?.").split()}
    for thing, row in BRIEF.items():
        assert len(set(row["words"])) == len(row["words"]) >= 8, thing
        assert not {*asked, thing} & set(row["words"]), thing
    assert len(BRIEF) == len([line for line in THINGS.read_text().splitlines() if ":" in line])


@pytest.mark.parametrize(
    ("thing", "text", "value"),
    [
        ("map", "A map shows where places are in a country.", 1.0),
        ("eagle", "The eagle is a bird of prey.", 1.0),
        ("eagle", "Eagles fly over the highest mountains, hunting.", 1.0),
        ("ship", "A ship is a boat.", 0.5),
        ("ship", "A ship is a large vessel that carries people over the seas, and more.", 0.5 * (2 - 14 / 12)),
        ("ship", "A ship is a large vessel that carries people. " * 3, 0.0),
        ("ship", "A ship is a large vessel! It carries people.", 0.5),
        ("ship", "A ship is a large vessel that carries people", 0.5),
        ("ship", "It is a large vessel that carries people.", 0.0),
        ("ship", "ship ship ship ship ship ship.", 0.0),
        ("ship", "A ship sea water boat sail.", 0.0),
        ("map", "The map is a map.", 0.0),
        ("map", "I am a chatbot.", 0.0),
        ("map", "A map is a thing that is good for you.", 0.0),
        ("map", "", 0.0),
        ("map", "map " * 100_000, 0.0),
    ],
)
def test_a_sentence_must_be_short_name_the_thing_and_say_something_of_it(thing: str, text: str, value: float) -> None:
    assert worth(text, BRIEF[thing]) == pytest.approx(value)


@pytest.mark.parametrize(
    ("keys", "text", "value"),
    [
        (("product", "price"), '{"product": "A sharp axe", "price": 12.5}', 1.0),
        (("product", "price"), '```json\n{"product": "axe", "price": 12.5}\n```', 0.25),
        (("product", "price"), '{"product": "product", "price": "price"}', 0.2),
        (("product", "price"), '{"product": "axe", "price": "12"}', 0.6),
        (("product", "price"), '{"product": "axe", "price": true}', 0.6),
        (("product", "price"), '{"product": "axe", "price": 1e999}', 0.6),
        (("product", "price"), '{"product": "axe", "price": NaN}', 0.05),
        (("product", "price"), '{"product": "axe", "product": "axe", "price": 3}', 0.05),
        (("product", "price"), '{"product": "axe"}', 0.1),
        (("thing", "colour"), '{"thing": "axe", "colour": "dark brown"}', 1.0),
        (("thing", "colour"), '{"thing": "axe", "colour": "colour"}', 0.6),
        (("thing", "use"), '{"thing": "axe", "use": "to chop wood"}', 1.0),
        (("thing", "use"), '{"thing": "axe", "use": "using an axe"}', 0.6),
        (("name", "age", "likes"), '{"name": "Ann Lee", "age": 31, "likes": "axes"}', 1.0),
        (("name", "age", "likes"), '{"name": "Name", "age": 31, "likes": "axes"}', 0.2 + 1.6 / 3),
        (("name", "age", "likes"), '{"name": "Ann", "age": 310, "likes": ["axe"]}', 0.2 + 0.8 / 3),
        (("name", "age", "likes"), "[" * 100_000, 0.0),
        (("name", "age", "likes"), '{"a":' * 100_000, 0.05),
        (("name", "age", "likes"), "I am a chatbot.", 0.0),
    ],
)
def test_an_object_must_have_the_keys_and_values_that_fit_them(keys: tuple[str, ...], text: str, value: float) -> None:
    assert worth(text, form_of(keys)) == pytest.approx(value)


def test_every_key_that_is_asked_for_can_be_filled() -> None:
    values = {"price": 3, "age": 40, "colour": "red", "name": "Ann"}
    for row in forms()["test"]:
        named = dict.fromkeys(("product", "thing", "likes"), row["thing"])
        answer = {key: {**named, **values, "use": row["words"][0]}[key] for key in row["keys"]}
        assert worth(json.dumps(answer), row) == pytest.approx(1.0), row
