"""Settings of environment=machines that make no sense, or that a run could not keep to, are refused in one line."""

from typing import Any

import pytest

from covey.config.schema import Config
from covey.config.validate import validate
from covey_tasks.machines.settings import MachinesConfig


def refusal(group_size: int = 8, **settings: Any) -> str:
    with pytest.raises(ValueError) as found:
        validate(Config(group_size=group_size, environment=MachinesConfig(**settings)))
    return str(found.value)


def test_the_usual_settings_are_accepted() -> None:
    validate(Config(environment=MachinesConfig()))
    validate(Config(group_size=64, environment=MachinesConfig(stages=["valid", "arm", "catapult"], form="compact")))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"stages": ["plane"]}, "environment.stages must be different ones of valid, small_car"),
        ({"stages": []}, "environment.stages must be different ones of"),
        ({"form": "yaml"}, "environment.form must be one of tree, global, compact, got yaml"),
        ({"score": "best"}, "environment.score of car must be one of"),
        ({"transform": "cube"}, "environment.transform must be one of none, sqrt, log1p, got cube"),
        ({"file_reward": -0.1}, "environment.file_reward must be >= 0, got -0.1"),
        ({"placed_reward": -0.1}, "environment.placed_reward must be >= 0, got -0.1"),
        ({"demonstration_cap": 1.5}, "environment.demonstration_cap must be <= 1, got 1.5"),
        ({"demonstration_cap": 0.0}, "environment.demonstration_cap must be > 0, got 0"),
        ({"family_share": 2.0}, "environment.family_share must be <= 1, got 2.0"),
        (
            {"form": "compact", "instruction": "Hi"},
            "environment.instruction=Hi needs environment.form = tree or global, got environment.form=compact",
        ),
        ({"num_train": 0}, "environment.num_train must be >= 1, got 0"),
        ({"num_workers": 0}, "environment.num_workers must be >= 1, got 0"),
        ({"cache_size": -1}, "environment.cache_size must be >= 0, got -1"),
        ({"timeout": 0.0}, "environment.timeout must be > 0, got 0"),
        ({"max_blocks": 49}, "environment.max_blocks must be <= 48, got 49"),
        ({"max_blocks": 2, "stages": ["valid"]}, "environment.max_blocks must be >= 3 for stage valid, got 2"),
        ({"max_blocks": 20, "stages": ["arm"]}, "environment.max_blocks must be >= 24 for stage arm, got 20"),
    ],
)
def test_what_makes_no_sense_is_one_line(settings: dict[str, Any], line: str) -> None:
    assert refusal(**settings).startswith(line)


def test_a_group_must_be_judged_before_its_deadline() -> None:
    assert refusal(group_size=64, timeout=60.0) == (
        "timeouts.scoring must be > 1920 (environment.timeout=60 for 64 machines in 2 processes), got 900"
    )


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"num_train": 3}, "environment.num_train=3 needs tasks made up, data.path = null, got data.path=rows.jsonl"),
        (
            {"demonstrations": "d.jsonl", "family_share": 0.1},
            "environment.family_share=0.1 needs designs made up, environment.demonstrations = null, "
            "got environment.demonstrations=d.jsonl",
        ),
        (
            {"demonstrations": "d.jsonl", "problem_seed": 1},
            "environment.problem_seed=1 needs tasks or designs made up, one of both files = null, "
            "got data.path=rows.jsonl, environment.demonstrations=d.jsonl",
        ),
    ],
)
def test_what_is_drawn_is_refused_beside_tasks_and_designs_of_ones_own(settings: dict[str, Any], line: str) -> None:
    config = Config(environment=MachinesConfig(**settings))
    config.data.path = "rows.jsonl"
    with pytest.raises(ValueError) as refusal:
        validate(config)
    assert str(refusal.value) == line
