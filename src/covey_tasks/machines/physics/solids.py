"""Convex shapes of blocks in space, for collisions and pictures."""

from dataclasses import dataclass
from typing import Literal, cast

from covey_tasks.machines.design.blocks import BLOCKS, TABLE, BlockType
from covey_tasks.machines.design.facing import to_world
from covey_tasks.machines.design.types import Facing, PlacedBlock, Vector
from covey_tasks.machines.physics.constants import Physics

Shape = Literal["box", "cylinder", "capsule", "sphere"]

Surface = Literal["plain", "tyre", "slick", "grip", "elastic", "housing", "boulder"]
"""Contact surface. A housing, a joint's body within its neighbours, touches only things outside its machine."""


@dataclass(frozen=True, slots=True)
class Solid:
    """One convex shape of a block, as it lies at the start.

    >>> Solid("cylinder", (1.0, 1.0, 0.0), (0.25, 1.0, 1.0), "x+", "tyre")
    """

    shape: Shape
    centre: Vector
    half: Vector
    """Half of its extent along each axis of the world."""
    axis: Facing
    """Axis of a cylinder or a capsule."""
    surface: Surface


def solids_of(placed: PlacedBlock, physics: Physics) -> tuple[Solid, ...]:
    block = BLOCKS[placed.block.type]
    if block.is_linear:
        return ()
    if block.kind == "container":
        return _container(placed, block, physics)
    # Solids are smaller than the grid, so that neighbours do not touch
    size = block.size
    half = (size[0] / 2 - physics.gap, size[1] / 2 - physics.gap, size[2] / 2 - physics.gap)
    shape: Shape = "box"
    if block.kind == "wheel":
        shape = "cylinder"
    elif block.kind == "rod":
        shape, half = "capsule", (physics.rod_radius, physics.rod_radius, half[2])
    elif block.kind == "boulder":
        shape, half = "sphere", (size[0] / 2,) * 3
    return (_solid(placed, shape, block.centre, half, _surface(block)),)


def _surface(block: BlockType) -> Surface:
    if block.kind == "pad":
        return "grip" if block.type == GRIP_PAD else "elastic"
    return cast("Surface", TABLE["kinds"][block.kind].get("surface", "plain"))


def _container(placed: PlacedBlock, block: BlockType, physics: Physics) -> tuple[Solid, ...]:
    """Build a stem up to the boulder, and a low-walled floor."""
    x, y, floor = block.size[0] / 2 - physics.gap, block.size[1] / 2 - physics.gap, block.faces[0].point[2]
    thick, wall = physics.bowl_thickness / 2, physics.bowl_wall / 2
    parts: list[tuple[Vector, Vector]] = [
        ((0.0, 0.0, floor / 2 - thick), (0.5 - physics.gap, 0.5 - physics.gap, floor / 2 - thick - physics.gap)),
        ((0.0, 0.0, floor - thick), (x, y, thick)),
        ((x - thick, 0.0, floor + wall), (thick, y, wall)),
        ((thick - x, 0.0, floor + wall), (thick, y, wall)),
        ((0.0, y - thick, floor + wall), (x, thick, wall)),
        ((0.0, thick - y, floor + wall), (x, thick, wall)),
    ]
    return tuple(_solid(placed, "box", centre, half, "slick") for centre, half in parts)


def _solid(placed: PlacedBlock, shape: Shape, centre: Vector, half: Vector, surface: Surface) -> Solid:
    offset, turned = to_world(centre, placed.facing), to_world(half, placed.facing)
    extent = (abs(turned[0]), abs(turned[1]), abs(turned[2]))
    return Solid(shape, plus(placed.origin, offset), extent, placed.facing, surface)


def plus(a: Vector, b: Vector) -> Vector:
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2])


def minus(a: Vector, b: Vector) -> Vector:
    return (a[0] - b[0], a[1] - b[1], a[2] - b[2])


GRIP_PAD = 49
