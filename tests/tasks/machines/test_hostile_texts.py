"""No text brings the reader down: thousands of answers, made at random and with intent."""

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from covey_tasks.machines.design.blocks import BLOCKS, CAR_TYPES, CATAPULT_TYPES
from covey_tasks.machines.design.demonstrations import make_designs
from covey_tasks.machines.design.place import place
from covey_tasks.machines.design.tree import read_machine, write_json
from covey_tasks.machines.design.types import FILE_CODES, SPACE_CODES, Invalid, Machine, Rules, Tree
from covey_tasks.machines.prompts import FORMS

from .designs import demonstrating

CAR = Rules(CAR_TYPES)
CATAPULT = Rules(CATAPULT_TYPES, needs_boulder=True)
VALUES = (0, 1, 2, 9, 63, 36, 99, -1, 7, 48, 1.7, None, True, "1", "x", float("nan"), 10**30, [], {}, "9" * 5000)


def fate(text: str, rules: Rules, form: str = "tree") -> str:
    """The code, or "machine"."""
    tree = FORMS[form].read(text, rules)
    found = tree if isinstance(tree, Invalid) else place(tree, rules)
    if isinstance(found, Machine):
        return "machine"
    assert len(found.message) < 250
    return found.code


@pytest.mark.long
def test_five_thousand_random_trees_each_have_the_right_fate() -> None:
    generator = random.Random(0)
    fates: Counter[str] = Counter()
    for _ in range(5000):
        rows = _random_rows(generator)
        found = fate(json.dumps(rows), CATAPULT)
        fates[found] += 1
        assert found in _expected(rows), rows
    assert set(fates) == {"machine", "field", "type", "root", "face", "occupied", "overlap", "boulder"}


@pytest.mark.slow
def test_those_of_them_that_are_machines_are_simulated_to_an_end() -> None:
    pytest.importorskip("mujoco", reason="needs covey[machines]")
    from covey_tasks.machines.physics.simulate import outcome_of

    generator = random.Random(0)
    trees = [read_machine(json.dumps(_random_rows(generator)), CATAPULT) for _ in range(5000)]
    sound = [tree for tree in trees if not isinstance(tree, Invalid) and isinstance(place(tree, CATAPULT), Machine)]
    assert len(sound) == 87
    assert {outcome_of(tree, "catapult").ending for tree in sound} == {"complete"}


def _expected(rows: list[dict[str, Any]]) -> set[str]:
    """What a tree with plausible numbers may come to, told without the code that is tested."""
    taken = set()
    if any(row["type"] in (9, 7) for row in rows):
        return {"field"}  # linear blocks have two parents
    for row in rows[1:]:
        if row["type"] not in CATAPULT_TYPES:
            return {"type"}
        if row["type"] == 0:
            return {"root"}
        if row["face_id"] >= len(BLOCKS[rows[row["parent"]]["type"]].faces):
            return {"face"}
        if (row["parent"], row["face_id"]) in taken:
            return {"occupied"}
        taken.add((row["parent"], row["face_id"]))
    num_boulders = sum(row["type"] == 36 for row in rows)
    return {"overlap", "size", "machine" if num_boulders == 1 else "boulder"}


def _random_rows(generator: random.Random) -> list[dict[str, Any]]:
    """Sound in form, with plausible numbers."""
    rows = [{"type": 0, "id": 0, "parent": -1, "face_id": -1}]
    for index in range(1, generator.randint(2, 12)):
        type_ = generator.choice((*BLOCKS, 36, 36, 30, 15, 1, 63))
        rows.append(
            {"type": type_, "id": index, "parent": generator.randrange(index), "face_id": generator.randrange(6)}
        )
    return rows


def test_a_thousand_mangled_answers_each_have_a_fate() -> None:
    generator = random.Random(1)
    designs = make_designs(demonstrating(("car", "catapult"), 20, 30, 0.5, seed=5))
    fates: Counter[str] = Counter()
    for _ in range(1000):
        text = write_json(generator.choice(designs).tree)
        fates[fate(_mangled(text, generator), CATAPULT)] += 1
    assert {"json", "field", "id"} <= set(fates) <= {"machine", *FILE_CODES, *SPACE_CODES, "boulder"}


def _mangled(text: str, generator: random.Random) -> str:
    kind = generator.randrange(4)
    if kind == 0:
        return text[: generator.randrange(len(text))]
    if kind == 1:
        place_ = generator.randrange(len(text))
        return text[:place_] + chr(generator.randrange(0x300)) + text[place_ + 1 :]
    rows = json.loads(text)
    row = generator.choice(rows)
    if kind == 2:
        row[generator.choice(list(row))] = generator.choice(VALUES)
    else:
        row[generator.choice(("colour", "parent_a", "order_id"))] = generator.choice(VALUES)
    return json.dumps(rows)


# ------------------------------------------------------------------------------------------------ with intent


def test_a_thousand_attacks_on_sound_answers_each_have_the_right_code() -> None:
    """Ever the same design, so that nothing but the attack is wrong with it."""
    generator = random.Random(3)
    designs = make_designs(demonstrating(("car",), 20, 30, 0.5, seed=5))
    sound = [json.loads(write_json(design.tree)) for design in designs if not _has_linear(design.tree)]
    assert len(sound) > 10
    for index in range(1000):
        rows = json.loads(json.dumps(generator.choice(sound)))
        attack, code = ATTACKS[index % len(ATTACKS)]
        text = attack(rows, generator)
        assert fate(text if isinstance(text, str) else json.dumps(text), CAR) == code, (index % len(ATTACKS), text)


def _has_linear(tree: Tree) -> bool:
    return any(BLOCKS[block.type].is_linear for block in tree)


Rows = list[dict[str, Any]]
Attack = Callable[[Rows, random.Random], Any]
"""Rows of a sound tree in, a text or rows out."""


def _with(name: str, *values: Any) -> Attack:
    """One block that is not the root gets one of these values."""
    return lambda rows, generator: _changed(rows, generator.randrange(1, len(rows)), {name: generator.choice(values)})


def _changed(rows: Rows, index: int, changes: dict[str, Any]) -> Rows:
    return [row | changes if place_ == index else row for place_, row in enumerate(rows)]


def _cut(rows: Rows, generator: random.Random) -> str:
    text = json.dumps(rows)
    return text[: generator.randrange(len(text))]


def _deep(rows: Rows, generator: random.Random) -> str:
    """Hundreds of thousands of levels in the place of a number."""
    depth = generator.randint(100_000, 200_000)
    text = json.dumps(_with("face_id", "HERE")(rows, generator))
    return text.replace('"HERE"', "[" * depth + "]" * generator.choice((0, depth)))


def _digits(rows: Rows, generator: random.Random) -> str:
    """More digits than Python reads."""
    return json.dumps(_with("parent", "HERE")(rows, generator)).replace('"HERE"', "7" * generator.randint(4301, 9000))


def _later_parent(rows: Rows, generator: random.Random) -> Rows:
    index = generator.randrange(1, len(rows))
    return _changed(rows, index, {"parent": index + generator.choice((0, 1, 40))})


def _same_face_twice(rows: Rows, generator: random.Random) -> Rows:
    return [*rows, generator.choice(rows[1:]) | {"id": len(rows)}]


def _without_a_key(rows: Rows, generator: random.Random) -> Rows:
    row = generator.choice(rows)
    del row[generator.choice(list(row))]
    return rows


def _one_parent_and_linear(rows: Rows, generator: random.Random) -> Rows:
    band = {"type": 9, "id": len(rows), "parent_a": 0, "face_id_a": generator.randrange(6)}
    return [*rows, band]


HUGE = (49, 10**9, 10**30, -(10**18), 10**4000)
ATTACKS: tuple[tuple[Attack, str], ...] = (
    (_cut, "json"),
    (_deep, "json"),
    (_digits, "json"),
    (lambda rows, _: "[" * 100_000, "json"),
    (lambda rows, generator: {"machine": rows}, "shape"),
    (lambda rows, generator: [rows, rows], "shape"),
    (lambda rows, generator: [*rows, *rows[:1] * 48], "too_many"),
    (_with("type", 1.7, None, True, "x", [], {}, math.nan, math.inf, "1" * 5000), "field"),
    (_with("face_id", 1.7, None, False, "", [[]], math.nan, -math.inf), "field"),
    (_with("colour", "red", None), "field"),
    (_without_a_key, "field"),
    (_one_parent_and_linear, "field"),
    (_with("type", 99, 36, -1, 10**30, 10**4000), "type"),
    (_with("type", 0), "root"),
    (lambda rows, generator: _changed(rows, 0, {"parent": generator.choice((0, 1, 10**30))}), "root"),
    (_with("id", *HUGE), "id"),
    (lambda rows, generator: rows[1:], "id"),
    (_with("parent", *HUGE), "parent"),
    (_later_parent, "parent"),
    (_with("face_id", *HUGE, 13, -1), "face"),
    (_same_face_twice, "occupied"),
)
"""How an answer is spoilt, and what is to be said of it."""


def test_what_is_made_to_hurt_is_refused_by_name() -> None:
    for text, code in _hostile():
        assert fate(text, CAR) == code, text[:60]


def _hostile() -> Iterator[tuple[str, str]]:
    root = '{"type":0,"id":0,"parent":-1,"face_id":-1}'
    yield "[" * 100_000, "json"
    yield "```" * 100_000, "json"
    yield "[" * 100_000 + "]" * 100_000, "json"
    yield '{"a":' * 100_000, "json"
    yield f"[{root},{'9' * 5000}]", "json"
    yield f"[{root}" + f",{root}" * 100_000 + "]", "too_many"
    yield f"[{root},{{}}]", "field"
    yield f'[{root},{{"type":{"9" * 4000},"id":1,"parent":0,"face_id":0}}]', "type"
    yield f'[{root},{{"type":-{"9" * 4000},"id":1,"parent":0,"face_id":0}}]', "type"
    yield f'[{root},{{"type":1,"id":1,"parent":{"9" * 4000},"face_id":0}}]', "parent"
    yield f'[{root},{{"type":1,"id":1,"parent":0,"face_id":-{"9" * 4000}}}]', "face"
    yield f'[{root},{{"type":1,"id":{"9" * 4000},"parent":0,"face_id":0}}]', "id"
    yield f'[{root},{{"type":NaN,"id":1,"parent":0,"face_id":0}}]', "field"
    yield f'[{root},{{"type":1e400,"id":1,"parent":0,"face_id":0}}]', "field"


@pytest.mark.long
def test_the_other_forms_take_any_text_too() -> None:
    generator = random.Random(2)
    for text, _ in _hostile():
        for form in FORMS:
            fate(text, CAR, form)
    for _ in range(300):
        text = _mangled(json.dumps([{"type": 0, "Position": [0, 0, 0], "Rotation": [0, 0, 0, 1]}] * 3), generator)
        fate(text, CAR, "global")
