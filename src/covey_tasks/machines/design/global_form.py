"""The second representation of machines: blocks by position and rotation.

Nothing says what a block is attached to, so connections are found again by where faces are. Positions are relative to
the root, rotations are quaternions (x, y, z, w). Source: BesiegeField, arXiv 2510.14980, D.1.1.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from covey_tasks.machines.design.blocks import BLOCKS, ROOT_TYPE
from covey_tasks.machines.design.place import face_in_world, place_blocks
from covey_tasks.machines.design.tree import NoMachine, check_tree, read_rows, shown, whole
from covey_tasks.machines.design.types import ROOT, Block, Facing, Invalid, PlacedBlock, Rules, Tree, Vector

TOLERANCE = 0.1
"""Metres by which a stated position may miss the face it means, as in the original."""
SAME_ROTATION = 0.99
"""Least |dot product| of two quaternions that mean the same facing."""
MAX_METRES = 1e4

Quaternion = tuple[float, float, float, float]

_HALF = math.sqrt(0.5)
ROTATIONS: dict[Facing, Quaternion] = {
    "z+": (0.0, 0.0, 0.0, 1.0),
    "z-": (0.0, 1.0, 0.0, 0.0),
    "x-": (0.0, -_HALF, 0.0, _HALF),
    "x+": (0.0, _HALF, 0.0, _HALF),
    "y+": (-_HALF, 0.0, 0.0, _HALF),
    "y-": (_HALF, 0.0, 0.0, _HALF),
}


def write_global(tree: Tree) -> str:
    """Write one object per line.

    >>> print(write_global((ROOT,)))
    [{"type":0,"Position":[0.0,0.0,0.0],"Rotation":[0.0,0.0,0.0,1.0]}]
    """
    return "[" + ",\n".join(_write(placed) for placed in place_blocks(tree)) + "]"


def _write(placed: PlacedBlock) -> str:
    rotation = [round(value, 4) + 0.0 for value in ROTATIONS[placed.facing]]
    entry = {"type": placed.block.type, "Position": list(placed.origin), "Rotation": rotation}
    if placed.end is not None:
        entry["end-position"] = [round(b - a, 6) + 0.0 for a, b in zip(placed.origin, placed.end, strict=True)]
    return json.dumps(entry, separators=(",", ":"))


def read_global(text: str, rules: Rules) -> Tree | Invalid:
    """Read any text; return the tree whose faces match the blocks' positions.

    A block's position must be a face of an earlier block; where two faces meet, a linear block takes the first.
    """
    try:
        rows = read_rows(text, rules.max_blocks + 1)  # the repository's first entry says where the whole machine is
        tree = _tree(rows[1:] if "GP" in rows[0] else rows, rules)
        return check_tree(tree, rules) or tree
    except NoMachine as found:
        return found.invalid


def _tree(rows: Sequence[Mapping[str, Any]], rules: Rules) -> Tree:
    if not rows:
        raise NoMachine("shape", "expected a non-empty list of objects")
    entries = [_entry(index, row) for index, row in enumerate(rows)]
    if entries[0].block.type != ROOT_TYPE or entries[0].facing != "z+":
        raise NoMachine("root", "block 0 must be the starting block (type 0, facing z+)")
    tree = [ROOT]
    for index, entry in enumerate(entries[1:], start=1):
        if entry.block.type not in rules.types:
            raise NoMachine("type", f"block {index}: block type {entry.block.type} is not allowed here")
        tree.append(_connect(index, entry, entries[:index]))
    return tuple(tree)


def _connect(index: int, entry: PlacedBlock, earlier: Sequence[PlacedBlock]) -> Block:
    if entry.end is None:
        return Block(entry.block.type, *_face_at(index, entry.origin, entry.facing, earlier))
    both = (*_face_at(index, entry.origin, None, earlier), *_face_at(index, entry.end, None, earlier))
    return Block(entry.block.type, *both)


def _face_at(index: int, at: Vector, facing: Facing | None, earlier: Sequence[PlacedBlock]) -> tuple[int, int]:
    """Find the nearest face within the tolerance that looks this way."""
    found: list[tuple[float, int, int]] = []
    for parent, placed in enumerate(earlier):
        for face in range(len(BLOCKS[placed.block.type].faces)):
            point, looks_to = face_in_world(placed, face)
            distance = math.dist(point, at)
            if distance <= TOLERANCE and facing in (None, looks_to):
                found.append((round(distance, 3), parent, face))
    if not found:
        raise NoMachine("parent", f"block {index}: no earlier block has a face where it is attached")
    _, parent, face = min(found)
    return parent, face


def _entry(index: int, row: Mapping[str, Any]) -> PlacedBlock:
    """Read a row as a block in space, without its parents yet."""
    key = "type" if "type" in row else "id"
    kind = whole(index, key, row[key]) if key in row else -1
    if kind not in BLOCKS and key in row:
        raise NoMachine("type", f"block {index}: block type {shown(kind)} is not allowed here")
    expected = [key, "Position", "Rotation", *(["end-position"] if kind in BLOCKS and BLOCKS[kind].is_linear else [])]
    if set(row) != set(expected):
        raise NoMachine("field", f"block {index}: fields must be exactly [{', '.join(expected)}]")
    x, y, z = _numbers(index, "Position", row["Position"], 3)
    rotation = _numbers(index, "Rotation", row["Rotation"], 4)
    end: Vector | None = None
    if "end-position" in row:
        dx, dy, dz = _numbers(index, "end-position", row["end-position"], 3)
        end = (x + dx, y + dy, z + dz)
    facing: Facing = "z+" if end is not None else _facing(index, rotation)
    return PlacedBlock(Block(kind, -1, -1), (x, y, z), facing, end)


def _numbers(index: int, name: str, value: Any, count: int) -> tuple[float, ...]:
    is_list = isinstance(value, list) and len(value) == count
    if not is_list or not all(type(v) in (int, float) and abs(v) <= MAX_METRES for v in value):  # NaN compares false
        raise NoMachine("field", f"block {index}: {name} must be {count} numbers")
    return tuple(float(v) for v in value)


def _facing(index: int, rotation: Sequence[float]) -> Facing:
    for facing, known in ROTATIONS.items():
        alike = abs(sum(a * b for a, b in zip(rotation, known, strict=True)))  # q and -q are the same rotation
        if alike >= SAME_ROTATION and abs(math.hypot(*rotation) - 1) <= TOLERANCE:
            return facing
    raise NoMachine("field", f"block {index}: Rotation must be one of the six facings as a quaternion x, y, z, w")
