"""No text brings the reader down: thousands of answers, made at random and with intent."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from covey.environments.machines.blocks import BLOCKS, CAR_TYPES, CATAPULT_TYPES
from covey.environments.machines.demonstrations import Wanted, make_designs
from covey.environments.machines.place import place
from covey.environments.machines.prompts import FORMS
from covey.environments.machines.tree import write_json
from covey.environments.machines.types import FILE_CODES, SPACE_CODES, Invalid, Machine, Rules

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


def test_five_thousand_random_trees_each_have_a_fate() -> None:
    generator = random.Random(0)
    fates = Counter(fate(json.dumps(_random_rows(generator)), CATAPULT) for _ in range(5000))
    assert set(fates) == {"machine", "field", "type", "root", "face", "occupied", "overlap", "boulder"}
    assert sum(fates.values()) == 5000


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
    designs = make_designs(Wanted(("car", "catapult"), 20, 30, 0.5, seed=5))
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
    yield f'[{root},{{"type":1,"id":1,"parent":{"9" * 4000},"face_id":0}}]', "parent"
    yield f'[{root},{{"type":1,"id":1,"parent":0,"face_id":-{"9" * 4000}}}]', "face"
    yield f'[{root},{{"type":1,"id":{"9" * 4000},"parent":0,"face_id":0}}]', "id"
    yield f'[{root},{{"type":NaN,"id":1,"parent":0,"face_id":0}}]', "field"
    yield f'[{root},{{"type":1e400,"id":1,"parent":0,"face_id":0}}]', "field"


def test_the_other_forms_take_any_text_too() -> None:
    generator = random.Random(2)
    for text, _ in _hostile():
        for form in FORMS:
            fate(text, CAR, form)
    for _ in range(300):
        text = _mangled(json.dumps([{"type": 0, "Position": [0, 0, 0], "Rotation": [0, 0, 0, 1]}] * 3), generator)
        fate(text, CAR, "global")
