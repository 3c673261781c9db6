"""Join blocks into rigid bodies, which end at joints.

That is why simulation is fast: a car of seven blocks is five bodies.
"""

from dataclasses import dataclass
from typing import Literal

from covey_tasks.machines.design.blocks import BLOCKS, TABLE, Kind
from covey_tasks.machines.design.facing import FACINGS, to_world
from covey_tasks.machines.design.types import Facing, Machine, PlacedBlock, Vector
from covey_tasks.machines.physics.constants import Physics
from covey_tasks.machines.physics.solids import Solid, minus, plus, solids_of

Motion = Literal["free", "hinge", "ball", "slide"]
MOTIONS: dict[Kind, Motion] = {kind: row["motion"] for kind, row in TABLE["kinds"].items() if "motion" in row}
"""Motion of a body by the kind of its first block; the root is rigid."""
JOINTS = tuple(kind for kind, motion in MOTIONS.items() if motion != "free")
"""Kinds that move against the block they sit on."""


@dataclass(frozen=True, slots=True)
class Body:
    """Blocks that move as one."""

    block: int
    """The one it begins with: the root, a joint, or a boulder."""
    kind: Kind
    """Kind of that block, which determines how the body moves."""
    powered: bool
    parent: int
    """Index of the body it moves against; -1 for those that move freely."""
    pivot: Vector
    """Its origin at the start, when it lies along the axes of the world: a point of the joint's axis."""
    facing: Facing
    """Facing of its first block."""


@dataclass(frozen=True, slots=True)
class Line:
    """A rubber band or a brace."""

    type: int
    """Type of its block."""
    kind: Kind
    bodies: tuple[int, int]
    points: tuple[Vector, Vector]
    """Points at the start, in the world."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """A machine as bodies."""

    bodies: tuple[Body, ...]
    """A parent comes before its children; the root's body is the first."""
    solids: tuple[tuple[Solid, ...], ...]
    """Solids of each block."""
    body_of: tuple[int, ...]
    """Body of each block, to which its solids belong; -1 for linear blocks."""
    lines: tuple[Line, ...]
    boulder: int | None
    """Body of the boulder, where there is one."""

    @property
    def acting_lines(self) -> tuple[Line, ...]:
        """Leave out lines within one rigid body, which do nothing."""
        return tuple(line for line in self.lines if line.bodies[0] != line.bodies[1])


def assemble(machine: Machine, physics: Physics) -> Assembly:
    bodies: list[Body] = []
    body_of: list[int] = []
    lines: list[Line] = []
    # A joint begins a body; other blocks belong to the body they are attached to
    for index, placed in enumerate(machine.placed):
        block = BLOCKS[placed.block.type]
        if placed.end is not None:
            lines.append(_line(machine, placed, placed.end, body_of))
            body_of.append(-1)
            continue
        below = _body_of_face(machine, body_of, placed.block.parent, placed.block.face) if index else -1
        if index and block.kind not in (*JOINTS, "boulder"):
            body_of.append(below)
            continue
        parent = -1 if block.kind == "boulder" else below
        body_of.append(len(bodies))
        pivot = plus(placed.origin, to_world(block.centre, placed.facing))
        bodies.append(Body(index, block.kind, block.powered, parent, pivot, placed.facing))
    solids = tuple(solids_of(placed, physics) for placed in machine.placed)
    boulders = [number for number, body in enumerate(bodies) if body.kind == "boulder"]
    return Assembly(tuple(bodies), solids, tuple(body_of), tuple(lines), boulders[0] if boulders else None)


def _body_of_face(machine: Machine, body_of: list[int], block: int, face: int) -> int:
    """Return a face's body; a rotating block's Front belongs to its base."""
    placed = machine.placed[block]
    kind = BLOCKS[placed.block.type]
    if kind.kind == "rotor" and kind.faces[face].side == "Front":
        return _body_of_face(machine, body_of, placed.block.parent, placed.block.face)
    return body_of[block]


def _line(machine: Machine, placed: PlacedBlock, end: Vector, body_of: list[int]) -> Line:
    block = placed.block
    assert block.parent_b is not None
    assert block.face_b is not None
    bodies = (
        _body_of_face(machine, body_of, block.parent, block.face),
        _body_of_face(machine, body_of, block.parent_b, block.face_b),
    )
    return Line(block.type, BLOCKS[block.type].kind, bodies, (placed.origin, end))


def axis_of(body: Body) -> Facing:
    """Find the axis: of hinges their Right, of all others their Front."""
    return FACINGS[body.facing]["Right"] if body.kind == "hinge" else body.facing


def offset(assembly: Assembly, body: int) -> Vector:
    own = assembly.bodies[body]
    return own.pivot if own.parent < 0 else minus(own.pivot, assembly.bodies[own.parent].pivot)
