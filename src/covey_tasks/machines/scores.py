"""Scores of simulated machines; invalid ones score 0 before.

Sources: arXiv 2510.14980 (`paper`), the code beside it, Godheritage/BesiegeField (`repo`). `strict` is ours: under the
other two most machines that carry a boulder high score by dropping it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from covey.system.lookup import one_of
from covey_tasks.machines.physics.throwing import Throw
from covey_tasks.machines.physics.trajectory import Flight, Outcome
from covey_tasks.machines.physics.worlds import World

MIN_HEIGHT = 3.0
"""Metres the boulder has to reach."""
MIN_RISE = 1.0
"""Metres it has to rise above where it lay, under the strict score."""
MAX_WAY = 1.5
"""Metres between a machine's centre of mass at the release and where it stood: further off it leaps, rolls or falls."""
MAX_GAIN = 200.0
"""Joules that solids driven into each other may give until the release. A throw takes 500 to 2000, and a rule-based
machine gains 182 at most."""
MAX_LIFT = 2.0
"""Metres that centre may rise until the boulder lands. Catapults hop when they throw, 1 to 2 m where they are light."""
CARRIED = 0.25
"""A boulder that lies closer to the machine than this share of its way was carried there, not thrown."""


def car_paper(outcome: Outcome) -> float:
    """Score metres driven forward, the paper's distance without reversing and tumbling."""
    return max(0.0, outcome.forward)


def car_repo(outcome: Outcome) -> float:
    """Score the distance from first to last place, to 0.1 m."""
    return round(outcome.moved, 1)


def catapult_paper(outcome: Outcome) -> float:
    """Score maximum height times forward distance, for boulders above 3 m."""
    flight = outcome.flight
    if flight is None or flight.max_height <= MIN_HEIGHT:
        return 0.0
    return flight.max_height * max(0.0, flight.distance)


def catapult_repo(outcome: Outcome) -> float:
    """Score (1 + rise) times distance, for uncarried boulders above 3 m."""
    flight = outcome.flight
    if flight is None or flight.max_height < MIN_HEIGHT or is_carried(flight):
        return 0.0
    return (1 + flight.max_height - flight.start_height) * max(0.0, flight.distance)


def catapult_strict(outcome: Outcome) -> float:
    """Score a throw's rise times distance; it must reach 3 m.

    It rises by 1 m at least, the machine stands on the ground when it lets go, and only what the boulder does beyond
    the machine's own motion counts (module `throwing`).
    """
    flight = outcome.flight
    if flight is None or flight.max_height < MIN_HEIGHT or is_carried(flight):
        return 0.0
    throw, rise = flight.throw, flight.max_height - flight.start_height
    if throw is None or not is_thrown(throw) or rise < MIN_RISE:
        return 0.0
    return max(0.0, throw.rise) * throw.distance


def is_thrown(throw: Throw) -> bool:
    """Return True if it stands, stays down, throws further than it falls."""
    stands = throw.on_ground and throw.own_way <= MAX_WAY and throw.own_lift <= MAX_LIFT
    return stands and throw.distance >= throw.height and throw.gained <= MAX_GAIN


def is_carried(flight: Flight) -> bool:
    """Check whether the boulder lies near the machine, or never landed."""
    return not flight.has_landed or flight.gap < CARRIED * flight.range


@dataclass(frozen=True, slots=True)
class Score:
    """A rule, and the surroundings it is meant for."""

    name: str
    function: Callable[[Outcome], float]
    world: World

    def of(self, outcome: Outcome) -> float:
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
"""Short names of scores by task. Forward distance is strict already."""

TRANSFORMS: dict[str, Callable[[float], float]] = {"none": float, "sqrt": math.sqrt, "log1p": math.log1p}
"""Throws are heavy-tailed, and one of them would set the scale of a whole group."""


def find_score(task: str, name: str) -> Score:
    """Find a score by its full or a task's short name. ValueError.

    >>> find_score("catapult", "strict").name
    'catapult_strict'
    """
    short = SHORT_NAMES[one_of("task", task, SHORT_NAMES)]
    allowed = [*short, *dict.fromkeys(short.values())]
    return SCORES[short.get(one_of(f"score of {task}", name, allowed), name)]
