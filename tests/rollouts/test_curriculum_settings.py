"""The settings of curriculum, group sizes and mixtures: what composes, what is refused and with which words."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from covey.cli.errors import explain
from covey.config import compose as settings
from covey.config.schema import Config
from covey.environments.data.settings import DataConfig
from covey.environments.settings import ArithmeticConfig, MixtureConfig, part_configs
from covey.rollouts.settings import CurriculumConfig, GroupSizeStep
from covey.run.build import build_environment
from covey.run.checkpoints.saved_settings import settings_of
from covey_report.plan.settings import derive_numbers
from covey_tasks.math.settings import Gsm8kConfig

SUMS = "{name: arithmetic, levels: [1]}"
MIXTURE = ["environment=mixture", f"environment.parts={{easy: {SUMS}, arithmetic: {{}}}}"]
BY_LEVEL = ["curriculum.name=difficulty", "environment.levels=[1,2]"]


def composed(*overrides: str) -> Config:
    settings.register()
    with initialize_config_dir(str(settings.CONF), version_base="1.3"):
        return settings.to_config(compose("config", overrides=list(overrides)))


def refusal(*overrides: str) -> str:
    """The line a user sees."""
    with pytest.raises(Exception) as caught:
        build_environment(composed(*overrides))
    return explain(caught.value)


# ------------------------------------------------------------------------------------------------ what composes


def test_parts_of_a_mixture_are_typed_by_the_environment_they_are() -> None:
    config = composed(*MIXTURE, "environment.weights.easy=2", "environment.parts.easy.num_test=7")
    assert config.environment == MixtureConfig(
        parts={"easy": ArithmeticConfig(levels=[1], num_test=7), "arithmetic": ArithmeticConfig()},
        weights={"easy": 2.0},
    )


def test_a_mixture_part_reads_its_own_rows_or_the_runs() -> None:
    parts = "{one: {name: gsm8k}, two: {name: gsm8k, scheme: trl}, arithmetic: {}, countdown: {}}"
    config = composed(
        "environment=mixture", f"environment.parts={parts}", "environment.data.one.path=a.jsonl", "data.path=b.jsonl"
    )
    own = part_configs(config)
    assert {name: part.data.path for name, part in own.items()} == {
        "one": "a.jsonl",
        "two": "b.jsonl",
        "arithmetic": None,
        "countdown": None,
    }
    assert own["two"].environment == Gsm8kConfig(scheme="trl")
    assert config.environment.data == {"one": DataConfig(path="a.jsonl")}


@pytest.mark.long
def test_saved_settings_of_a_mixture_come_back_the_same_and_cannot_change_unnoticed(tmp_path: Path) -> None:
    config = composed(*MIXTURE, "environment.weights.easy=2", "group_size_schedule=[{step: 50, group_size: 4}]")
    (tmp_path / "config.yaml").write_text(settings.to_yaml(config))
    assert settings.to_config(settings.load(tmp_path / "config.yaml")) == config
    same = settings.to_config(settings_of(tmp_path, [f"resume={tmp_path}", "environment.weights={easy: 2.0}"]))
    same.resume = None
    assert same == config
    with pytest.raises(ValueError, match=r"pass resume_changes=\[environment\.parts\] to resume anyway"):
        settings_of(tmp_path, [f"resume={tmp_path}", "environment.parts.easy.levels=[2]"])
    with pytest.raises(ValueError, match=r"pass resume_changes=\[group_size_schedule\] to resume anyway"):
        settings_of(tmp_path, [f"resume={tmp_path}", "group_size_schedule=[]"])


def test_derived_numbers_count_every_group_size() -> None:
    config = composed("num_steps=100", "groups_per_step=2", "group_size_schedule=[{step: 25, group_size: 4}]")
    assert config.group_size_schedule == [GroupSizeStep(25, 4)]
    numbers = derive_numbers(config, num_ranks=1)
    assert numbers["rollouts_in_all"] == 2 * (25 * 8 + 75 * 4)
    assert numbers["rollouts_per_step"] == 2 * 8


def test_the_curriculum_recipe_goes_from_easy_to_hard() -> None:
    config = composed("recipe=arithmetic_curriculum")
    assert config.environment.levels == [1, 2, 3]
    assert config.curriculum.name == "difficulty"
    assert Config().curriculum == CurriculumConfig(name="none", window=[0.3, 0.5])


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["curriculum.window=[0.2,0.6]"],
            "curriculum.window=[0.2,0.6] needs curriculum.name = success, got curriculum.name=none",
        ),
        (
            [*BY_LEVEL, "curriculum.explore=0.1"],
            "curriculum.explore=0.1 needs curriculum.name = success, got curriculum.name=difficulty",
        ),
        (
            ["curriculum.name=success", "curriculum.promote_at=0.9"],
            "curriculum.promote_at=0.9 needs curriculum.name = difficulty, got curriculum.name=success",
        ),
        (
            ["curriculum.name=sucess"],
            "curriculum.name must be one of none, success, difficulty, module:Class, got sucess; did you mean success?",
        ),
        (
            ["curriculum.name=success", "curriculum.options.rate=1"],
            "curriculum.options={'rate': 1} needs curriculum.name = module:Class, got curriculum.name=success",
        ),
        (
            ["curriculum.name=covey.rollouts.stream:PromptStream", "curriculum.options.rate=1"],
            "curriculum.options must be among position, _orders for PromptStream, got rate",
        ),
        (
            ["curriculum.name=success", "curriculum.window=[0.5,0.3]"],
            "curriculum.window must be two rates, 0 <= from < to <= 1, got [0.5,0.3]",
        ),
        (
            ["curriculum.name=success", "curriculum.window=[0.5]"],
            "curriculum.window must be two rates, 0 <= from < to <= 1, got [0.5]",
        ),
        (["curriculum.name=success", "curriculum.explore=1"], "curriculum.explore must be < 1, got 1.0"),
        (["curriculum.name=success", "curriculum.decay=1"], "curriculum.decay must be < 1, got 1.0"),
        ([*BY_LEVEL, "curriculum.earlier_share=1"], "curriculum.earlier_share must be < 1, got 1.0"),
        ([*BY_LEVEL, "curriculum.promote_at=0"], "curriculum.promote_at must be > 0, got 0.0"),
        ([*BY_LEVEL, "curriculum.promotion_groups=0"], "curriculum.promotion_groups must be >= 1, got 0"),
        (
            [*BY_LEVEL, "curriculum.demote_below=0.9"],
            "curriculum.demote_below must be in (0, promote_at=0.8), got 0.9",
        ),
        (
            [
                "environment=reward_functions",
                "data.path=rows.jsonl",
                "rewards=[think_format]",
                "curriculum.name=difficulty",
            ],
            "curriculum.name=difficulty needs an environment that says how hard its prompts are, "
            "got environment=reward_functions",
        ),
    ],
)
def test_a_curriculum_that_cannot_be_is_one_line(
    overrides: Sequence[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    assert refusal(*overrides) == line


@pytest.mark.parametrize(
    ("schedule", "line"),
    [
        ("[{step: 10, group_size: 1}]", "group_size_schedule: group_size must be >= 2, got 1"),
        ("[{step: 0, group_size: 4}]", "group_size_schedule: steps must rise from 1 on, got 0 after 0"),
        (
            "[{step: 20, group_size: 4}, {step: 10, group_size: 2}]",
            "group_size_schedule: steps must rise from 1 on, got 10 after 20",
        ),
        ("[{step: 100, group_size: 4}]", "group_size_schedule: step must be < num_steps=100, got 100"),
    ],
)
def test_a_schedule_that_cannot_be_is_one_line(schedule: str, line: str) -> None:
    assert refusal(f"group_size_schedule={schedule}") == line


@pytest.mark.long
def test_the_smallest_group_must_hold_what_an_advantage_asks_for() -> None:
    line = "algorithm.selection_options.k must be <= group_size=4, got 6"
    selection = ["algorithm.selection=top_k", "algorithm.selection_options.k=6"]
    composed(*selection)
    assert refusal(*selection, "group_size_schedule=[{step: 9, group_size: 4}]") == line


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["environment=mixture"], "environment=mixture needs environment.parts={NAME: {...}, ...}, got none"),
        ([*MIXTURE, "environment.weights.hard=2"], "environment.weights.hard needs a part of that name, got easy, "),
        ([*MIXTURE, "environment.data.hard.path=x"], "environment.data.hard needs a part of that name, got easy, "),
        ([*MIXTURE, "environment.weights.easy=0"], "environment.weights.easy must be > 0, got 0.0"),
        ([*MIXTURE, "environment.parts.easy.levls=[2]"], "unknown setting environment.parts.easy.levls"),
        (
            [*MIXTURE, "environment.parts.easy.num_test=many"],
            "environment.parts.easy.num_test must be an integer, got many",
        ),
        (
            [*MIXTURE, "+environment.parts.hard.levels=[2]"],
            "environment.parts.hard needs name = one of agent, ",
        ),
        (
            [*MIXTURE, "+environment.parts.mixture={}"],
            "environment.parts.mixture needs name = one of agent, arithmetic, ",
        ),
        ([*MIXTURE, "+environment.parts.hard=2"], "environment.parts.hard needs name = one of agent, arithmetic, "),
        ([*MIXTURE, "data.path=x"], "data.path=x needs a part that reads it, got none"),
        ([*MIXTURE, "rewards=[a:b]"], "rewards=[a:b] needs a part with name: reward_functions, got none"),
        (
            [*MIXTURE, "environment.data.easy.path=x"],
            "environment.parts.easy: data.path=x needs an environment that reads rows, got environment=arithmetic",
        ),
        (
            [*MIXTURE, "+environment.parts.gsm8k={}"],
            "environment.parts.gsm8k: environment=gsm8k needs data.path (a file, a folder or a hub name; any "
            "will do for ",
        ),
        (
            [*MIXTURE, "+environment.parts.gsm8k={scheme: trl, format_reward: 0.3}", "data.path=x"],
            "environment.parts.gsm8k: environment.format_reward=0.3 needs environment.scheme = covey or values, ",
        ),
    ],
)
def test_a_mixture_that_cannot_be_is_one_line(overrides: Sequence[str], line: str) -> None:
    found = refusal(*overrides)
    assert found.startswith(line)
    assert "\n" not in found


def test_a_curriculum_by_difficulty_needs_more_than_one_of_them(tmp_path: Path) -> None:
    from covey.run.build import training_stream

    config = composed("curriculum.name=difficulty")
    environment = build_environment(config)
    with pytest.raises(ValueError, match=r"^a curriculum by difficulty needs training prompts of two difficulties"):
        training_stream(config, environment, environment.prompts("train"))
