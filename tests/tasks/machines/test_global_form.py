"""The representation by positions: connections are found again."""

import json
from typing import Any

import pytest

from covey_tasks.machines.design.blocks import CAR_TYPES
from covey_tasks.machines.design.demonstrations import make_designs
from covey_tasks.machines.design.global_form import ROTATIONS, read_global, write_global
from covey_tasks.machines.design.place import place
from covey_tasks.machines.design.types import ROOT, Block, Invalid, Machine, Rules

from .designs import demonstrating

CAR = Rules(CAR_TYPES)
ROOT_ROW: dict[str, Any] = {"type": 0, "Position": [0, 0, 0], "Rotation": [0, 0, 0, 1]}
LOG_ROW: dict[str, Any] = {"type": 63, "Position": [0, 0, 0.5], "Rotation": [0, 0, 0, 1]}


def code_of(*rows: Any) -> str:
    found = read_global(json.dumps([ROOT_ROW, *rows]), CAR)
    assert isinstance(found, Invalid), found
    assert len(found.message) < 250
    return found.code


def test_machines_come_back_from_their_positions() -> None:
    for design in make_designs(demonstrating(("car", "catapult"), 100, 48, 0.5, seed=1)):
        found = read_global(f"```json\n{write_global(design.tree)}\n```", design.problem.rules)
        assert not isinstance(found, Invalid)
        assert placed(found, design.problem.rules) == placed(design.tree, design.problem.rules)


def placed(tree: tuple[Block, ...], rules: Rules) -> list[Any]:
    """Where the blocks are. Where two faces meet, a rubber band may hold on to the other one."""
    machine = place(tree, rules)
    assert isinstance(machine, Machine), machine
    return [(block.block.type, block.origin, block.facing, block.end) for block in machine.placed]


def test_a_position_may_miss_its_face_by_a_tenth() -> None:
    near, far = LOG_ROW | {"Position": [0.05, 0.0, 0.55]}, LOG_ROW | {"Position": [0.1, 0.0, 0.6]}
    assert read_global(json.dumps([ROOT_ROW, near]), CAR) == (ROOT, Block(63, 0, 0))
    assert code_of(far) == "parent"
    assert code_of(near, LOG_ROW) == "occupied"


def test_a_block_must_look_where_the_face_looks() -> None:
    assert code_of(LOG_ROW | {"Rotation": list(ROTATIONS["x+"])}) == "parent"
    side = {"type": 63, "Position": [0.5, 0, 0], "Rotation": [0, 0.7071, 0, 0.7071]}
    assert read_global(json.dumps([ROOT_ROW, side]), CAR) == (ROOT, Block(63, 0, 3))
    negated = side | {"Rotation": [0, -0.7071, 0, -0.7071]}
    assert read_global(json.dumps([ROOT_ROW, negated]), CAR) == (ROOT, Block(63, 0, 3))


def test_the_repositorys_first_entry_is_passed_over() -> None:
    rows = [{"GP": [0, 5.05, 0], "GR": [0, 0, 0, 1]}, {"id": "0"} | without_type(ROOT_ROW), LOG_ROW]
    assert read_global(json.dumps(rows), CAR) == (ROOT, Block(63, 0, 0))


def without_type(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "type"}


def test_a_rubber_band_says_where_its_other_end_is() -> None:
    band = {"type": 9, "Position": [0, 0.5, 0], "Rotation": [0, 0, 0, 1], "end-position": [0, 0, 3]}
    assert read_global(json.dumps([ROOT_ROW, LOG_ROW, band]), CAR) == (ROOT, Block(63, 0, 0), Block(9, 0, 4, 1, 9))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"type": 99}, "type"),
        ({"type": 36}, "type"),
        ({"type": -(10**4000)}, "type"),
        ({"type": 1.5}, "field"),
        ({"Position": [0, 0]}, "field"),
        ({"Position": [0, 0, float("nan")]}, "field"),
        ({"Position": [0, 0, float("inf")]}, "field"),
        ({"Position": [0, 0, 10**400]}, "field"),
        ({"Position": [0, 0, True]}, "field"),
        ({"Rotation": [0, 0, 0, 0]}, "field"),
        ({"Rotation": [0.5, 0.5, 0.5, 0.5]}, "field"),
        ({"Rotation": [0, 0, 0, 2]}, "field"),
        ({"end-position": [0, 0, 1]}, "field"),
        ({"type": 9}, "field"),
        ({"type": 0}, "root"),
    ],
)
def test_what_is_wrong_with_an_entry_is_said(changes: dict[str, Any], code: str) -> None:
    assert code_of(LOG_ROW | changes) == code


def test_the_first_block_is_the_starting_block() -> None:
    for text in ("[]", '[{"GP":[0,0,0]}]', json.dumps([LOG_ROW]), json.dumps([ROOT_ROW | {"Rotation": [0, 1, 0, 0]}])):
        found = read_global(text, CAR)
        assert isinstance(found, Invalid)
        assert found.code in ("shape", "root")
