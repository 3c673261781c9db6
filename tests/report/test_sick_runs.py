"""Real runs: those with one thing wrong are named first or second, and the recipes are not called sick."""

from pathlib import Path

import pytest

from benchmarks.checks.doctor.__main__ import RECIPES, SEEDS, names_first, train, words_of
from benchmarks.checks.doctor.planted import PLANTED
from covey_doctor.finding import Level
from covey_report.doctor.health import health_of, read_for_doctor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("name", [name for name, planted in PLANTED.items() if planted.expected])
def test_what_is_wrong_with_a_run_is_named_first_or_second(tmp_path: Path, name: str) -> None:
    train(tmp_path / "run", ["-m", "benchmarks.checks.doctor.planted", name])
    found = health_of(read_for_doctor(tmp_path / "run")).findings
    assert names_first(PLANTED[name].expected, found), [one.title for one in found]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_recipe_is_critical(tmp_path: Path, recipe: str, seed: int) -> None:
    train(tmp_path / "run", ["-m", "covey", "train", f"recipe={recipe}", *words_of(recipe, seed)])
    found = health_of(read_for_doctor(tmp_path / "run")).findings
    assert [one.title for one in found if one.level is Level.SICK] == []
