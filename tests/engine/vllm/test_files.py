"""Weights as files: what vLLM starts from, what is pushed, and where it lies meanwhile."""

import json
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.engine.settings import EngineConfig
from covey.engine.vllm import build, files
from covey.engine.vllm.build import longest_sequence
from covey.engine.vllm.files import (
    adapter_rank,
    as_saved,
    push_folder,
    read_shapes,
    save_adapter,
    save_policy,
    write_push,
)
from covey.engine.weights import difference, make_weight_set, shapes_of
from covey.policy.models.adapters import add_adapters
from covey.policy.models.loading import load_policy
from covey.policy.policy import Policy
from covey.policy.settings import ModelConfig

from ...support.models.composite_models import TOWERS, composite_folder
from ..tiny import tiny_policy

Usage = namedtuple("Usage", "total used free")


def adapted() -> Policy:
    policy = tiny_policy("qwen2")
    settings = ModelConfig(lora_rank=4, lora_alpha=8, lora_targets=["q_proj", "down_proj"])
    return replace(policy, model=add_adapters(policy.causal_lm, settings, seed=1))


def test_a_push_has_the_names_and_shapes_of_the_folder_vllm_started_from(tmp_path: Path) -> None:
    policy = tiny_policy("qwen2")
    save_policy(policy, tmp_path)
    weights = make_weight_set(policy, 1)
    assert difference(shapes_of(weights.tensors), read_shapes(tmp_path)) == ""
    assert AutoTokenizer.from_pretrained(tmp_path).vocab_size == policy.tokenizer.vocab_size


def test_an_adapted_model_is_saved_without_its_adapter_and_the_adapter_apart(tmp_path: Path) -> None:
    policy = adapted()
    before = tiny_policy("qwen2").model.state_dict()
    save_policy(policy, tmp_path / "model")
    save_adapter(policy, tmp_path / "adapter")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert loaded.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.items())
    assert adapter_rank(tmp_path / "adapter") == 4


@pytest.mark.parametrize("name", sorted(TOWERS))
def test_a_push_of_text_and_pictures_is_named_as_transformers_save_it(name: str, tmp_path: Path) -> None:
    """Some classes rename their parameters in files, and save experts one by one; towers are frozen, and sent too."""
    policy = load_policy(ModelConfig(name=str(composite_folder(name, tmp_path / "given")), device="cpu"))
    convert, given = as_saved(policy), make_weight_set(policy, 1).tensors
    moved = {known: weight + 0.5 for known, weight in given.items()}  # as another process would send it
    (tmp_path / "push").mkdir()
    write_push(convert(moved), tmp_path / "push", torch.float32)
    save_policy(policy, tmp_path / "before")
    assert difference(read_shapes(tmp_path / "push"), read_shapes(tmp_path / "before")) == ""
    with torch.no_grad():
        for known, weight in policy.model.named_parameters():
            weight.copy_(moved.get(known, weight))
    save_policy(policy, tmp_path / "after")
    found, wanted = (load_file(tmp_path / side / "model.safetensors") for side in ("push", "after"))
    assert all(torch.equal(found[known], weight) for known, weight in wanted.items())
    assert len(given) < len(policy.model.state_dict())


def test_a_pushed_adapter_is_a_folder_that_peft_loads(tmp_path: Path) -> None:
    policy = adapted()
    save_adapter(policy, tmp_path / "adapter")
    (tmp_path / "push").mkdir()
    write_push(make_weight_set(policy, 1).tensors, tmp_path / "push", torch.float32, tmp_path / "adapter")
    saved, pushed = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "push"))
    assert saved.keys() == pushed.keys()
    assert all(torch.equal(tensor, pushed[name]) for name, tensor in saved.items())
    assert json.loads((tmp_path / "push" / "adapter_config.json").read_text())["lora_alpha"] == 8


def test_weights_are_pushed_in_the_type_that_vllm_computes_in(tmp_path: Path) -> None:
    write_push(make_weight_set(tiny_policy("qwen2"), 1).tensors, tmp_path, torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("is_roomy", [True, False])
def test_weights_lie_in_memory_only_where_they_fit(
    is_roomy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = make_weight_set(tiny_policy("qwen2"), 1).tensors
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    free = num_bytes + files.SPARE + (1 if is_roomy else 0)
    monkeypatch.setattr(files, "MEMORY", tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: Usage(free, 0, free))
    with push_folder(weights) as folder:
        assert (folder.parent == tmp_path) == is_roomy
    assert not folder.exists()


def test_the_longest_sequence_is_one_that_the_cache_holds_whole() -> None:
    policy = tiny_policy("qwen2")  # 2 layers of 2 heads of 8 values in float32: 256 bytes a token
    assert longest_sequence(policy, 1 << 20) == 128
    policy.causal_lm.config.max_position_embeddings = 4096
    assert longest_sequence(policy, 256 * 300) == 256
    with pytest.raises(ValueError, match=r"engine=vllm needs engine.cache_bytes for 128 tokens at least, got 32000"):
        longest_sequence(policy, 32000)


@pytest.mark.parametrize(
    ("device", "has_adapter", "sleep", "level"),
    [("cpu", False, None, 0), ("cuda", False, None, 2), ("cuda", True, None, 1), ("cuda", False, 0, 0)],
)
def test_what_is_given_back_while_the_trainer_works_is_what_can_come_back(
    device: str, has_adapter: bool, sleep: int | None, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frozen base of an adapter is in no push: once dropped it is gone."""
    monkeypatch.setattr(build, "is_adapted", lambda model: has_adapter)
    policy: Any = SimpleNamespace(device=torch.device(device), model=None)
    assert build.sleep_level(policy, EngineConfig(sleep=sleep)) == level
