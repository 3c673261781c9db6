"""Each of the five documents is started by one name: with its model and numbers, and offline."""

import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from covey.config import compose as settings
from covey.config.schema import Config
from covey.run.folder import read_summary
from covey.system.jsonl import read_rows

NUMBERS: dict[str, dict[str, Any]] = {
    "machines": {
        "model.name": "Qwen/Qwen2.5-14B-Instruct", "group_size": 64, "groups_per_step": 1, "num_steps": 400,
        "optimizer.lr": 5e-6, "optimizer.weight_decay": 0.01, "optimizer.max_grad_norm": 0.5,
        "optimizer.name": "adamw8bit", "model.lora_rank": 64, "model.lora_targets": ["all-linear"],
        "model.precision": "bfloat16", "algorithm.kl_coef": 0.001, "algorithm.advantage_clip": 0.2,
        "algorithm.entropy_coef": 0.0,
    },
    "code": {
        "model.name": "Qwen/Qwen2.5-Coder-0.5B-Instruct", "group_size": 2, "groups_per_step": 1, "num_steps": 5,
        "optimizer.lr": 2e-5, "algorithm.kl_coef": 0.04, "sampling.max_tokens": 512, "model.precision": "float16",
        "environment.problem": "fizzbuzz", "environment.difficulty": 3, "environment.partial_weight": 0.5,
        "environment.tests_per_problem": 5,
    },
    "infill": {
        "model.kind": "masked", "group_size": 8, "groups_per_step": 16, "optimizer.lr": 1e-5,
        "optimizer.schedule": "cosine", "sampling.temperature": 0.8, "sampling.top_p": 0.95, "algorithm.kl_coef": 0.1,
    },
    "torchrl_gsm8k": {
        "environment.name": "gsm8k", "environment.scheme": "torchrl", "algorithm.kl_in": "loss", "model.lora_rank": 8,
        "model.lora_alpha": 16.0, "model.lora_dropout": 0.1, "sampling.max_tokens": 1024,
    },
    "torchrl_ifeval": {
        "environment.name": "ifeval", "environment.scheme": "torchrl", "group_size": 16,
        "algorithm.sampler_kl_coef": 0.02,
    },
    "trl": {
        "model.name": "Qwen/Qwen2.5-3B-Instruct", "model.load_in_4bit": True, "model.lora_rank": 16,
        "model.lora_alpha": 32.0, "model.lora_dropout": 0.05, "model.lora_targets": ["q_proj", "v_proj"],
        "group_size": 4, "groups_per_step": 32, "optimizer.lr": 5e-6, "algorithm.kl_coef": 0.05,
        "algorithm.target_kl": 0.1, "mini_batch_groups": 4, "data.path": "trl-lib/tldr", "data.max_rows": 50000,
    },
}  # fmt: skip
"""What each document gives."""
FORMULAS = {
    "machines": ("group_center", "sequence", "reference"),
    "code": ("group_zscore", "token", "old"),
    "infill": ("group_center_batch_std", "token", "old"),
    "torchrl_gsm8k": ("group_zscore", "token", "old"),
    "torchrl_ifeval": ("group_zscore", "token", "old"),
    "trl": ("group_zscore", "sequence", "reference"),
}
"""Advantage, ratio and what the ratio is against."""


def composed(name: str, *words: str) -> Config:
    settings.register()
    rows = ["data.path=rows.jsonl"] if name == "torchrl_gsm8k" else []
    with initialize_config_dir(str(settings.CONF), version_base="1.3"):
        return settings.to_config(compose("config", overrides=[f"recipe=documents/{name}", *rows, *words]))


def value_of(config: Config, name: str) -> Any:
    found: Any = config
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", NUMBERS)
def test_a_document_has_its_model_and_numbers(name: str) -> None:
    config = composed(name)
    assert {key: value_of(config, key) for key in NUMBERS[name]} == NUMBERS[name]


@pytest.mark.parametrize("name", NUMBERS)
def test_the_offline_variant_has_the_formulas_of_the_document(name: str) -> None:
    for config in (composed(name), composed(f"{name}_nano")):
        algorithm = config.algorithm
        assert (algorithm.advantage, algorithm.ratio, algorithm.ratio_denominator) == FORMULAS[name]
    assert config.model.name.startswith("nano")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NUMBERS)
def test_the_offline_variant_learns(name: str, tmp_path: Path) -> None:
    words = [f"recipe=documents/{name}_nano", f"hydra.run.dir={tmp_path / 'run'}", "output.progress=false"]
    subprocess.run([sys.executable, "-m", "covey", "train", *words], cwd=tmp_path, check=True)
    rewards = [row["reward_mean"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")]
    third = len(rewards) // 3
    summary = read_summary(tmp_path / "run")
    assert summary is not None
    assert summary["after"]["reward_mean"]["value"] > summary["before"]["reward_mean"]["value"]
    assert fmean(rewards[-third:]) > fmean(rewards[:third])
