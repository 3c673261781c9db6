"""The outcome of a simulation: ways of root and boulder, numbers.

Shapes: T looks, B bodies, 3 axes. All vectors are (x, y, z) of the game: y is up, z forward.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from covey_tasks.machines.design.types import Machine
from covey_tasks.machines.physics.constants import MAX_FREEDOM
from covey_tasks.machines.physics.throwing import Throw, Thrower, find_throw
from covey_tasks.machines.physics.worlds import World

Array = NDArray[np.float64]

Ending = Literal["complete", "unstable", "too_free"]
"""`unstable`: the simulation diverged. `too_free`: so many joints that it was not simulated. Both score 0."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A simulation, looked at every 0.02 s."""

    ending: Ending
    times_T: Array
    root_T3: Array
    """Centre of the starting block."""
    boulder_T3: Array | None
    """Centre of the boulder; None where there is none."""
    landing: int | None
    """Look at which the boulder first touched the ground; it may be 0."""
    thrower: Thrower | None = None
    """None where there is no boulder to throw."""


def without_motion(ending: Ending) -> Trajectory:
    return Trajectory(ending, np.zeros(0), np.zeros((0, 3)), None, None)


@dataclass(frozen=True, slots=True)
class Recording:
    """A simulation that can be drawn."""

    machine: Machine
    world: World
    trajectory: Trajectory
    positions_TB3: Array
    """Origins of the bodies of `assembly.assemble`."""
    rotations_TB33: Array
    """Bodies lie along the axes of the world at the start."""


@dataclass(frozen=True, slots=True)
class Flight:
    """The boulder's flight, until it lands or the simulation ends."""

    start_height: float
    """Height of its centre at the start."""
    max_height: float
    distance: float
    """Forward, from where it lay; negative where it went back."""
    range: float
    """Range in any direction on the ground."""
    gap: float
    """Distance on the ground from the starting block to the boulder where it lands."""
    lift: float
    """Rise of the starting block meanwhile above where it stood."""
    has_landed: bool
    throw: Throw | None = None
    """None where the machine never let go of it, or it did not land."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The data of scores and displays, equal in any process."""

    ending: Ending
    forward: float
    """Metres that the starting block moved to z+ in the time of the task."""
    sideways: float
    """The same to x+."""
    moved: float
    """Distance between its first and its last place, in space."""
    flight: Flight | None
    """None without a boulder."""
    samples: tuple[tuple[float, ...], ...]
    """Every 0.2 s: time, x, y, z of the starting block, and x, y, z of the boulder where there is one."""

    def to_data(self) -> dict[str, Any]:
        return asdict(self)


def outcome_of_data(data: Mapping[str, Any]) -> Outcome:
    flight = None if data["flight"] is None else _flight_of_data(data["flight"])
    samples = tuple(tuple(sample) for sample in data["samples"])
    return Outcome(**{**data, "flight": flight, "samples": samples})


def _flight_of_data(data: Mapping[str, Any]) -> Flight:
    throw = None if data["throw"] is None else Throw(**data["throw"])
    return Flight(**{**data, "throw": throw})


def summarize(trajectory: Trajectory, last: int, show_every: int, gravity: float) -> Outcome:
    """Summarize a simulation whose task ends at look `last`."""
    if trajectory.ending != "complete":
        return Outcome(trajectory.ending, 0.0, 0.0, 0.0, None, ())
    root_T3 = trajectory.root_T3
    moved_3 = root_T3[min(last, len(root_T3) - 1)] - root_T3[0]
    columns = [trajectory.times_T[:, None], trajectory.root_T3]
    if trajectory.boulder_T3 is not None:
        columns.append(trajectory.boulder_T3)
    shown = np.round(np.concatenate(columns, axis=1)[::show_every], 3)
    return Outcome(
        ending="complete",
        forward=float(moved_3[2]),
        sideways=float(moved_3[0]),
        moved=float(np.sqrt(moved_3 @ moved_3)),
        flight=_flight(trajectory, gravity),
        samples=tuple(tuple(float(x) for x in row) for row in shown),
    )


def _flight(trajectory: Trajectory, gravity: float) -> Flight | None:
    boulder_T3 = trajectory.boulder_T3
    if boulder_T3 is None:
        return None
    end = len(boulder_T3) - 1 if trajectory.landing is None else trajectory.landing
    way_3 = boulder_T3[end] - boulder_T3[0]
    apart_3 = boulder_T3[end] - trajectory.root_T3[end]
    return Flight(
        start_height=float(boulder_T3[0, 1]),
        max_height=float(boulder_T3[: end + 1, 1].max()),
        distance=float(way_3[2]),
        range=_on_ground(way_3),
        gap=_on_ground(apart_3),
        lift=float(trajectory.root_T3[: end + 1, 1].max() - trajectory.root_T3[0, 1]),
        has_landed=trajectory.landing is not None,
        throw=_throw(trajectory, gravity),
    )


def _throw(trajectory: Trajectory, gravity: float) -> Throw | None:
    boulder_T3, thrower, landing = trajectory.boulder_T3, trajectory.thrower, trajectory.landing
    if boulder_T3 is None or thrower is None or landing is None:
        return None
    interval = float(trajectory.times_T[1] - trajectory.times_T[0])
    return find_throw(boulder_T3, thrower, landing, interval, gravity)


def _on_ground(vector_3: Array) -> float:
    return float(np.sqrt(vector_3[0] ** 2 + vector_3[2] ** 2))


ENDINGS: dict[Ending, str] = {
    "complete": "simulated to the end",
    "unstable": "the simulation diverged",
    "too_free": f"more than {MAX_FREEDOM} degrees of freedom (ball joints have 3 each)",
}
"""Description of each ending."""
