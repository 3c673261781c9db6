"""The table of all offline recipes says which rose, and names recipes that there are."""

from typing import Any

import pytest

from benchmarks.demo.all import RECIPES, has_risen, row, table
from covey.config.schema import group_choices


def result(low: float, seconds: float = 61.4) -> dict[str, Any]:
    def estimate(value: float, low: float) -> dict[str, float]:
        return {"value": value, "low": low, "high": value + 0.1}

    return {
        "before": estimate(0.2, 0.1),
        "after": estimate(0.5, 0.4),
        "gain": estimate(0.3, low),
        "seconds": seconds,
        "machine": "a machine",
        "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
    }


@pytest.mark.parametrize(("low", "rose"), [(0.01, True), (0.0, False), (-0.1, False)])
def test_a_reward_has_risen_where_the_interval_of_its_gain_lies_above_zero(low: float, rose: bool) -> None:
    assert has_risen(result(low)) is rose


def test_a_row_shows_before_after_gain_and_seconds() -> None:
    assert row("code", "1", result(0.25)) == (
        "| code | 1 | 0.200 [0.100, 0.300] | 0.500 [0.400, 0.600] | +0.300 [+0.250, +0.400] | yes | 61 |"
    )


def test_the_table_closes_each_recipe_with_the_median_of_its_gains() -> None:
    page = table({"code": {"0": result(0.1), "1": result(-0.1)}})
    assert "median +0.300 (+0.300 to +0.300)" in page
    assert page.count("**no**") == 1


def test_every_recipe_of_the_table_exists() -> None:
    assert set(RECIPES) <= set(group_choices()["recipe"])
