"""Place a tree in space exactly, then check overlap and size.

Every coordinate is a sum of multiples of 1/20 m; no angle is ever computed. Source: BesiegeField, arXiv 2510.14980
(Godheritage/BesiegeField, `besiege_tools.py`, `check_overlap`).
"""

from collections.abc import Sequence

from covey_tasks.machines.design.blocks import BLOCKS, CONTAINER
from covey_tasks.machines.design.facing import FACINGS, to_world
from covey_tasks.machines.design.tree import check_tree, num_boulders
from covey_tasks.machines.design.types import Block, Facing, Invalid, Machine, PlacedBlock, Rules, Tree, Vector

Box = tuple[Vector, Vector]
"""Its lowest and its highest corner."""


def place(tree: Tree, rules: Rules) -> Machine | Invalid:
    """Check any tree, and place its machine on the ground."""
    wrong = check_tree(tree, rules)
    if wrong is not None:
        return wrong
    placed = place_blocks(tree)
    boxes = {index: box(block) for index, block in enumerate(placed) if block.end is None}
    return _overlap(tree, boxes) or _fit(tree, placed, boxes, rules)


def box(placed: PlacedBlock) -> Box:
    """Return a block's box, rounded to 0.01 as in the original."""
    of = BLOCKS[placed.block.type]
    centre = _plus(placed.origin, to_world(of.centre, placed.facing))
    x, y, z = (abs(length) / 2 for length in to_world(of.size, placed.facing))
    low = (round(centre[0] - x, 2), round(centre[1] - y, 2), round(centre[2] - z, 2))
    return low, (round(centre[0] + x, 2), round(centre[1] + y, 2), round(centre[2] + z, 2))


def face_in_world(placed: PlacedBlock, face: int) -> tuple[Vector, Facing]:
    of = BLOCKS[placed.block.type].faces[face]
    return _plus(placed.origin, to_world(of.point, placed.facing)), FACINGS[placed.facing][of.side]


def place_blocks(tree: Tree) -> tuple[PlacedBlock, ...]:
    """Place blocks relative to the root's centre, overlapping or not."""
    placed = [PlacedBlock(tree[0], (0.0, 0.0, 0.0), "z+")]
    for block in tree[1:]:
        placed.append(attached(block, placed))
    return tuple(placed)


def attached(block: Block, placed: Sequence[PlacedBlock]) -> PlacedBlock:
    origin, facing = face_in_world(placed[block.parent], block.face)
    if block.parent_b is None or block.face_b is None:
        return PlacedBlock(block, origin, facing)
    end, _ = face_in_world(placed[block.parent_b], block.face_b)
    return PlacedBlock(block, origin, "z+", end)


def _overlap(tree: Tree, boxes: dict[int, Box]) -> Invalid | None:
    indices = list(boxes)
    for place_, second in enumerate(indices):
        for first in indices[:place_]:
            if intersect(boxes[first], boxes[second]) and not inside_container(tree, first, second):
                one, other = (f"block {index} ({BLOCKS[tree[index].type].name})" for index in (first, second))
                return Invalid("overlap", f"{one} and {other} overlap")
    return None


def intersect(one: Box, other: Box) -> bool:
    (a, b, c), (d, e, f) = one
    (g, h, i), (j, k, m) = other
    return a < j and g < d and b < k and h < e and c < m and i < f


def inside_container(tree: Sequence[Block], first: int, second: int) -> bool:
    """Check whether one is built into the other, a container."""
    return tree[second].parent == first and tree[first].type == CONTAINER


def _fit(tree: Tree, placed: tuple[PlacedBlock, ...], boxes: dict[int, Box], rules: Rules) -> Machine | Invalid:
    lows, highs = zip(*boxes.values(), strict=True)
    low = (min(p[0] for p in lows), min(p[1] for p in lows), min(p[2] for p in lows))
    high = (max(p[0] for p in highs), max(p[1] for p in highs), max(p[2] for p in highs))
    size = (round(high[0] - low[0], 2), round(high[1] - low[1], 2), round(high[2] - low[2], 2))
    if any(length > limit for length, limit in zip(size, rules.size_limit, strict=True)):
        shown, limit = " x ".join(f"{v:.1f}" for v in size), " x ".join(f"{v:g}" for v in rules.size_limit)
        return Invalid("size", f"machine is {shown} (x, y, z), the limit is {limit}")
    if rules.needs_boulder and num_boulders(tree) != 1:
        return Invalid("boulder", "the catapult task needs exactly one boulder (type 36)")
    # Stand it on the ground, in the middle
    shift = (-(low[0] + high[0]) / 2, -low[1], -(low[2] + high[2]) / 2)
    return Machine(tree, tuple(_moved(block, shift) for block in placed), size)


def _moved(placed: PlacedBlock, shift: Vector) -> PlacedBlock:
    end = None if placed.end is None else _plus(placed.end, shift)
    return PlacedBlock(placed.block, _plus(placed.origin, shift), placed.facing, end)


def _plus(a: Vector, b: Vector) -> Vector:
    """Add, rounded so that equal places are equal numbers, without -0.0."""
    return (round(a[0] + b[0], 6) + 0.0, round(a[1] + b[1], 6) + 0.0, round(a[2] + b[2], 6) + 0.0)
