"""What outcomes are worth under each rule, by numbers made by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from covey_tasks.machines.physics.throwing import Throw, Thrower, find_throw
from covey_tasks.machines.physics.trajectory import Flight, Outcome, Trajectory, outcome_of_data, summarize
from covey_tasks.machines.physics.worlds import WORLDS
from covey_tasks.machines.prompts import WORDS
from covey_tasks.machines.scores import (
    MAX_LIFT,
    MAX_WAY,
    MIN_HEIGHT,
    MIN_RISE,
    SCORES,
    TRANSFORMS,
    find_score,
)

RELEASE = Throw(time=1.0, height=7.0, flown=18.0, own_way=0.4, own_lift=0.5, on_ground=True, rise=4.0, distance=16.0)
THROW = Flight(4.0, 9.0, distance=20.0, range=20.0, gap=18.0, lift=0.5, has_landed=True, throw=RELEASE)
DRIVE = Outcome("complete", forward=12.34, sideways=3.0, moved=12.7, flight=None, samples=((0.0, 0.0, 1.0, 0.0),))


def thrown(**changes: Any) -> Outcome:
    return replace(DRIVE, flight=replace(THROW, **changes))


def released(**changes: Any) -> Outcome:
    return replace(DRIVE, flight=replace(THROW, throw=replace(RELEASE, **changes)))


def worth(name: str, outcome: Outcome) -> float:
    return SCORES[name].of(outcome)


def test_a_throw_is_worth_what_each_rule_says() -> None:
    assert worth("catapult_paper", thrown()) == 9.0 * 20.0
    assert worth("catapult_repo", thrown()) == 6.0 * 20.0
    assert worth("catapult_strict", thrown()) == 4.0 * 16.0


@pytest.mark.parametrize(
    ("changes", "paper", "repo", "strict"),
    [
        ({"max_height": 3.0, "start_height": 1.0}, 0.0, 60.0, 64.0),  # exactly 3 m: the paper wants more
        ({"max_height": 2.9, "start_height": 1.0}, 0.0, 0.0, 0.0),
        ({"max_height": 4.9}, 98.0, 38.0, 0.0),  # rises by less than 1 m
        ({"max_height": 5.0}, 100.0, 40.0, 64.0),
        ({"gap": 4.9}, 180.0, 0.0, 0.0),  # carried: nearer than a quarter of the way
        ({"gap": 5.1}, 180.0, 120.0, 64.0),
        ({"has_landed": False}, 180.0, 0.0, 0.0),
        ({"distance": -20.0}, 0.0, 0.0, 64.0),
        ({"distance": 2.0, "gap": 1.0}, 18.0, 0.0, 0.0),  # carried to the side
        ({"throw": None}, 180.0, 120.0, 0.0),  # never let go
    ],
)
def test_the_conditions_of_a_throw(changes: dict[str, Any], paper: float, repo: float, strict: float) -> None:
    found = [worth(f"catapult_{rule}", thrown(**changes)) for rule in ("paper", "repo", "strict")]
    assert found == pytest.approx([paper, repo, strict])


@pytest.mark.parametrize(
    ("changes", "strict"),
    [
        ({"on_ground": False}, 0.0),  # let go in the air
        ({"own_way": 1.5}, 64.0),
        ({"own_way": 1.6}, 0.0),  # is somewhere else by then: leapt, rolled or fell
        ({"own_lift": 2.0}, 64.0),
        ({"own_lift": 2.1}, 0.0),  # leaps after it
        ({"distance": 7.0}, 28.0),
        ({"distance": 6.9}, 0.0),  # falls further than it flies
        ({"rise": -1.0}, 0.0),
        ({"gained": 200.0}, 64.0),
        ({"gained": 201.0}, 0.0),  # by what was driven into what
        ({"distance": -9.0}, 0.0),
    ],
)
def test_a_throw_counts_where_the_machine_stands_and_stays_down(changes: dict[str, float], strict: float) -> None:
    assert worth("catapult_strict", released(**changes)) == pytest.approx(strict)


def test_a_drive_counts_forward_or_in_the_repository_anywhere() -> None:
    assert worth("car_paper", DRIVE) == 12.34
    assert worth("car_paper", replace(DRIVE, forward=-5.0)) == 0.0
    assert worth("car_repo", replace(DRIVE, forward=-5.0, moved=5.06)) == 5.1


@pytest.mark.parametrize("name", SCORES)
def test_what_was_not_simulated_to_the_end_scores_0(name: str) -> None:
    for ending in ("unstable", "too_free"):
        assert worth(name, replace(thrown(), ending=ending)) == 0.0


@pytest.mark.parametrize("name", ["catapult_paper", "catapult_repo", "catapult_strict"])
def test_a_catapult_without_a_boulder_scores_0(name: str) -> None:
    assert worth(name, DRIVE) == 0.0


def test_scores_go_by_short_and_full_names() -> None:
    assert find_score("catapult", "strict").name == "catapult_strict"
    assert find_score("catapult", "catapult_repo").world == "open"
    assert find_score("catapult", "paper").world == "catapult"
    assert find_score("car", "strict").name == find_score("car", "paper").name == "car_paper"
    with pytest.raises(ValueError, match="score of car must be one of paper, repo, strict, car_paper, car_repo, got x"):
        find_score("car", "x")
    with pytest.raises(ValueError, match="task must be one of car, catapult, got boat"):
        find_score("boat", "strict")


def test_transforms_keep_0_and_order() -> None:
    for transform in TRANSFORMS.values():
        values = [transform(x) for x in (0.0, 1.0, 4.0, 300.0)]
        assert values[0] == 0.0
        assert values == sorted(values)
    assert TRANSFORMS["sqrt"](9.0) == 3.0


def test_an_outcome_comes_back_from_its_data_as_it_was() -> None:
    for outcome in (DRIVE, thrown()):
        assert outcome_of_data(outcome.to_data()) == outcome


def test_each_score_has_its_walls_and_the_prompt_says_its_limits() -> None:
    worlds = {name: score.world for name, score in SCORES.items()}
    assert (worlds["car_paper"], worlds["car_repo"], worlds["catapult_strict"]) == ("car", "car", "catapult")
    assert [(wall.centre, wall.half) for wall in WORLDS["car"]] == [
        ((-12.5, 2.5, 50.0), (0.5, 2.5, 70.0)),
        ((12.5, 2.5, 50.0), (0.5, 2.5, 70.0)),
        ((0.0, 2.5, -16.5), (12.0, 2.5, 0.5)),
    ]
    limits = (MIN_HEIGHT, MIN_RISE, MAX_WAY, MAX_LIFT)
    assert limits == (3.0, 1.0, 1.5, 2.0)
    assert [f"{limit:g} m" in WORDS["goals"]["catapult_strict"] for limit in limits] == [True] * 4


# ------------------------------------------------------------------------------------------------ what a throw is


CENTRE = [(0.0, 1.0 + 0.05 * min(look, 4), 0.1 * min(look, 4)) for look in range(12)]
"""Of a machine that drives and rises until it lets go at look 4, in steps of 0.1 s."""
BOULDER = [(0.0, 2.0, 0.0)] * 4 + [(0.0, 3.0, 1.0), (0.0, 3.4, 2.2), *[(0.0, 3.9, 9.0)] * 4, *[(0.0, 0.95, 15.0)] * 2]
HOLDS = [True] * 5 + [False] * 6 + [True]


def throw_of(boulder: list[tuple[float, float, float]], holds: list[bool], **machine: Any) -> Throw | None:
    centre_T3 = np.array(CENTRE)
    centre_T3[8, 1] = 1.5  # a hop while the boulder flies
    gained_T = np.array([0.0, 0, 0, 0, 3, 7, 9, 9, 9, 9, 9, 9])
    thrower = replace(Thrower(centre_T3, np.array(holds), np.arange(12) == 3, gained_T), **machine)
    return find_throw(np.array(boulder), thrower, landing=10, interval=0.1, gravity=10.0)


def test_a_throw_is_what_the_boulder_does_beyond_the_machines_own_motion() -> None:
    """The boulder leaves at 12 and 4 m/s, of which 1 and 0.5 are the machine's, and falls 2.05 m."""
    found = throw_of(BOULDER, HOLDS)
    assert found is not None
    assert (found.time, found.height, found.flown) == (pytest.approx(0.4), 3.0, 14.0)
    assert (found.own_way, found.own_lift) == (pytest.approx(0.447214), 0.5)
    assert (found.on_ground, found.gained) == (True, 7.0)
    assert found.rise == pytest.approx(0.8 + 3.5**2 / 20)
    assert found.distance == pytest.approx(11 * 1.0797260)


def test_a_throw_is_no_more_than_what_the_boulder_did() -> None:
    low = [*BOULDER[:6], *[(0.0, 3.2, 5.0)] * 4, *[(0.0, 0.95, 9.0)] * 2]
    found = throw_of(low, HOLDS)
    assert found is not None
    assert (found.rise, found.distance) == (pytest.approx(1.4), 8.0)


def test_recoil_takes_nothing_away_and_who_stood_long_before_does_not_stand() -> None:
    backward_T3 = np.array([(0.0, 1.0, -0.1 * look) for look in range(12)])
    found = throw_of(BOULDER, HOLDS, centre_T3=backward_T3, stands_T=np.arange(12) < 2)
    assert found is not None
    assert (found.rise, found.distance) == (pytest.approx(1 + 4**2 / 20), pytest.approx(12 * 1.1549834))
    assert not found.on_ground


def test_what_was_never_held_or_is_still_held_when_it_lands_is_no_throw() -> None:
    assert throw_of(BOULDER, [False] * 12) is None
    assert throw_of(BOULDER, [*HOLDS[:10], True, True]) is None


def test_a_flight_ends_at_landing_and_a_drive_with_its_time() -> None:
    root_T3 = np.array([(0, 1, 0), (1, 1, 1), (1, 1.5, 2), (1, 1, 3), (2, 3, 6), (9, 9, 9)], dtype=float)
    boulder_T3 = np.array([(0, 2, 0), (0, 4, 3), (2, 5, 6), (4, 1, 7), (9, 9, 9), (9, 9, 9)], dtype=float)
    trajectory = Trajectory("complete", np.arange(6) * 0.1, root_T3, boulder_T3, landing=3)
    found = summarize(trajectory, last=4, show_every=4, gravity=10.0)
    assert (found.forward, found.sideways, found.moved) == (6.0, 2.0, pytest.approx(44**0.5))
    assert found.flight == Flight(2.0, 5.0, 7.0, pytest.approx(65**0.5), 5.0, 0.5, has_landed=True)
    assert found.samples == ((0.0, 0.0, 1.0, 0.0, 0.0, 2.0, 0.0), (0.4, 2.0, 3.0, 6.0, 9.0, 9.0, 9.0))
    aloft = summarize(replace(trajectory, landing=None), last=4, show_every=4, gravity=10.0).flight
    assert aloft == Flight(2.0, 9.0, 9.0, pytest.approx(162**0.5), 0.0, 8.0, has_landed=False)
