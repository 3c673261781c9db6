"""How long a run is, said in steps, completions or passes: one of them counts, and all come to a number of steps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.config.auto_adjust import adjust_unset_options
from covey.config.budget import resolve_budget, steps_for_epochs, steps_for_rollouts
from covey.config.schema import Config
from covey.config.validate import validate, with_steps
from covey.loop import train
from covey.rollouts.settings import CurriculumConfig, GroupSizeStep
from covey_report.plan.settings import derive_numbers

from ..support.small import rows, small_config, words


@pytest.mark.parametrize(("total", "steps"), [(1, 1), (16, 1), (17, 2), (160, 10), (161, 11)])
def test_completions_are_counted_in_whole_steps(total: int, steps: int) -> None:
    assert steps_for_rollouts(total, groups_per_step=2, group_size=8, schedule=[]) == steps


@pytest.mark.parametrize(
    ("total", "steps"), [(48, 3), (49, 4), (64, 4), (65, 5), (72, 5), (73, 6), (80, 6), (81, 7), (82, 7), (83, 8)]
)
def test_each_group_size_of_a_schedule_counts_as_long_as_it_holds(total: int, steps: int) -> None:
    schedule = [GroupSizeStep(step=4, group_size=4), GroupSizeStep(step=6, group_size=1)]
    assert steps_for_rollouts(total, groups_per_step=2, group_size=8, schedule=schedule) == steps


@pytest.mark.parametrize(
    ("epochs", "prompts", "groups", "steps"),
    [(2, 22, 4, 11), (1, 22, 4, 6), (0.5, 22, 4, 3), (0.5, 18, 4, 3), (0.07, 100, 1, 7), (0.01, 8, 4, 1)],
)
def test_passes_are_counted_in_whole_steps(epochs: float, prompts: int, groups: int, steps: int) -> None:
    assert steps_for_epochs(epochs, prompts, groups) == steps


@pytest.mark.parametrize("name", ["num_steps", "total_rollouts", "num_epochs"])
def test_a_length_that_is_typed_takes_the_place_of_a_recipes(name: str) -> None:
    for of_recipe in ({"num_steps": 40}, {"total_rollouts": 999}, {"num_epochs": 4.0}):
        config = replace(Config(), **of_recipe)  # type: ignore[arg-type]
        setattr(config, name, 32)
        adjust_unset_options(config, {name})
        assert [config.total_rollouts, config.num_epochs] == [32 if name == other else None for other in BUDGETS]
        assert name != "num_steps" or config.num_steps == 32


BUDGETS = ("total_rollouts", "num_epochs")


def test_two_lengths_that_are_typed_are_refused_in_one_line() -> None:
    config = replace(Config(), num_steps=5, num_epochs=2.0)
    with pytest.raises(ValueError, match=r"^num_steps=5 and num_epochs=2\.0 say twice how long the run is"):
        adjust_unset_options(config, {"num_steps", "num_epochs"})


@pytest.mark.parametrize("total", [0, -5, 10**13])
def test_a_budget_out_of_range_is_refused_by_the_name_that_was_typed(total: int) -> None:
    config = replace(Config(), total_rollouts=total)
    adjust_unset_options(config, {"total_rollouts"})
    with pytest.raises(ValueError, match=r"^total_rollouts must be"):
        validate(config)


def test_completions_in_all_shorten_what_a_recipe_plans_for_more_steps() -> None:
    config = replace(Config(), total_rollouts=64, groups_per_step=2, group_size=8)
    config.group_size_schedule = [GroupSizeStep(step=3, group_size=4), GroupSizeStep(step=50, group_size=2)]
    config.optimizer.warmup_steps = 20
    adjust_unset_options(config, {"total_rollouts"})
    validate(config)
    assert config.num_steps == 5
    assert config.group_size_schedule == [GroupSizeStep(step=3, group_size=4)]
    assert config.optimizer.warmup_steps == 0
    assert derive_numbers(config)["rollouts_in_all"] == 64


def test_passes_need_prompts_that_come_in_passes() -> None:
    config = replace(Config(), num_epochs=1.0, curriculum=CurriculumConfig(name="success"))
    with pytest.raises(ValueError, match=r"num_epochs=1\.0 needs curriculum\.name = none"):
        validate(config)


def test_as_long_as_the_prompts_are_not_known_passes_are_not_counted() -> None:
    config = replace(Config(), num_epochs=2.0, num_steps=7, groups_per_step=4)
    assert resolve_budget(config).num_steps == 7
    assert resolve_budget(config, num_prompts=22).num_steps == 11


def test_a_warm_up_longer_than_the_passes_is_refused_with_what_they_came_to() -> None:
    config = replace(Config(), num_epochs=0.5, groups_per_step=4)
    config.optimizer.warmup_steps, config.optimizer.schedule = 10, "linear"
    with pytest.raises(ValueError, match=r"^num_epochs=0\.5 of 22 prompts is num_steps=3: .*optimizer\.warmup_steps"):
        with_steps(config, 22)


def passing(**changes: Any) -> Config:
    """A run over eight prompts, two a step: four steps a pass."""
    config = small_config(preflight__enabled=False, optimizer__schedule="linear", output__save_every=0, **changes)
    config.environment.num_train = 8
    return config


def curve(folder: Path, kind: str = "train") -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["learning_rate"]) for row in rows(folder / "metrics.jsonl", kind)]


@pytest.mark.long
def test_a_run_of_n_passes_equals_the_run_of_their_steps(tmp_path: Path) -> None:
    train(passing(num_steps=3), tmp_path / "steps")
    train(passing(num_steps=100, num_epochs=0.7), tmp_path / "passes")
    assert [step for step, _, _ in curve(tmp_path / "steps")] == [1, 2, 3]
    assert curve(tmp_path / "passes") == curve(tmp_path / "steps")
    assert "\nnum_steps: 3\n" in (tmp_path / "passes" / "config.yaml").read_text()


@pytest.mark.slow
def test_more_passes_resume_where_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [w for w in words(environment__num_train=8, preflight__enabled=False) if not w.startswith("num_steps=")]
    assert main(["train", *given, "num_epochs=0.5", "hydra.run.dir=run"]) == 0
    assert [step for step, _, _ in curve(Path("run"))] == [1, 2]
    # Without a change there is nothing left, and a change must be named
    assert main(["train", "resume=run"]) == 2
    assert "is finished (2 of 2 steps)" in capsys.readouterr().err
    assert main(["train", "resume=run", "num_epochs=1"]) == 2
    assert "pass resume_changes=[num_epochs]" in capsys.readouterr().err
    assert main(["train", "resume=run", "num_epochs=1", "resume_changes=[num_epochs]"]) == 0
    assert [step for step, _, _ in curve(Path("run"))] == [1, 2, 3, 4]
    # Steps take the place of passes
    assert main(["train", "resume=run", "num_steps=5", "resume_changes=[num_steps]"]) == 0
    assert [step for step, _, _ in curve(Path("run"))] == [1, 2, 3, 4, 5]


def test_covey_config_counts_the_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "model=nano", "environment.num_train=40", "num_epochs=2", "groups_per_step=8"]) == 0
    shown = capsys.readouterr().out
    assert "\nnum_steps: 10\n" in shown
    assert "\nnum_epochs: 2.0\n" in shown
