"""Shared types of machines: block, construction tree, machine in space.

The world is left-handed: x to the right, y up, z forward. Lengths are metres, masses kilograms.
"""

from dataclasses import dataclass
from typing import Literal, get_args

Vector = tuple[float, float, float]
"""(x, y, z) in metres."""

Facing = Literal["z+", "z-", "x-", "x+", "y+", "y-"]
"""A direction of the world; also how a block lies in it: the direction of the face it sits on."""

Side = Literal["Front", "Back", "Left", "Right", "Up", "Down"]
"""A direction of a block's own frame."""

FileCode = Literal["json", "shape", "too_many", "field", "type", "root", "id", "parent", "face", "occupied"]
"""The text is no construction tree."""
SpaceCode = Literal["overlap", "size"]
"""The tree does not fit into space."""
Code = Literal[FileCode, SpaceCode, "boulder"]
"""Reason why a text is no machine, in the order of the checks."""
FILE_CODES: tuple[Code, ...] = get_args(FileCode)
SPACE_CODES: tuple[Code, ...] = get_args(SpaceCode)


@dataclass(frozen=True, slots=True)
class Block:
    """An entry of a construction tree: a block's type and parents.

    A powered wheel on face 1 of block 2, and a rubber band from there to face 4 of the root:

    >>> Block(type=2, parent=2, face=1)
    >>> Block(type=9, parent=2, face=1, parent_b=0, face_b=4)
    """

    type: int
    """A key of `blocks.BLOCKS`."""
    parent: int
    """Index of an earlier block; -1 for the root."""
    face: int
    """Face of the parent; -1 for the root."""
    parent_b: int | None = None
    """Block at the other end of a linear block (rubber band, brace); None for all others."""
    face_b: int | None = None


Tree = tuple[Block, ...]
"""Blocks in the order they are built; a block's index is its position. The first is the root."""

ROOT = Block(0, -1, -1)


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """A block in space, from its point of attachment (the root's centre)."""

    block: Block
    origin: Vector
    facing: Facing
    """World direction of the block's own Front; "z+" for linear blocks, where it means nothing."""
    end: Vector | None = None
    """The other end of a linear block; its origin is the first."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A tree in space: on the ground, centred on x and z."""

    tree: Tree
    placed: tuple[PlacedBlock, ...]
    """Blocks in the order of the tree."""
    size: Vector
    """Size of the box around all blocks."""


@dataclass(frozen=True, slots=True)
class Invalid:
    """Reason why a text is no machine: a policy's failure, scored 0.

    >>> Invalid("parent", "block 3: parent 5 does not exist before it")
    """

    code: Code
    message: str

    @property
    def stage(self) -> Literal["file", "space", "task"]:
        """Classify: the text itself, how blocks lie in space, or the task."""
        if self.code in FILE_CODES:
            return "file"
        return "space" if self.code in SPACE_CODES else "task"


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits on a machine's blocks.

    >>> Rules(frozenset({0, 1, 2, 63}))
    """

    types: frozenset[int]
    """Allowed block types, the root's among them."""
    max_blocks: int = 48
    max_linear: int = 4
    """Linear blocks take no room, so without a limit stacking rubber bands would be free energy."""
    size_limit: Vector = (17.0, 9.5, 17.0)
    needs_boulder: bool = False
    """Exactly one boulder."""
