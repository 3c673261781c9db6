"""The pages about small policies that build machines: what is reached, and curves that have gaps."""

from typing import Any

import pytest

from benchmarks.demo.machines import TARGETS, factor, page, row
from benchmarks.demo.machines_passk import CURVES, ESTIMATORS, carried, table
from covey.config.schema import group_choices


def result(before: float, after: float) -> dict[str, Any]:
    return {
        "score": [before, after],
        "nonzero": [before / 10, after / 10],
        "best": 35.5,
        "unique": [60.0, 3.0],
        "seconds": 61.4,
        "physics": "abc-mujoco-4.0.1",
        "machine": "a machine",
    }


def test_a_target_is_how_often_the_start_goes_into_the_end() -> None:
    assert factor(result(0.5, 20.0), TARGETS["machines_nano"]) == pytest.approx(40.0)
    assert factor(result(0.2, 5.0), TARGETS["catapult_nano"]) == pytest.approx(25.0)


def test_a_start_at_nothing_counts_as_the_least_that_could_have_been_seen() -> None:
    assert factor(result(0.0, 5.0), TARGETS["catapult_nano"]) == pytest.approx(0.5 * 256)


@pytest.mark.parametrize(("after", "verdict"), [(5.0, "score x 10 (reached)"), (4.9, "score x 10 (**not reached**)")])
def test_a_row_says_whether_the_target_was_reached(after: float, verdict: str) -> None:
    assert verdict in row("machines_nano", "1", result(0.5, after))


def test_the_page_has_a_row_for_each_seed_of_each_recipe() -> None:
    text = page({recipe: {"0": result(0.5, 20.0), "1": result(0.5, 20.0)} for recipe in TARGETS})
    assert text.count("(reached)") == 4
    assert "physics\nabc-mujoco-4.0.1" in text


def test_a_step_without_a_signal_keeps_the_entropy_of_the_step_before() -> None:
    assert carried([1.0, None, 0.5, None]) == [1.0, 1.0, 0.5, 0.5]


def test_the_table_of_estimators_shows_every_seed() -> None:
    found = {"after": 20.0, "after_best": 25.0, "seen": 30.0} | {name: [1.0, None, 0.5] for name in CURVES}
    text = table({name: {"1": found, "0": found | {"after": 10.0}} for name in ESTIMATORS})
    assert text.count("| 10.0, 20.0 | 25.0, 25.0 | 30.0, 30.0 | 0.50, 0.50 | 0, 0 |") == len(ESTIMATORS)


def test_every_recipe_of_the_demo_exists() -> None:
    assert set(TARGETS) <= set(group_choices()["recipe"])
