"""A reference of one's own: another model is compared with, whole, frozen, and of the same vocabulary."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from covey.loop import train
from covey.policy.models.reference_model import (
    load_reference_model,
    model_hash,
    reference_in_memory,
    settings_of_reference,
    vocabulary_of,
)
from covey.policy.policy import Policy
from covey.policy.reference import Reference
from covey.policy.settings import ModelConfig
from covey.run.checkpoints.checkpoint import save_policy
from covey_report.plan.settings import plan

from ...support.builders import nano, probe_logits, saved_model
from ...support.small import rows, scripted, small_config, use

LORA = {"lora_rank": 4}
KL = {"algorithm__kl_coef": 0.5, "preflight__enabled": False}


def saved(folder: Path, policy: Policy) -> str:
    save_policy(policy, folder)
    return str(folder)


def own_reference(policy: Policy, name: str, **settings: Any) -> Reference:
    return load_reference_model(ModelConfig(**settings), name, None, vocabulary_of(policy), seed=0)


def logits_of(reference: Reference) -> Tensor:
    with reference.active() as policy:
        return probe_logits(policy)


def stirred(policy: Policy) -> Policy:
    """Adapters that add something."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for name, weight in policy.model.named_parameters():
            if ".lora_B." in name:
                weight.normal_(std=0.5)
    return policy


@pytest.mark.parametrize("settings", [{}, LORA], ids=["whole", "lora"])
def test_the_reference_is_the_named_model_frozen_and_without_adapters_of_the_policy(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    policy, other = stirred(nano(**settings)), nano(seed=7, nano_hidden_size=64)
    found = own_reference(policy, saved(tmp_path / "other", other), **settings)
    assert torch.equal(logits_of(found), probe_logits(other))
    assert not any(weight.requires_grad for weight in found.policy.model.parameters())
    before = probe_logits(policy)
    logits_of(found)
    assert torch.equal(probe_logits(policy), before)


def test_the_references_saved_adapters_stay_on_at_any_lora_rank(tmp_path: Path) -> None:
    base = saved(tmp_path / "base", nano(seed=7))
    trained = stirred(nano(name=base, lora_rank=2, lora_alpha=8.0))
    trained.model.peft_config["default"].base_model_name_or_path = base
    found = own_reference(nano(**LORA), saved(tmp_path / "trained", trained), **LORA)
    assert torch.equal(logits_of(found), probe_logits(trained))
    assert not torch.equal(logits_of(found), probe_logits(nano(name=base)))


def test_another_vocabulary_is_refused_in_one_line(tmp_path: Path) -> None:
    name = saved_model(tmp_path / "other", "qwen2", vocab_size=300)
    message = f"^algorithm.reference_model={name} must have the policy's vocabulary of 260 tokens, it has 300$"
    with pytest.raises(ValueError, match=message):
        own_reference(nano(), name)


def test_a_reference_that_has_learnt_fewer_positions_than_the_policy_reads_is_refused(tmp_path: Path) -> None:
    policy = nano()
    name = saved_model(tmp_path / "other", "gpt2", max_position_embeddings=policy.max_length - 1)
    with pytest.raises(ValueError, match=r"must read as long texts as the policy, .* it has learnt positions for"):
        own_reference(policy, name)
    assert own_reference(policy, saved_model(tmp_path / "as long", "gpt2", max_position_embeddings=policy.max_length))


def test_other_tokens_under_the_same_numbers_are_refused(tmp_path: Path) -> None:
    policy = nano()
    name = saved(tmp_path / "other", nano(seed=1))
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text().replace('"a":', '"\\u2200":', 1))
    with pytest.raises(ValueError, match=r"must have the policy's tokens, its tokenizer numbers others$"):
        own_reference(policy, name)


def test_a_reference_that_is_no_model_is_refused_under_its_own_setting(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^algorithm.reference_model=.* is no directory of a causal language model"):
        own_reference(nano(), str(tmp_path))


@pytest.mark.parametrize("settings", [{}, LORA], ids=["whole", "lora"])
def test_a_reference_model_in_memory_is_used_unchanged(tmp_path: Path, settings: dict[str, Any]) -> None:
    policy, other = nano(**settings), nano(seed=7)
    mine = AutoModelForCausalLM.from_pretrained(saved(tmp_path / "other", other))
    found = reference_in_memory(mine, ModelConfig(**settings), policy)
    assert torch.equal(logits_of(found), probe_logits(other))
    assert all(weight.requires_grad for weight in mine.parameters())
    assert not any(weight.requires_grad for weight in found.policy.model.parameters())
    assert mine.config._attn_implementation == "sdpa"


def test_the_model_that_is_trained_is_no_reference_of_its_own() -> None:
    policy = nano()
    with pytest.raises(ValueError, match=r"^reference is the very model that is trained"):
        reference_in_memory(policy.model, ModelConfig(), policy)


def test_a_named_reference_has_the_policys_settings_but_those_of_training() -> None:
    model = ModelConfig(name="own", lora_rank=4, load_in_8bit=True, gradient_checkpointing=True, revision="a")
    expected = ModelConfig(name="other", lora_rank=4, load_in_8bit=True, revision="b", gradient_checkpointing=False)
    assert settings_of_reference(model, "other", "b") == expected


def test_a_fingerprint_tells_files_by_name_and_weights_by_adapters_that_add_something(tmp_path: Path) -> None:
    for folder, names in (("first", "ab"), ("again", "ab"), ("other", "ac")):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / f"{name}.safetensors").write_bytes(b"12")
    first, again, other = (model_hash(str(tmp_path / name), None) for name in ("first", "again", "other"))
    assert first == again != other
    fresh = [model_hash("", None, nano(lora_rank=2, seed=7).model) for _ in range(2)]
    assert fresh[0] == fresh[1] != model_hash("", None, stirred(nano(lora_rank=2, seed=7)).model)


@pytest.mark.long
def test_the_hash_tells_weights_apart_and_not_the_place_where_they_lie(tmp_path: Path) -> None:
    first, second, third = (saved(tmp_path / str(n), nano(seed=seed)) for n, seed in enumerate((7, 7, 8)))
    assert model_hash(first, None) == model_hash(second, None)
    assert model_hash(first, None) != model_hash(third, None)
    models = [nano(seed=seed).model for seed in (7, 7, 8)]
    hashes = [model_hash("", None, model) for model in models]
    assert hashes[0] == hashes[1] != hashes[2]


# ------------------------------------------------------------------------------------------------ in a run


def run(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    train(small_config(**(KL | changes)), folder, exact=False)
    return rows(folder / "metrics.jsonl", "train")


@pytest.mark.long
def test_a_run_is_pulled_towards_the_model_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, scripted())
    name = saved(tmp_path / "other", nano(seed=7))
    assert run(tmp_path / "usual")[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    found = run(tmp_path / "own", algorithm__reference_model=name, model__lora_rank=2)
    assert found[0]["kl"] > 1e-3


def test_a_resumed_run_refuses_other_weights_in_the_folder_of_its_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted())
    name = saved(tmp_path / "other", nano(seed=7))
    own = {"algorithm__reference_model": name, "output__save_every": 2}
    whole = run(tmp_path / "whole", **own, num_steps=4)
    run(tmp_path / "begun", **own, num_steps=2)
    again = own | {"num_steps": 4, "resume": str(tmp_path / "begun"), "resume_changes": ["num_steps"]}
    assert [row["kl"] for row in run(tmp_path / "begun", **again)] == [row["kl"] for row in whole]
    run(tmp_path / "other run", **own, num_steps=2)
    saved(tmp_path / "other", nano(seed=8))
    with pytest.raises(ValueError, match=r"^algorithm.reference_model=.*other holds other weights than when .*step-0"):
        run(tmp_path / "other run", **(again | {"resume": str(tmp_path / "other run")}))
    named = {"resume": str(tmp_path / "other run"), "resume_changes": ["num_steps", "algorithm.reference_model"]}
    assert len(run(tmp_path / "other run", **(again | named))) == 4


# ------------------------------------------------------------------------------------------------ memory


@pytest.mark.long
def test_a_separate_reference_is_counted_by_its_own_shape_under_adapters_too() -> None:
    config = small_config(model__name="Qwen/Qwen2.5-0.5B", model__precision="bfloat16", model__lora_rank=16, **KL)
    assert "reference" not in plan(config, 1)
    config.algorithm.reference_model = "Qwen/Qwen2.5-1.5B"
    assert plan(config, 1)["reference"] == 2 * 1_543_714_304
    config.model = replace(config.model, lora_rank=0)
    assert plan(config, 1)["reference"] == 4 * 1_543_714_304
    config.algorithm.kl_coef = 0.0
    assert "reference" not in plan(config, 1)
    config.algorithm.kl_coef, config.source, config.devices.reference = 0.1, "ray", 1
    assert "reference" not in plan(config, 1)


# ------------------------------------------------------------------------------------------------ several processes

WORDS = (
    *("num_steps=2", "groups_per_step=2", "group_size=4", "sampling.max_tokens=4", "evaluation.num_prompts=2"),
    *("evaluation.num_samples=2", "evaluation.k=[1,2]", "output.progress=false", "output.report=false"),
    *("recipe=arithmetic", "algorithm.kl_coef=0.5", "preflight.enabled=false", "model.precision=float64"),
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_compare_with_the_same_model_as_one_whole_and_sharded(tmp_path: Path, strategy: str) -> None:
    base, other = saved(tmp_path / "base", nano(seed=3)), saved(tmp_path / "other", nano(seed=7))
    words = ("train", *WORDS, f"model.name={base}", f"algorithm.reference_model={other}")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    subprocess.run([sys.executable, "-m", "covey", *words, "hydra.run.dir=one"], cwd=tmp_path, check=True)
    both = ("-m", "covey", *words, f"parallel.strategy={strategy}", "hydra.run.dir=two")
    subprocess.run([sys.executable, *torchrun, *both], cwd=tmp_path, check=True)
    one, two = ([row["kl"] for row in rows(tmp_path / name / "metrics.jsonl", "train")] for name in ("one", "two"))
    assert one[0] > 0.01
    assert two == pytest.approx(one, rel=1e-9)
