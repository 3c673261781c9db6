"""The recipe of the reward-function document: its numbers, its reward, and the stand-in that learns offline."""

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from covey.cli.main import main
from covey.config import compose as settings
from covey.config.schema import Config
from covey.environments.reward_functions.environment import reward_functions

from ...support.small import logging_as_it_was, rows


def composed(*overrides: str) -> Config:
    settings.register()
    with initialize_config_dir(str(settings.CONF), version_base="1.3"):
        return settings.to_config(compose("config", overrides=list(overrides)))


def test_the_recipe_has_the_numbers_of_the_document() -> None:
    config = composed("recipe=tldr")
    model, algorithm = config.model, config.algorithm
    assert (model.name, model.load_in_4bit) == ("Qwen/Qwen2.5-3B-Instruct", True)
    assert (model.lora_rank, model.lora_alpha, model.lora_dropout) == (16, 32.0, 0.05)
    assert model.lora_targets == ["q_proj", "v_proj"]
    assert (algorithm.kl_coef, algorithm.target_kl, config.optimizer.lr) == (0.05, 0.1, 5e-6)
    assert config.group_size * config.groups_per_step == 128
    assert (config.group_size, config.data.path, config.data.max_rows) == (4, "trl-lib/tldr", 50000)


def test_its_reward_is_that_of_the_document() -> None:
    """A point for a full stop at the end, a thousandth off for each word above 512, marks counted."""
    rewards = reward_functions(composed("recipe=tldr").rewards)
    given = ["A cat sat.", "A cat sat", "word " * 511 + ".", "word " * 611 + ". \n", "word " * 512 + "and more"]
    values = [sum(column) for column in zip(*(r.function(completions=given) for r in rewards), strict=True)]
    assert values == pytest.approx([1.0, 0.0, 1.0, 0.9, -0.002])


def test_the_stand_in_runs_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [
        *("num_steps=1", "groups_per_step=2", "group_size=2", "sampling.max_tokens=8", "preflight.enabled=false"),
        *("model.nano_hidden_size=16", "model.nano_num_layers=1", "model.nano_num_heads=2", "model.lora_rank=2"),
        *("cold_start.num_steps=1", "cold_start.num_check_prompts=2", "cold_start.batch_size=2"),
        *("evaluation.num_prompts=2", "evaluation.num_samples=1", "evaluation.k=[1]", "output.progress=false"),
    ]
    with logging_as_it_was():
        words = [
            "train",
            "recipe=tldr_nano",
            *small,
            f"cold_start.cache_dir={tmp_path}",
            f"hydra.run.dir={tmp_path}/run",
        ]
        assert main(words) == 0, capsys.readouterr().err
    (step,) = rows(tmp_path / "run" / "metrics.jsonl", "train")
    assert {"reward/length_penalty", "reward/sentence_end"} <= set(step)


@pytest.mark.slow
def test_the_stand_in_learns(tmp_path: Path) -> None:
    with logging_as_it_was():
        words = ["recipe=tldr_nano", "output.progress=false", f"cold_start.cache_dir={tmp_path}"]
        assert main(["train", *words, f"hydra.run.dir={tmp_path}/run"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    before, after = (summary[when]["reward_mean"] for when in ("before", "after"))
    assert after["low"] > before["high"] + 0.3
