"""Placement: exact, in six orientations; overlap, size and the boulder."""

import pytest

from covey_tasks.machines.design.blocks import BLOCKS, CAR_TYPES, CATAPULT_TYPES
from covey_tasks.machines.design.facing import DIRECTIONS, FACINGS, to_world
from covey_tasks.machines.design.place import box, face_in_world, place
from covey_tasks.machines.design.types import ROOT, Block, Facing, Invalid, Machine, Rules

CAR = Rules(CAR_TYPES)
CATAPULT = Rules(CATAPULT_TYPES, needs_boulder=True)
EVERYTHING = Rules(frozenset(BLOCKS))


def machine(*blocks: Block, rules: Rules = EVERYTHING) -> Machine:
    found = place((ROOT, *blocks), rules)
    assert isinstance(found, Machine), found
    return found


def refusal(*blocks: Block, rules: Rules = EVERYTHING) -> tuple[str, str]:
    found = place((ROOT, *blocks), rules)
    assert isinstance(found, Invalid), found
    return found.code, found.message


# ------------------------------------------------------------------------------------------------ facings


def test_opposite_sides_look_in_opposite_directions() -> None:
    for sides in FACINGS.values():
        for one, other in (("Front", "Back"), ("Left", "Right"), ("Up", "Down")):
            assert tuple(-x for x in DIRECTIONS[sides[one]]) == DIRECTIONS[sides[other]]  # type: ignore[index]


def test_a_block_is_never_mirrored() -> None:
    for sides in FACINGS.values():
        (a, b, c), (d, e, f), (g, h, i) = (DIRECTIONS[sides[name]] for name in ("Right", "Up", "Front"))  # type: ignore[index]
        assert a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g) == 1


@pytest.mark.parametrize(
    ("facing", "point"),
    [
        ("z+", (1, 2, 3)),
        ("z-", (-1, 2, -3)),
        ("x-", (-3, 2, 1)),
        ("x+", (3, 2, -1)),
        ("y+", (1, 3, -2)),
        ("y-", (1, -3, 2)),
    ],
)
def test_a_point_of_a_block_lies_where_its_facing_says(facing: Facing, point: tuple[float, float, float]) -> None:
    assert to_world((1, 2, 3), facing) == point


def test_faces_are_on_the_surface_of_their_block() -> None:
    for block in BLOCKS.values():
        for face in block.faces:
            half = [length / 2 for length in block.size]
            outside = [abs(p - c) - h for p, c, h in zip(face.point, block.centre, half, strict=True)]
            if block.name != "Container":  # whose face is the floor of the bowl
                assert max(outside) == 0, (block.name, face)


def test_blocks_have_as_many_faces_as_the_game_gives_them() -> None:
    counts = {0: 6, 15: 5, 1: 9, 41: 9, 63: 13, 35: 5, 2: 1, 40: 1, 46: 9, 60: 9, 50: 0, 86: 0, 22: 5, 5: 5}
    counts |= {44: 5, 76: 1, 19: 5, 16: 5, 30: 1, 36: 0, 9: 0, 7: 0, 49: 0, 87: 0}
    assert {type_: len(block.faces) for type_, block in BLOCKS.items()} == counts


# ------------------------------------------------------------------------------------------------ placement


def test_a_machine_stands_on_the_ground_with_its_middle_at_the_origin() -> None:
    car = machine(Block(63, 0, 0), Block(2, 1, 1), Block(2, 1, 4))
    boxes = [box(placed) for placed in car.placed]
    assert min(low[1] for low, _ in boxes) == 0.0
    for axis in (0, 2):
        assert min(low[axis] for low, _ in boxes) == -max(high[axis] for _, high in boxes)
    assert car.size == (2.0, 2.0, 4.0)


def test_a_child_begins_at_its_parents_face_and_looks_where_that_looks() -> None:
    placed = machine(Block(1, 0, 3), Block(15, 1, 1), Block(22, 2, 3)).placed
    assert [block.facing for block in placed] == ["z+", "x+", "z+", "y+"]
    for child in placed[1:]:
        assert (child.origin, child.facing) == face_in_world(placed[child.block.parent], child.block.face)
    root, side, front, top = (block.origin for block in placed)
    assert side == (root[0] + 0.5, root[1], root[2])
    assert front == (side[0] + 0.5, side[1], side[2] + 0.5)
    assert top == (front[0], front[1] + 0.5, front[2] + 0.5)


def test_a_rubber_band_reaches_from_face_to_face() -> None:
    placed = machine(Block(1, 0, 0), Block(9, 0, 4, 1, 6)).placed
    assert placed[2].origin == face_in_world(placed[0], 4)[0]
    assert placed[2].end == face_in_world(placed[1], 6)[0]


# ------------------------------------------------------------------------------------------------ what does not fit


def test_boxes_that_share_room_overlap_and_boxes_that_touch_do_not() -> None:
    wheels = (Block(63, 0, 0), Block(2, 1, 1), Block(2, 1, 2))
    assert refusal(*wheels) == ("overlap", "block 2 (Powered Wheel) and block 3 (Powered Wheel) overlap")
    assert machine(Block(63, 0, 0), Block(2, 1, 1), Block(2, 1, 3)).size == (1.5, 2.0, 4.5)


def test_linear_blocks_take_no_room() -> None:
    assert len(machine(Block(1, 0, 0), *[Block(9, 0, 4, 1, 6)] * 4).placed) == 6


def test_a_boulder_may_overlap_its_own_container_alone() -> None:
    bowl = (Block(15, 0, 4), Block(30, 1, 0))
    machine(*bowl, Block(36, 2, 0), rules=CATAPULT)
    assert refusal(*bowl, Block(15, 0, 0), Block(36, 3, 3), rules=CATAPULT)[0] == "overlap"
    beside = refusal(*bowl, Block(63, 0, 0), Block(1, 3, 7))
    assert beside == ("overlap", "block 2 (Container) and block 4 (Wooden Block) overlap")


def test_a_machine_has_a_largest_size() -> None:
    row = tuple(Block(63, index, 0) for index in range(7))
    assert refusal(*row) == ("size", "machine is 1.0 x 1.0 x 22.0 (x, y, z), the limit is 17 x 9.5 x 17")
    assert machine(*row[:5], Block(15, 5, 0)).size == (1.0, 1.0, 17.0)
    tower = (Block(63, 0, 4), Block(63, 1, 0), Block(63, 2, 0))
    assert refusal(*tower)[0] == "size"


def test_a_catapult_has_exactly_one_boulder() -> None:
    said = ("boulder", "the catapult task needs exactly one boulder (type 36)")
    assert refusal(Block(1, 0, 0), rules=CATAPULT) == said
    assert refusal(Block(1, 0, 0), Block(36, 0, 1), Block(36, 1, 0), rules=CATAPULT) == said
    machine(Block(36, 0, 0), rules=CATAPULT)


def test_a_tree_that_is_none_is_not_placed() -> None:
    assert refusal(Block(1, 0, 0), Block(1, 0, 0)) == ("occupied", "block 2: face 0 of block 0 is already occupied")
    assert place((), CAR) == Invalid("shape", "expected a non-empty list of objects")
