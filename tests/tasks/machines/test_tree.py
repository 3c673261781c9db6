"""Reading construction trees: what is one, what is none and why, in either spelling."""

import json
import random
from typing import Any

import pytest

from covey_tasks.machines.design.blocks import CAR_TYPES, CATAPULT_TYPES
from covey_tasks.machines.design.demonstrations import make_designs
from covey_tasks.machines.design.stages import Problem
from covey_tasks.machines.design.tree import canonical, check_tree, read_machine, write_json
from covey_tasks.machines.design.types import ROOT, Block, Invalid, Rules, Tree
from covey_tasks.machines.prompts import read_answer

from .designs import demonstrating

CAR = Rules(CAR_TYPES)
CATAPULT = Rules(CATAPULT_TYPES, needs_boulder=True)
FOUR_WHEELS: Tree = (
    *(ROOT, Block(63, 0, 0), Block(63, 1, 0)),
    *(Block(2, 1, 1), Block(2, 1, 4), Block(2, 2, 3), Block(2, 2, 6)),
)
ROOT_ROW: dict[str, Any] = {"type": 0, "id": 0, "parent": -1, "face_id": -1}


def row(**changes: Any) -> dict[str, Any]:
    return {"type": 1, "id": 1, "parent": 0, "face_id": 0} | changes


def text_of(*rows: Any) -> str:
    return "A car.\n```json\n" + json.dumps([ROOT_ROW, *rows]) + "\n```"


def code_of(text: str, rules: Rules = CAR) -> str:
    found = read_machine(text, rules)
    assert isinstance(found, Invalid), found
    return found.code


def message_of(*rows: Any, rules: Rules = CAR) -> str:
    found = read_machine(text_of(*rows), rules)
    assert isinstance(found, Invalid), found
    return f"{found.code}: {found.message}"


def test_a_written_tree_is_read_back() -> None:
    assert read_machine(write_json(FOUR_WHEELS), CAR) == FOUR_WHEELS


def test_a_tree_is_written_with_the_papers_keys() -> None:
    tree = (ROOT, Block(1, 0, 0), Block(9, 0, 4, 1, 6))
    assert write_json(tree) == (
        '[{"type":0,"id":0,"parent":-1,"face_id":-1},\n'
        '{"type":1,"id":1,"parent":0,"face_id":0},\n'
        '{"type":9,"id":2,"parent_a":0,"face_id_a":4,"parent_b":1,"face_id_b":6}]'
    )


def test_the_repositorys_spelling_means_the_same_although_its_id_is_the_type() -> None:
    rows = [
        {"id": "0", "order_id": 0, "parent": -1, "bp_id": -1},
        {"id": "1", "order_id": 1, "parent": 0, "bp_id": 0},
        {"id": 9, "order_id": 2, "parent_a": 0, "bp_id_a": 4, "parent_b": 1, "bp_id_b": 6},
    ]
    assert read_machine(json.dumps(rows), CAR) == (ROOT, Block(1, 0, 0), Block(9, 0, 4, 1, 6))


def test_the_two_spellings_do_not_mix() -> None:
    assert code_of(text_of({"id": 1, "order_id": 1, "parent": 0, "bp_id": 0})) == "field"


def test_short_decimal_strings_are_integers() -> None:
    assert read_machine(text_of(row(type="63", parent="0", face_id="4")), CAR) == (ROOT, Block(63, 0, 4))
    for text in ("", "1.0", "+1", "0x1", "１", "12345", " 1"):
        assert code_of(text_of(row(face_id=text))) == "field", text


def test_the_last_fenced_block_counts() -> None:
    first, second = text_of(row(type=1)), text_of(row(type=63))
    assert read_machine(first + "\nNo, better:\n" + second, CAR) == (ROOT, Block(63, 0, 0))
    assert read_machine(second.replace("```json", "```JSON"), CAR) == (ROOT, Block(63, 0, 0))


def test_thoughts_are_no_answer() -> None:
    sound, other, problem = text_of(row(type=63)), text_of(row(type=1)), Problem("car", 48)
    for text in (f"<think>{other}</think>{sound}", f"<think>{other}</think>{sound[7:-3]}"):
        assert read_answer(text, problem, "tree") == (ROOT, Block(63, 0, 0))
    for text in (f"<think>{sound}</think>", f"<think>{sound}"):
        assert isinstance(read_answer(text, problem, "tree"), Invalid)


def test_a_fence_that_is_never_closed_is_read_to_the_end() -> None:
    assert read_machine(text_of(row()).removesuffix("```"), CAR) == (ROOT, Block(1, 0, 0))
    assert code_of(text_of(row())[:-20]) == "json"


# ------------------------------------------------------------------------------------------------ what is none


@pytest.mark.parametrize(
    "text",
    [
        "I would rather not.",
        "",
        "```json\n```",
        "```json\n[{",
        "[" * 100_000,
        "[" + "9" * 5000 + "]",
        '{"type":0' * 50_000,
        '[{"type":0,"type":0,"id":0,"parent":-1,"face_id":-1}]',
        "\x00\ud800",
    ],
)
def test_what_is_not_json_is_called_that(text: str) -> None:
    assert code_of(text) == "json"


@pytest.mark.parametrize("text", ["{}", "[]", "[1, 2]", "[NaN]", "null", '"car"', "[[]]", "1e999"])
def test_json_of_another_shape_is_called_that(text: str) -> None:
    found = read_machine(text, CAR)
    assert found == Invalid("shape", "expected a non-empty list of objects")


def test_there_is_a_most_of_blocks() -> None:
    assert message_of(*[row()] * 48) == "too_many: 49 blocks, at most 48"
    assert message_of(*[row()] * 7, rules=Rules(CAR_TYPES, max_blocks=7)) == "too_many: 8 blocks, at most 7"


def test_there_is_a_most_of_linear_blocks() -> None:
    bands = [{"type": 9, "id": i, "parent_a": 0, "face_id_a": 0, "parent_b": 0, "face_id_b": 1} for i in range(1, 6)]
    assert message_of(*bands) == "too_many: 5 linear blocks, at most 4"
    assert not isinstance(read_machine(text_of(*bands[:4]), CAR), Invalid)


def test_fields_must_be_exactly_the_right_ones() -> None:
    plain = "field: block 1: fields must be exactly [type, id, parent, face_id]"
    linear = "field: block 1: fields must be exactly [type, id, parent_a, face_id_a, parent_b, face_id_b]"
    assert message_of({"type": 1, "id": 1, "parent": 0}) == plain
    assert message_of(row(colour="red")) == plain
    assert message_of({}) == plain
    assert message_of(row(type=9)) == linear
    assert message_of({"type": 1, "id": 1, "parent_a": 0, "face_id_a": 0, "parent_b": 0, "face_id_b": 1}) == plain


@pytest.mark.parametrize("value", [1.7, 1.0, None, float("nan"), float("inf"), True, [], {}, "NaN", "9" * 5000])
def test_numbers_must_be_whole(value: Any) -> None:
    assert message_of(row(type=value)) == "field: block 1: type must be an integer"
    assert message_of(row(face_id=value)) == "field: block 1: face_id must be an integer"


def test_only_allowed_types_are_allowed() -> None:
    assert message_of(row(type=99)) == "type: block 1: block type 99 is not allowed here"
    assert message_of(row(type=36)) == "type: block 1: block type 36 is not allowed here"
    assert message_of(row(type=10**4000)) == "type: block 1: block type a very large number is not allowed here"
    assert not isinstance(read_machine(text_of(row(type=36)), CATAPULT), Invalid)


def test_the_root_is_the_starting_block_and_the_only_one() -> None:
    assert message_of(row(type=0)).startswith("root: block 0 must be the starting block")
    for wrong in (ROOT_ROW | {"type": 1}, ROOT_ROW | {"parent": 0}, ROOT_ROW | {"face_id": 0}):
        assert code_of(json.dumps([wrong])) == "root"


def test_an_index_is_a_position() -> None:
    assert message_of(row(id=5)) == "id: block 1: id is 5, expected its position 1"


@pytest.mark.parametrize("parent", [1, 2, 5, -1, 48])
def test_a_parent_is_an_earlier_block(parent: int) -> None:
    assert message_of(row(parent=parent)) == f"parent: block 1: parent {parent} does not exist before it"


def test_both_parents_of_a_linear_block_are_earlier_blocks() -> None:
    band = {"type": 9, "id": 1, "parent_a": 0, "face_id_a": 0, "parent_b": 3, "face_id_b": 1}
    assert message_of(band) == "parent: block 1: parent 3 does not exist before it"


def test_a_face_is_one_that_the_parent_has() -> None:
    assert message_of(row(face_id=7)) == "face: block 1: parent 0 (Starting Block) has no face 7 (it has 6)"
    assert message_of(row(face_id=-1)).startswith("face")
    boulder = (row(type=36), row(type=15, id=2, parent=1))
    assert message_of(*boulder, rules=CATAPULT) == "face: block 2: parent 1 (Boulder) has no face 0 (it has 0)"


def test_a_face_carries_one_block_and_any_number_of_linear_ones() -> None:
    assert message_of(row(), row(id=2)) == "occupied: block 2: face 0 of block 0 is already occupied"
    band = {"type": 9, "id": 2, "parent_a": 0, "face_id_a": 0, "parent_b": 1, "face_id_b": 1}
    assert not isinstance(read_machine(text_of(row(), band, band | {"id": 3}), CAR), Invalid)


def test_a_tree_made_otherwise_is_checked_the_same_way() -> None:
    assert check_tree((), CAR) == Invalid("shape", "expected a non-empty list of objects")
    assert check_tree((ROOT, Block(9, 0, 0)), CAR) is not None
    assert check_tree((ROOT, Block(1, 0, 0, 0, 1)), CAR) is not None
    assert check_tree(FOUR_WHEELS, CAR) is None


# ------------------------------------------------------------------------------------------------ the one order


def test_a_machine_has_one_canonical_order() -> None:
    for design in make_designs(demonstrating(("car", "catapult"), 40, 20, 0.5, seed=3)):
        shuffled = reordered(design.tree, random.Random(len(design.tree)))
        assert check_tree(shuffled, design.problem.rules) is None
        assert canonical(shuffled) == design.tree


def test_different_machines_have_different_canonical_orders() -> None:
    turned = tuple(Block(2, 1, 2) if block == Block(2, 1, 1) else block for block in FOUR_WHEELS)
    assert canonical(turned) != canonical(FOUR_WHEELS)


def test_a_linear_block_is_the_same_from_either_end() -> None:
    one, other = (ROOT, Block(1, 0, 0), Block(9, 0, 4, 1, 6)), (ROOT, Block(1, 0, 0), Block(9, 1, 6, 0, 4))
    assert canonical(one) == canonical(other)
    bands = (Block(9, 0, 4, 1, 6), Block(7, 0, 4, 1, 6), Block(9, 0, 5, 1, 6))
    assert canonical((*one[:2], *bands)) == canonical((*one[:2], *bands[::-1]))


def reordered(tree: Tree, generator: random.Random) -> Tree:
    """The same machine built in another order: any block whose parents are there may be the next."""
    left, order = list(range(1, len(tree))), [0]
    while left:
        ready = [i for i in left if tree[i].parent in order and (tree[i].parent_b or 0) in order]
        order.append(generator.choice(ready))
        left.remove(order[-1])
    place = {old: new for new, old in enumerate(order)}
    moved = []
    for block in (tree[old] for old in order[1:]):
        b = None if block.parent_b is None else place[block.parent_b]
        moved.append(Block(block.type, place[block.parent], block.face, b, block.face_b))
    return (ROOT, *moved)
