"""Six orientations of a block, by the face it sits on.

Source: BesiegeField, arXiv 2510.14980 (Godheritage/BesiegeField, `FACINGMAP`).
"""

from covey_tasks.machines.design.types import Facing, Side, Vector

DIRECTIONS: dict[Facing, Vector] = {
    "z+": (0.0, 0.0, 1.0),
    "z-": (0.0, 0.0, -1.0),
    "x-": (-1.0, 0.0, 0.0),
    "x+": (1.0, 0.0, 0.0),
    "y+": (0.0, 1.0, 0.0),
    "y-": (0.0, -1.0, 0.0),
}

FACINGS: dict[Facing, dict[Side, Facing]] = {
    "z+": {"Front": "z+", "Back": "z-", "Left": "x-", "Right": "x+", "Up": "y+", "Down": "y-"},
    "z-": {"Front": "z-", "Back": "z+", "Left": "x+", "Right": "x-", "Up": "y+", "Down": "y-"},
    "x-": {"Front": "x-", "Back": "x+", "Left": "z-", "Right": "z+", "Up": "y+", "Down": "y-"},
    "x+": {"Front": "x+", "Back": "x-", "Left": "z+", "Right": "z-", "Up": "y+", "Down": "y-"},
    "y+": {"Front": "y+", "Back": "y-", "Left": "x-", "Right": "x+", "Up": "z-", "Down": "z+"},
    "y-": {"Front": "y-", "Back": "y+", "Left": "x-", "Right": "x+", "Up": "z+", "Down": "z-"},
}
"""World direction of each side of a block, by the block's facing."""


def to_world(point: Vector, facing: Facing) -> Vector:
    """Turn a point of a block's own frame, relative to its origin.

    The frame has x to the block's Right, y to its Up and z to its Front.

    >>> to_world((0.5, 0.0, 2.0), "x+")
    (2.0, 0.0, -0.5)
    """
    sides = FACINGS[facing]
    right, up, front = DIRECTIONS[sides["Right"]], DIRECTIONS[sides["Up"]], DIRECTIONS[sides["Front"]]
    x, y, z = point
    return (
        x * right[0] + y * up[0] + z * front[0],
        x * right[1] + y * up[1] + z * front[1],
        x * right[2] + y * up[2] + z * front[2],
    )
