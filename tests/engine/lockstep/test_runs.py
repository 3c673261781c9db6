"""Whole runs on the general path: a hybrid model is sampled, trained, killed, resumed and replayed."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.checks.architecture_configs import tiny_config
from covey.config.schema import Config
from covey.loop import train
from covey_report.runs.replay import read_schedule

from ...report.runs.test_replay import config as replay_config
from ...report.runs.test_replay import last_digest, replayed, trained
from ...support.small import TOKENIZER, equal, rows, saved_policy, scripted, small_config, timeless, use

pytestmark = pytest.mark.long
ADAPTERS = {"model__lora_rank": 2}
NANO = {f"model__{name}": value for name, value in vars(Config().model).items() if name.startswith("nano_")}


RUNS = [
    ("qwen3_5_text", {}),
    ("qwen3_5_text", ADAPTERS),
    ("nemotron_h", {}),
    ("lfm2_moe", {}),
    ("llama4_text", ADAPTERS),
    ("qwen3_5_moe_text", {}),
    ("qwen3_5_moe_text", ADAPTERS),
    ("qwen3_moe", {}),
]


def hybrid(architecture: str, folder: Path) -> str:
    """Save a tiny model of an architecture."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(tiny_config(architecture)).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, scripted())


def config(name: str, make: Callable[..., Config] = small_config, **changes: Any) -> Config:
    return make(model__name=name, preflight__enabled=False, **NANO, **changes)


@pytest.mark.parametrize(("architecture", "changes"), RUNS)
def test_a_resumed_run_of_a_hybrid_ends_as_one_never_stopped(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    name = hybrid(architecture, tmp_path / "model")
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    chosen = {"num_steps": 4, "output__save_every": 2, **changes}
    train(config(name, **chosen), whole)
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-000004")
    train(config(name, resume=str(resumed), **chosen), resumed)
    assert timeless(rows(resumed / "metrics.jsonl")) == timeless(rows(whole / "metrics.jsonl"))
    assert equal(saved_policy(resumed), saved_policy(whole))


@pytest.mark.parametrize(("architecture", "changes"), RUNS)
def test_an_asynchronous_run_of_a_hybrid_replays_to_the_same_weights(
    architecture: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covey.engine.native.engine.TURN_SECONDS", 0.0)
    chosen = {"num_steps": 3, **changes}
    name = hybrid(architecture, tmp_path / "model")
    run = trained(tmp_path / "run", config(name, replay_config, **chosen))
    assert len({step.digest for step in read_schedule(run)}) == 3, "every step changed the weights"
    assert replayed(run, config(name, replay_config, **chosen), tmp_path / "scratch") == last_digest(run)
