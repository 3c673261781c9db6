"""What a simulated machine is worth. Scores never mix in validity: a machine that is none scores 0 before.

Sources: arXiv 2510.14980 (`paper`), the code beside it, Godheritage/BesiegeField (`repo`). `strict` is ours: under the
other two most machines that carry a boulder high score by dropping it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from covey.environments.machines.trajectory import Flight, Outcome
from covey.environments.machines.worlds import World
from covey.tables import one_of

MIN_HEIGHT = 3.0
"""Metres the boulder has to reach."""
MIN_RISE = 1.0
"""Metres it has to rise above where it lay, under the strict score."""
MAX_LIFT = 3.0
"""Metres the starting block may rise meanwhile, under the strict score: a machine that leaps up as a whole takes the
boulder along."""
CARRIED = 0.25
"""A boulder that lies closer to the machine than this share of its way was carried there, not thrown."""


def car_paper(outcome: Outcome) -> float:
    """Metres driven forward. The paper's distance, without its reward for reversing and tumbling."""
    return max(0.0, outcome.forward)


def car_repo(outcome: Outcome) -> float:
    """Distance between the first and the last place in any direction, to 0.1 m."""
    return round(outcome.moved, 1)


def catapult_paper(outcome: Outcome) -> float:
    """Maximum height times forward distance, for boulders that come higher than 3 m."""
    flight = outcome.flight
    if flight is None or flight.max_height <= MIN_HEIGHT:
        return 0.0
    return flight.max_height * max(0.0, flight.distance)


def catapult_repo(outcome: Outcome) -> float:
    """(1 + rise) times distance, for boulders that come up to 3 m and were not carried to where they lie."""
    flight = outcome.flight
    if flight is None or flight.max_height < MIN_HEIGHT or is_carried(flight):
        return 0.0
    return (1 + flight.max_height - flight.start_height) * max(0.0, flight.distance)


def catapult_strict(outcome: Outcome) -> float:
    """Rise times distance, for boulders that come up to 3 m, rise by 1 m and were not carried to where they lie, by a
    machine that stays down itself."""
    flight = outcome.flight
    if flight is None or flight.max_height < MIN_HEIGHT or is_carried(flight) or flight.lift > MAX_LIFT:
        return 0.0
    rise = flight.max_height - flight.start_height
    return rise * max(0.0, flight.distance) if rise >= MIN_RISE else 0.0


def is_carried(flight: Flight) -> bool:
    """Whether the machine is near where the boulder came down, or it never came down."""
    return not flight.has_landed or flight.gap < CARRIED * flight.range


@dataclass(frozen=True, slots=True)
class Score:
    """A rule, and the surroundings it is meant for."""

    name: str
    function: Callable[[Outcome], float]
    world: World

    def of(self, outcome: Outcome) -> float:
        """0 for machines that could not be simulated to the end."""
        return self.function(outcome) if outcome.ending == "complete" else 0.0


SCORES: dict[str, Score] = {
    score.name: score
    for score in (
        Score("car_paper", car_paper, "car"),
        Score("car_repo", car_repo, "car"),
        Score("catapult_paper", catapult_paper, "catapult"),
        Score("catapult_repo", catapult_repo, "open"),
        Score("catapult_strict", catapult_strict, "catapult"),
    )
}

SHORT_NAMES: dict[str, dict[str, str]] = {
    "car": {"paper": "car_paper", "repo": "car_repo", "strict": "car_paper"},
    "catapult": {"paper": "catapult_paper", "repo": "catapult_repo", "strict": "catapult_strict"},
}
"""By task. Forward distance is strict already."""

TRANSFORMS: dict[str, Callable[[float], float]] = {"none": float, "sqrt": math.sqrt, "log1p": math.log1p}
"""Throws are heavy-tailed, and one of them would set the scale of a whole group."""


def find_score(task: str, name: str) -> Score:
    """By its short name in a task, or by its full one. Raises ValueError.

    >>> find_score("catapult", "strict").name
    'catapult_strict'
    """
    short = SHORT_NAMES[one_of("task", task, SHORT_NAMES)]
    allowed = [*short, *dict.fromkeys(short.values())]
    return SCORES[short.get(one_of(f"score of {task}", name, allowed), name)]
