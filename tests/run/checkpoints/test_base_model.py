"""Adapters name a base model that can be loaded again: kept in the run folder where no other name leads to it."""

import shutil
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from torch import Tensor
from transformers import AutoModelForCausalLM

from covey.policy import sharding
from covey.policy.attention.base import DENSE
from covey.policy.models.loading import load_policy
from covey.policy.models.naming import COLD_START_REPORT
from covey.policy.models.nano import ARCHITECTURES
from covey.policy.policy import Policy
from covey.policy.settings import ModelConfig
from covey.run.checkpoints.checkpoint import save_checkpoint, save_policy
from covey.system import disk

from ...support.builders import OptimizerConfig, byte_batch, make_trainer, nano, same, weights

PROBE = torch.arange(1, 12)[None]


@torch.no_grad()
def logits(policy: Policy) -> Tensor:
    return policy.logits(PROBE, PROBE - 1, DENSE)


def trained(policy: Policy) -> Policy:
    make_trainer(policy, optimizer=OptimizerConfig(name="sgd", lr=0.5)).step(byte_batch(), 0)
    return policy


def saved(policy: Policy, run: Path, step: int = 1) -> Path:
    run.mkdir(exist_ok=True)
    return save_checkpoint(run / "checkpoints", step, policy, {}, {}) / "policy"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_adapters_of_a_policy_built_from_nothing_are_loaded_by_covey_peft_and_transformers(
    architecture: str, tmp_path: Path
) -> None:
    policy = trained(nano(nano_architecture=architecture, lora_rank=4))
    name = str(saved(policy, tmp_path / "run"))
    again = load_policy(ModelConfig(name=name, lora_rank=4), seed=7)
    assert torch.equal(logits(again), logits(policy))
    for loader in (AutoPeftModelForCausalLM, AutoModelForCausalLM):
        with torch.no_grad():
            found = loader.from_pretrained(name)(input_ids=PROBE).logits[0]
        assert float((found - logits(policy)).abs().max()) < 1e-5


@pytest.mark.long
def test_the_base_model_is_found_after_the_run_folder_moved(tmp_path: Path) -> None:
    policy = trained(nano(lora_rank=4))
    saved(policy, tmp_path / "run")
    shutil.move(tmp_path / "run", tmp_path / "moved")
    saved(nano(seed=5, lora_rank=4), tmp_path / "run")  # another base model lies where the first one lay
    moved = tmp_path / "moved" / "checkpoints" / "step-000001" / "policy"
    again = load_policy(ModelConfig(name=str(moved), lora_rank=4), seed=0)
    assert same(weights(again), weights(policy))
    further = load_policy(ModelConfig(name=str(saved(again, tmp_path / "further")), lora_rank=4), seed=0)
    assert same(weights(further), weights(policy))
    assert not (tmp_path / "further" / "base").exists()


def test_the_base_model_is_written_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = nano(lora_rank=4)

    def killed(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(disk.os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            saved(policy, tmp_path / "run")
    assert not list((tmp_path / "run").glob("base*"))
    (tmp_path / "run" / "base.tmp-killed").mkdir()
    saved(policy, tmp_path / "run")
    file = tmp_path / "run" / "base" / "model.safetensors"
    before = file.stat().st_mtime_ns
    saved(policy, tmp_path / "run", step=2)
    assert file.stat().st_mtime_ns == before
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["base", "checkpoints"]


@pytest.mark.long
def test_a_warmed_base_model_outlives_the_cache_that_it_was_taken_from(tmp_path: Path) -> None:
    cache = tmp_path / "cold-start-1"
    save_policy(nano(seed=3), cache)
    (cache / COLD_START_REPORT).write_text("{}")
    policy = trained(load_policy(ModelConfig(name=str(cache), lora_rank=4), seed=0))
    name = str(saved(policy, tmp_path / "run"))
    assert not (tmp_path / "run" / "base" / COLD_START_REPORT).exists()
    shutil.rmtree(cache)
    assert same(weights(load_policy(ModelConfig(name=name, lora_rank=4), seed=0)), weights(policy))


def test_a_base_model_with_a_name_is_not_copied_and_is_named_absolutely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_policy(nano(), Path("model"))
    policy = trained(load_policy(ModelConfig(name="model", lora_rank=4), seed=0))
    name = str(saved(policy, tmp_path / "run"))
    assert not Path("run/base").exists()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert same(weights(load_policy(ModelConfig(name=name, lora_rank=4), seed=0)), weights(policy))


def test_whole_weights_of_a_sharded_policy_make_the_same_base_model(tmp_path: Path) -> None:
    policy = trained(nano(lora_rank=4))
    (tmp_path / "run").mkdir()
    whole = sharding.full_state_dict(policy.model)
    name = save_checkpoint(tmp_path / "run" / "checkpoints", 1, policy, {}, {}, whole) / "policy"
    assert same(weights(load_policy(ModelConfig(name=str(name), lora_rank=4), seed=0)), weights(policy))
