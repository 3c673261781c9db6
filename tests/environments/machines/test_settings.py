"""Settings of environment=machines that make no sense, or that a run could not keep to, are refused in one line."""

from typing import Any

import pytest

from covey.config.schema import Config
from covey.config.validate import validate
from covey.environments.machines.settings import MachinesConfig


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
        ({"file_reward": -0.1}, "environment.file_reward and placed_reward must be >= 0, got -0.1 and 0.0"),
        ({"demonstration_cap": 1.5}, "environment.demonstration_cap must be in (0, 1], got 1.5"),
        ({"family_share": 2.0}, "environment.family_share must be <= 1, got 2.0"),
        ({"form": "compact", "instruction": "Hi"}, "environment.instruction needs environment.form=tree or global"),
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
        "environment.timeout=60 for 64 machines in 2 processes needs timeouts.scoring > 1920, got 900"
    )


def test_rows_are_refused_since_nothing_would_read_them() -> None:
    config = Config(environment=MachinesConfig())
    config.data.path = "rows.jsonl"
    with pytest.raises(ValueError, match=r"data\.path=rows\.jsonl needs an environment that reads rows"):
        validate(config)
