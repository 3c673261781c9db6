"""Machines as projected polygons, without any drawing library.

The world is left-handed: who looks along z has x to the right. Shapes: K corners, 3 axes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from covey_tasks.machines.design.facing import DIRECTIONS
from covey_tasks.machines.design.types import Machine, Vector
from covey_tasks.machines.physics.assembly import Line, assemble
from covey_tasks.machines.physics.constants import PHYSICS
from covey_tasks.machines.physics.solids import Solid
from covey_tasks.machines.physics.trajectory import Array
from covey_tasks.machines.physics.worlds import Wall

WHOLE = replace(PHYSICS, gap=0.0)
"""Drawn without the gaps between blocks."""
LIGHT = np.array([0.45, 0.8, -0.4])
NUM_SIDES = 20
"""Sides of the polygon that stands for a circle."""
SUNK = 0.03
"""Metres by which solids that touch may sink into each other in a simulation."""


@dataclass(frozen=True, slots=True)
class View:
    """Viewpoint of a picture: three orthogonal directions."""

    name: str
    right: Vector
    up: Vector
    into: Vector
    """Away from who looks."""

    def flat(self, points_K3: Array) -> Array:
        """Project onto the paper: (K, 2)."""
        return points_K3 @ np.array([self.right, self.up]).T

    def depth(self, points_K3: Array) -> Array:
        return points_K3 @ np.array(self.into)


@dataclass(frozen=True, slots=True)
class Polygon:
    """One flat piece of a block's surface."""

    corners_K3: Array
    outward_3: Array
    type: int
    """Type of its block."""
    body: int
    """Body that carries it; -1 for fixed parts."""
    solid: int
    """Polygons of equal number enclose one convex solid."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """A machine at the start."""

    polygons: tuple[Polygon, ...]
    pivots_B3: Array
    """Origins of its bodies."""
    lines: tuple[Line, ...]


def mesh_of(machine: Machine) -> Mesh:
    assembly = assemble(machine, WHOLE)
    solids = [(block, solid) for block, solids in enumerate(assembly.solids) for solid in solids]
    polygons = [
        Polygon(corners, outward, machine.tree[block].type, assembly.body_of[block], number)
        for number, (block, solid) in enumerate(solids)
        for corners, outward in surface(solid)
    ]
    return Mesh(tuple(polygons), np.array([body.pivot for body in assembly.bodies]), assembly.lines)


def moved(mesh: Mesh, positions_B3: Array, rotations_B33: Array) -> Mesh:
    polygons = []
    for polygon in mesh.polygons:
        body = polygon.body
        turn_33 = rotations_B33[body].T
        corners = (polygon.corners_K3 - mesh.pivots_B3[body]) @ turn_33 + positions_B3[body]
        polygons.append(replace(polygon, corners_K3=corners, outward_3=polygon.outward_3 @ turn_33))
    lines = []
    for line in mesh.lines:
        pairs = zip(line.bodies, line.points, strict=True)
        ends = [
            (np.array(point) - mesh.pivots_B3[body]) @ rotations_B33[body].T + positions_B3[body]
            for body, point in pairs
        ]
        lines.append(replace(line, points=(as_vector(ends[0]), as_vector(ends[1]))))
    return Mesh(tuple(polygons), positions_B3, tuple(lines))


def surface(solid: Solid) -> list[tuple[Array, Array]]:
    """Cut the surface into polygons: (corners, outward direction) of each."""
    if solid.shape == "box":
        return _box(np.array(solid.centre), np.array(solid.half))
    if solid.shape == "sphere":
        return _ball(np.array(solid.centre), solid.half[0])
    return _rod(solid)  # a capsule without its round ends


def box(wall: Wall) -> list[tuple[Array, Array]]:
    return _box(np.array(wall.centre), np.array(wall.half))


def _box(centre_3: Array, half_3: Array) -> list[tuple[Array, Array]]:
    """Cut a box into pieces of about a metre, to show its size."""
    found = []
    for axis, sign in product(range(3), (-1.0, 1.0)):
        outward = np.zeros(3)
        outward[axis] = sign
        first, second = np.eye(3)[(axis + 1) % 3], np.eye(3)[(axis + 2) % 3]
        for (a, b), (c, d) in product(_cuts(half_3 @ first), _cuts(half_3 @ second)):
            around = [outward + u * first + v * second for u, v in ((a, c), (b, c), (b, d), (a, d))]
            found.append((centre_3 + np.array(around) * half_3, outward))
    return found


def _cuts(half: float) -> list[tuple[float, float]]:
    return list(pairwise(np.linspace(-1.0, 1.0, max(1, min(10, round(2 * half))) + 1).tolist()))


def _rod(solid: Solid) -> list[tuple[Array, Array]]:
    """Build a cylinder with quartered ends, so that its rotation shows."""
    centre, half, axis = np.array(solid.centre), np.array(solid.half), np.array(DIRECTIONS[solid.axis])
    around = 1.0 - np.abs(axis)
    first, second = np.eye(3)[np.flatnonzero(around)]
    angles = np.linspace(0.0, 2 * math.pi, NUM_SIDES + 1)
    ring = np.outer(np.cos(angles), first) + np.outer(np.sin(angles), second)
    # Two ends in quarters, so that polygons stay convex and small
    each = NUM_SIDES // 4
    quarters = [np.vstack((np.zeros(3), ring[start : start + each + 1])) for start in range(0, NUM_SIDES, each)]
    found = [(centre + (quarter + end * axis) * half, end * axis) for end in (-1.0, 1.0) for quarter in quarters]
    for here, there in pairwise(ring):
        corners = np.array([here - axis, there - axis, there + axis, here + axis])
        found.append((centre + corners * half, (here + there) / np.linalg.norm(here + there)))
    return found


def _ball(centre_3: Array, radius: float) -> list[tuple[Array, Array]]:
    heights = np.linspace(-math.pi / 2, math.pi / 2, NUM_SIDES // 2 + 1)
    angles = np.linspace(0.0, 2 * math.pi, NUM_SIDES + 1)
    found = []
    for low, high in pairwise(heights):
        for left, right in pairwise(angles):
            corners = np.array([_on_ball(*at) for at in ((low, left), (low, right), (high, right), (high, left))])
            outward = corners.mean(axis=0)
            found.append((centre_3 + radius * corners, outward / np.linalg.norm(outward)))
    return found


def _on_ball(height: float, angle: float) -> Vector:
    return math.cos(height) * math.cos(angle), math.sin(height), math.cos(height) * math.sin(angle)


def in_view(polygons: Sequence[Polygon], view: View) -> list[tuple[Array, float, int]]:
    """Return (corners (K, 2), brightness in [0, 1], type) of visible faces, nearest last."""
    rank = {solid: place for place, solid in enumerate(from_behind(polygons, view))}
    seen = sorted((polygon for polygon in polygons if looks_here(polygon, view)), key=lambda one: rank[one.solid])
    light = LIGHT / np.linalg.norm(LIGHT)
    shades = [0.62 + 0.38 * max(0.0, float(polygon.outward_3 @ light)) for polygon in seen]
    return [(view.flat(polygon.corners_K3), shade, polygon.type) for polygon, shade in zip(seen, shades, strict=True)]


def looks_here(polygon: Polygon, view: View) -> bool:
    return bool(polygon.outward_3 @ np.array(view.into) < -1e-6)


def from_behind(polygons: Sequence[Polygon], view: View) -> list[int]:
    """Sort solids so that they can be painted over each other.

    One that lies wholly before a plane on the side of another that is seen cannot be hidden by it. If that says
    nothing, or goes round in a circle, the one whose middle is farther comes first.
    """
    of_solid: dict[int, list[Polygon]] = {}
    for polygon in polygons:
        of_solid.setdefault(polygon.solid, []).append(polygon)
    points = {solid: np.concatenate([one.corners_K3 for one in own]) for solid, own in of_solid.items()}
    left = sorted(of_solid, key=lambda solid: -float(view.depth(points[solid]).mean()))
    before = {solid: _before([one for one in of_solid[solid] if looks_here(one, view)], points) for solid in left}
    # Draw what has nothing undrawn behind it; a cycle begins with the farthest
    order: list[int] = []
    while left:
        free = (one for one in left if not any(one in before[o] and o not in before[one] for o in left if o != one))
        order.append(next(free, left[0]))
        left.remove(order[-1])
    return order


def _before(sides: Sequence[Polygon], points: Mapping[int, Array]) -> set[int]:
    """Order solids back to front. Faces may intersect slightly."""
    if not sides:
        return set()
    outward_S3 = np.array([side.outward_3 for side in sides])
    offset_S = np.array([side.outward_3 @ side.corners_K3[0] for side in sides])
    starts = np.cumsum([0, *(len(own) for own in points.values())])[:-1]
    above_SK = outward_S3 @ np.concatenate(list(points.values())).T - offset_S[:, None]
    lowest_SO = np.minimum.reduceat(above_SK, starts, axis=1)  # of each of O other solids above each side
    return {solid for solid, lowest_S in zip(points, lowest_SO.T, strict=True) if bool((lowest_S >= -SUNK).any())}


def as_vector(point_3: Array) -> Vector:
    return float(point_3[0]), float(point_3[1]), float(point_3[2])


def oblique(name: str, turn: float, tilt: float) -> View:
    """Look down at `tilt` degrees, `turn` degrees left of forward."""
    a, b = math.radians(turn), math.radians(tilt)
    right = (math.cos(a), 0.0, math.sin(a))
    into = (-math.sin(a) * math.cos(b), -math.sin(b), math.cos(a) * math.cos(b))
    up = (-math.sin(a) * math.sin(b), math.cos(b), math.cos(a) * math.sin(b))
    return View(name, right, up, into)


ALONG = (
    View("from the right", (0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (-1.0, 0.0, 0.0)),
    View("from above", (0.0, 0.0, 1.0), (-1.0, 0.0, 0.0), (0.0, -1.0, 0.0)),
)
"""Forward is to the right: for ways."""

VIEWS = {
    view.name: view
    for view in (
        View("from behind", (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
        View("from the right", (0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (-1.0, 0.0, 0.0)),
        View("from above", (1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (0.0, -1.0, 0.0)),
        oblique("oblique", 60.0, 24.0),
    )
}

FILM = oblique("film", 76.0, 14.0)
"""View from which machines are seen moving: forward is to the right."""
