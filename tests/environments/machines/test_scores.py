"""What outcomes are worth under each rule, by numbers made by hand."""

from dataclasses import replace
from typing import Any

import pytest

from covey.environments.machines.physics.throwing import Throw
from covey.environments.machines.physics.trajectory import Flight, Outcome, outcome_of_data
from covey.environments.machines.scores import SCORES, TRANSFORMS, find_score

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
