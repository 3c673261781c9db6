"""The blocks: sizes, masses, faces and what they do.

Source: BesiegeField, arXiv 2510.14980 (Godheritage/BesiegeField, `besiege_blocks.json`, `block_intro.txt`).
"""

from dataclasses import dataclass
from typing import Literal

from covey_tasks.machines.design.types import Side, Vector

Kind = Literal[
    "rigid", "rod", "wheel", "rotor", "hinge", "ball", "swivel", "suspension", "container", "boulder", "caster", "pad",
    "band", "brace",
]  # fmt: skip
"""What the physics makes of a block (see `simulate.py`)."""

LINEAR: tuple[Kind, ...] = ("band", "brace")
"""Kinds that run between two faces, have no volume, and may use faces that are occupied."""


@dataclass(frozen=True, slots=True)
class Face:
    """Where another block can be attached, in the block's own frame: x to its Right, y to its Up, z to its Front."""

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
    """Of its box, in its own frame; (0, 0, 0) for linear blocks."""
    mass: float
    faces: tuple[Face, ...]
    powered: bool = False
    does: str = ""
    """For the prompt, in half a sentence; empty for plain building material."""

    @property
    def is_linear(self) -> bool:
        return self.kind in LINEAR

    @property
    def centre(self) -> Vector:
        """Return the centre of its box in its own frame, whose origin is there for the root, else at the box's back."""
        return (0.0, 0.0, 0.0 if self.type == 0 else self.size[2] / 2)


def _around(*depths: float, radius: float = 0.5) -> tuple[Face, ...]:
    """Return faces on the four sides, each at these distances from the back."""
    left = tuple(Face((-radius, 0.0, z), "Left") for z in depths)
    right = tuple(Face((radius, 0.0, z), "Right") for z in depths)
    up = tuple(Face((0.0, radius, z), "Up") for z in depths)
    down = tuple(Face((0.0, -radius, z), "Down") for z in depths)
    return left + right + up + down


def _front(z: float) -> tuple[Face, ...]:
    return (Face((0.0, 0.0, z), "Front"),)


ROOT_FACES = (*_front(0.5), Face((0.0, 0.0, -0.5), "Back"), *_around(0.0))
CUBE_FACES = _front(1.0) + _around(0.5)
BEAM_FACES = _front(2.0) + _around(0.5, 1.5)
LOG_FACES = _front(3.0) + _around(0.5, 1.5, 2.5)
SPRING_FACES = _front(2.0) + _around(1.5)
LARGE_WHEEL_FACES = (
    *_front(1.0),
    *(Face((x, y, 1.0), "Front") for x, y in ((-1.5, 0.0), (1.5, 0.0), (0.0, 1.5), (0.0, -1.5))),
    *_around(0.5, radius=1.5),
)
CUBE, BEAM, LOG = (1.0, 1.0, 1.0), (1.0, 1.0, 2.0), (1.0, 1.0, 3.0)
WHEEL, LARGE_WHEEL, NO_SIZE = (2.0, 2.0, 0.5), (3.0, 3.0, 1.0), (0.0, 0.0, 0.0)

_TYPES = (
    BlockType(0, "Starting Block", "rigid", CUBE, 0.25, ROOT_FACES, does="the root, faces z+"),
    BlockType(15, "Small Wooden Block", "rigid", CUBE, 0.3, CUBE_FACES),
    BlockType(1, "Wooden Block", "rigid", BEAM, 0.5, BEAM_FACES),
    BlockType(41, "Wooden Rod", "rod", BEAM, 0.5, BEAM_FACES, does="a thin round bar"),
    BlockType(63, "Log", "rigid", LOG, 1.0, LOG_FACES),
    BlockType(35, "Ballast", "rigid", CUBE, 3.0, CUBE_FACES, does="a heavy cube"),
    BlockType(2, "Powered Wheel", "wheel", WHEEL, 1.0, _front(0.5), True, "turns by itself about its Front"),
    BlockType(40, "Unpowered Wheel", "wheel", WHEEL, 1.0, _front(0.5), does="rolls freely about its Front"),
    BlockType(46, "Large Powered Wheel", "wheel", LARGE_WHEEL, 1.0, LARGE_WHEEL_FACES, True, "a larger powered wheel"),
    BlockType(60, "Large Unpowered Wheel", "wheel", LARGE_WHEEL, 1.0, LARGE_WHEEL_FACES, does="a larger free wheel"),
    BlockType(50, "Small Wheel", "caster", (0.5, 1.0, 1.5), 0.5, (), does="slides like a caster"),
    BlockType(86, "Roller Wheel", "caster", CUBE, 0.5, (), does="slides like a caster"),
    BlockType(22, "Rotating Block", "rotor", CUBE, 1.0, CUBE_FACES, True, "what sits on its faces 1-4 is turned"),
    BlockType(5, "Hinge", "hinge", CUBE, 0.5, CUBE_FACES, does="swings up and down by 90 degrees, no motor"),
    BlockType(44, "Ball Joint", "ball", CUBE, 0.5, CUBE_FACES, does="swings in all directions, no motor"),
    BlockType(76, "Axle Connector", "ball", CUBE, 0.3, _front(1.0), does="swings in all directions, no motor"),
    BlockType(19, "Universal Joint", "swivel", CUBE, 0.5, CUBE_FACES, does="spins freely about its Front, no motor"),
    BlockType(16, "Spring", "suspension", BEAM, 0.5, SPRING_FACES, does="gives way along its length"),
    BlockType(30, "Container", "container", (2.4, 3.0, 2.8), 0.5, _front(1.0), does="a bowl when it faces y+"),
    BlockType(36, "Boulder", "boulder", (1.9, 1.9, 1.9), 5.0, (), does="a loose ball that only lies where it is put"),
    BlockType(49, "Grip Pad", "pad", (0.8, 0.8, 0.2), 0.3, (), does="has much friction"),
    BlockType(87, "Elastic Pad", "pad", (0.8, 0.8, 0.2), 0.3, (), does="bounces"),
    BlockType(9, "Rubber Band", "band", NO_SIZE, 0.4, (), True, "pulls its two ends together"),
    BlockType(7, "Brace", "brace", NO_SIZE, 0.5, (), does="keeps its two ends at their distance"),
)

BLOCKS: dict[int, BlockType] = {block.type: block for block in _TYPES}
"""All blocks that can be simulated, by type. Not there: steering, piston, grabber, winch, decoupler, weapons."""

ROOT_TYPE, BOULDER, CONTAINER = 0, 36, 30

CAR_TYPES = frozenset({0, 1, 2, 9, 15, 16, 22, 35, 41, 63})
"""Of the paper's reinforcement learning prompts."""
CATAPULT_TYPES = CAR_TYPES | {5, 7, BOULDER, CONTAINER}
"""The same, with what throws and is thrown; hinge and brace are those of its agentic catapult."""
