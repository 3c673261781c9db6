"""The blocks of `blocks.yaml`: size, mass, faces (BesiegeField, arXiv 2510.14980)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from covey.system.lookup import read_table
from covey_tasks.machines.design.types import Side, Vector

Kind = Literal[
    "rigid", "rod", "wheel", "rotor", "hinge", "ball", "swivel", "suspension", "container", "boulder", "caster", "pad",
    "band", "brace",
]  # fmt: skip
"""Physical role of a block (see `simulate.py`)."""

LINEAR: tuple[Kind, ...] = ("band", "brace")
"""Kinds that run between two faces, have no volume, and may use faces that are occupied."""


@dataclass(frozen=True, slots=True)
class Face:
    """A place for another block: x to Right, y Up, z Front."""

    point: Vector
    side: Side


@dataclass(frozen=True, slots=True)
class BlockType:
    """One kind of block.

    >>> BLOCKS[63].name, BLOCKS[63].size, len(BLOCKS[63].faces)
    ('Log', (1.0, 1.0, 3.0), 13)
    """

    type: int
    name: str
    kind: Kind
    size: Vector
    """Size of its box, in its own frame; (0, 0, 0) for linear blocks."""
    mass: float
    faces: tuple[Face, ...]
    character: str
    """Character in the compact form."""
    powered: bool = False
    does: str = ""
    """Its function in half a sentence for the prompt; empty for plain building material."""

    @property
    def is_linear(self) -> bool:
        return self.kind in LINEAR

    @property
    def centre(self) -> Vector:
        """Return the box's centre, from the root's centre or the box's back."""
        return (0.0, 0.0, 0.0 if self.type == 0 else self.size[2] / 2)


def _block(type_: int, name: str, kind: Kind, size: str, mass: float, faces: str, *more: Any) -> BlockType:
    places = tuple(Face((x, y, z), side) for x, y, z, side in TABLE["faces"][faces])
    return BlockType(type_, name, kind, tuple(TABLE["sizes"][size]), mass, places, *more)


TABLE = read_table(Path(__file__).with_suffix(".yaml"))
BLOCKS: dict[int, BlockType] = {type_: _block(type_, *row) for type_, row in TABLE["blocks"].items()}
"""All blocks that can be simulated, by type."""

ROOT_TYPE, BOULDER, CONTAINER = 0, 36, 30

CAR_TYPES = frozenset({0, 1, 2, 9, 15, 16, 22, 35, 41, 63})
"""Block types in the paper's reinforcement learning prompts."""
CATAPULT_TYPES = CAR_TYPES | {5, 7, BOULDER, CONTAINER}
"""The same, with throwing blocks and the boulder; hinge and brace are those of its agentic catapult."""
