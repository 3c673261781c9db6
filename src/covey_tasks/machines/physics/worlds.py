"""Walls around machines, from BesiegeField (arXiv 2510.14980, Godheritage/BesiegeField)."""

from dataclasses import dataclass
from typing import Literal

from covey_tasks.machines.design.types import Vector

World = Literal["car", "catapult", "open"]


@dataclass(frozen=True, slots=True)
class Wall:
    """A box that does not move."""

    centre: Vector
    half: Vector
    frictionless: bool = False


def _car() -> tuple[Wall, ...]:
    """Build a lane between two frictionless walls, closed behind."""
    sides = [Wall((x, 2.5, 50.0), (0.5, 2.5, 70.0), frictionless=True) for x in (-LANE - 0.5, LANE + 0.5)]
    back = Wall((0.0, 2.5, -BACK - 0.5), (LANE, 2.5, 0.5))
    return (*sides, back)


def _catapult() -> tuple[Wall, ...]:
    """Build a fence around the machine, for throws to clear."""
    middle, thick, high = FENCE, FENCE_THICKNESS / 2, FENCE_HEIGHT / 2
    long = middle + thick
    along = [Wall((x, high, 0.0), (thick, high, long)) for x in (-middle, middle)]
    across = [Wall((0.0, high, z), (middle - thick, high, thick)) for z in (-middle, middle)]
    return (*along, *across)


LANE, BACK = 12.0, 16.0
FENCE, FENCE_THICKNESS, FENCE_HEIGHT = 11.0, 0.8, 1.5

WORLDS: dict[World, tuple[Wall, ...]] = {"car": _car(), "catapult": _catapult(), "open": ()}
