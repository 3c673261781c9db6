"""Find the throw in a boulder's way, without the machine's motion.

- The projectile is the boulder; the machine is everything else.
- The release is the last look at which the machine touches the boulder before that lands. From then on it flies.
- The thrower stands: shortly before the release it touches the ground, and its centre of mass is near where it was at
  first. It stays down until the boulder lands.
- What counts is the flight, seen from the machine's centre of mass: where that moves forward or up at the release, its
  speed is taken from the boulder's, and its rise from the boulder's. Recoil takes nothing away.

So a machine that leaps, rolls or falls over with its load throws nothing: seen from there, the load is at rest.
Shapes: T looks, 3 axes of the game (y up, z forward).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

WINDOW = 0.2
"""Seconds before the release in which the machine has to touch the ground, and in which its own speed is its fastest:
longer than a jerk that lets go of the boulder."""


@dataclass(frozen=True, slots=True)
class Thrower:
    """The machine without its boulder, at each look."""

    centre_T3: Array
    """Its centre of mass."""
    holds_T: NDArray[np.bool_]
    """Whether it touches the boulder."""
    stands_T: NDArray[np.bool_]
    """Whether it touches the ground; walls are none."""
    gained_T: Array
    """Joules so far that neither motors nor rubber bands gave."""


@dataclass(frozen=True, slots=True)
class Throw:
    """A release and its flight; `own` is the machine's own motion."""

    time: float
    """Time of the release."""
    height: float
    """Height of the boulder's centre at the release."""
    flown: float
    """Forward, from the release to the landing."""
    own_way: float
    """Distance from where it stood to where it is at the release, in any direction."""
    own_lift: float
    """Greatest height above where it stood until the boulder lands."""
    on_ground: bool
    """Whether it touched the ground shortly before."""
    rise: float
    """Rise of the boulder, less the part due to the machine's own motion; never more than it really rose."""
    distance: float
    """Forward from the release, less the same; never more than `flown`."""
    gained: float = 0.0
    """Joules that came from nowhere until then."""


def find_throw(boulder_T3: Array, thrower: Thrower, landing: int, interval: float, gravity: float) -> Throw | None:
    """Return a landed boulder's throw, None if never held or still held.

    Args:
        landing: the look at which it touches the ground.
        interval: seconds between looks.
    """
    held = np.flatnonzero(thrower.holds_T[: landing + 1])
    if len(held) == 0 or held[-1] == landing:
        return None
    release = int(held[-1])
    recent = slice(max(0, release - round(WINDOW / interval)), release + 2)
    away_T3 = thrower.centre_T3[: landing + 1] - thrower.centre_T3[0]
    # Only what helps the boulder is the machine's own: forward and up.
    own_3 = np.maximum(np.diff(thrower.centre_T3[recent], axis=0).max(axis=0) / interval, 0.0)
    speed_3 = (boulder_T3[release + 1] - boulder_T3[release]) / interval - own_3
    risen = float(boulder_T3[release, 1] - boulder_T3[0, 1] - max(0.0, away_T3[release, 1]))
    fallen = float(boulder_T3[release, 1] - boulder_T3[landing, 1])
    up, forward = max(0.0, float(speed_3[1])), float(speed_3[2])
    flown = float(boulder_T3[landing, 2] - boulder_T3[release, 2])
    return Throw(
        time=release * interval,
        height=float(boulder_T3[release, 1]),
        flown=flown,
        own_way=float(np.sqrt((away_T3[release] ** 2).sum())),
        own_lift=float(away_T3[:, 1].max()),
        on_ground=bool(thrower.stands_T[recent].any()),
        rise=min(risen + up**2 / (2 * gravity), float(boulder_T3[: landing + 1, 1].max() - boulder_T3[0, 1])),
        distance=min(forward * _flight_time(float(speed_3[1]), fallen, gravity), flown),
        gained=float(thrower.gained_T[release + 1]),
    )


def _flight_time(up: float, fallen: float, gravity: float) -> float:
    return (up + math.sqrt(max(0.0, up**2 + 2 * gravity * fallen))) / gravity
