"""Base weights in 8 bits: they compute as the numbers they stand for, each row alone, wherever they are read."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from benchmarks.checks.architectures import save
from covey.algorithm.settings import AlgorithmConfig
from covey.config.validate import validate
from covey.loop import train
from covey.policy.attention.base import DENSE
from covey.policy.models.loading import load_policy, policy_in_memory
from covey.policy.models.nano import nano_tokenizer
from covey.policy.models.quantized import dequantize
from covey.policy.plain import plain_model
from covey.policy.policy import Policy, inference
from covey.policy.settings import ModelConfig
from covey_report.plan.settings import plan

from ...support.builders import (
    SGD,
    byte_batch,
    gradient,
    make_trainer,
    nano,
    normal,
    probe_logits,
    relative_error,
    saved_model,
    weights,
)
from ...support.small import rows, saved_policy, scripted, small_config, use

NOT_NANO = {"model__nano_hidden_size": 128, "model__nano_num_layers": 4, "model__nano_num_heads": 4}


def quantised(folder: Path, **settings: object) -> Policy:
    """A policy in 8 bits whose adapters add something."""
    pytest.importorskip("bitsandbytes")
    name = saved_model(folder, "llama", hidden_size=64, intermediate_size=112, num_hidden_layers=2)
    policy = load_policy(ModelConfig(**{"name": name, "load_in_8bit": True, "lora_rank": 4, **settings}), seed=0)
    with torch.no_grad():
        for key, weight in policy.model.named_parameters():
            if "lora_B" in key:
                weight.copy_(0.05 * normal(*weight.shape))
    return policy


def in_full(policy: Policy, folder: Path) -> Policy:
    """The same policy over plain layers that hold what the layers in 8 bits stand for."""
    plain = load_policy(ModelConfig(name=str(folder), lora_rank=4), seed=0)
    held = dict(policy.model.named_parameters())
    with torch.no_grad():
        for key, weight in plain.model.named_parameters():
            weight.copy_(dequantize(held[key]))
    return plain


def test_all_linear_layers_but_the_head_are_8_bit_and_close(tmp_path: Path) -> None:
    policy = quantised(tmp_path)
    bytes_each = {name: weight for name, weight in policy.model.named_parameters() if weight.dtype == torch.int8}
    assert len(bytes_each) == 2 * 7
    full = dict(load_policy(ModelConfig(name=str(tmp_path), lora_rank=4), seed=0).model.named_parameters())
    for name, weight in bytes_each.items():
        assert 1e-4 < relative_error(dequantize(weight), full[name]) < 0.01


def test_a_number_in_8_bits_is_in_127ths_of_its_rows_largest() -> None:
    weight = nn.Parameter(torch.tensor([[127, -64], [1, 0]], dtype=torch.int8), requires_grad=False)
    weight.SCB = torch.tensor([2.0, 254.0])  # type: ignore[attr-defined] # as bitsandbytes keeps it
    assert dequantize(weight).tolist() == [[2.0, pytest.approx(-128 / 127)], [2.0, 0.0]]


@pytest.mark.long
@pytest.mark.parametrize(("precision", "limit"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_log_probs_and_gradients_are_those_of_the_numbers_that_weights_stand_for(
    precision: str, limit: float, tmp_path: Path
) -> None:
    policy = quantised(tmp_path, precision=precision)
    plain = in_full(policy, tmp_path)
    with inference(policy.model):
        assert relative_error(probe_logits(policy), probe_logits(plain)) < limit
    for each in (policy, plain):
        make_trainer(each, AlgorithmConfig(), SGD).step(byte_batch(), 0)
    assert relative_error(gradient(policy), gradient(plain)) < limit


def test_the_plain_pass_of_the_preflight_reads_what_they_stand_for(tmp_path: Path) -> None:
    policy = quantised(tmp_path)
    with torch.no_grad():
        found: Tensor = plain_model(policy).logits(tuple(range(1, 9)), range(8))
    assert relative_error(probe_logits(policy), found) < 1e-5


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_that_hold_weights_turned_are_plain_in_the_same_way(bits: int, tmp_path: Path) -> None:
    save("gpt2", str(tmp_path))
    settings = ModelConfig(name=str(tmp_path), lora_rank=2, load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    policy = load_policy(settings, seed=0)
    with torch.no_grad():
        for key, weight in policy.model.named_parameters():
            if "lora_B" in key or key.endswith(".bias"):
                weight.copy_(0.05 * normal(*weight.shape))
    ids = list(range(5, 21))
    logits_TV = policy.logits(torch.tensor([ids]), torch.arange(16)[None], DENSE)
    assert torch.allclose(logits_TV, plain_model(policy).logits(ids, range(16)), atol=1e-4)


def test_a_class_that_writes_to_packed_weights_is_refused_in_one_line(tmp_path: Path) -> None:
    save("gemma3n_text", str(tmp_path))
    with pytest.raises(ValueError, match=r"^model\.name needs another .* Gemma3nForCausalLM does not run .*cast to"):
        load_policy(ModelConfig(name=str(tmp_path), lora_rank=2, load_in_4bit=True), seed=0)


def test_a_large_number_in_another_row_changes_nothing(tmp_path: Path) -> None:
    """bitsandbytes would take the columns apart that are large in any row."""
    layer = quantised(tmp_path).causal_lm.get_submodule("model.layers.0.mlp.down_proj.base_layer")
    hidden = normal(2, 5, 112)
    alone = layer(hidden[:1])
    hidden[1] *= 1000
    assert torch.equal(layer(hidden)[:1], alone)


def test_adapters_over_them_are_trained_and_nothing_else(tmp_path: Path) -> None:
    policy = quantised(tmp_path)
    before = weights(policy)
    make_trainer(policy, AlgorithmConfig(), SGD).step(byte_batch(), 0)
    moved = {key for key, tensor in weights(policy).items() if not torch.equal(tensor, before[key])}
    assert moved == {key for key in before if "lora_" in key}


def test_a_run_in_8_bits_passes_its_preflight_and_resumes_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    use(monkeypatch, scripted())
    name = saved_model(tmp_path / "model", "llama", hidden_size=64, num_hidden_layers=1)
    config = small_config(
        **NOT_NANO, model__name=name, model__load_in_8bit=True, model__lora_rank=2, output__save_every=2
    )
    train(replace(config, num_steps=4), tmp_path / "whole")
    train(config, tmp_path / "begun")
    changes = {"num_steps": 4, "resume": str(tmp_path / "begun"), "resume_changes": ["num_steps"]}
    train(replace(config, **changes), tmp_path / "begun", exact=False)
    whole, resumed = saved_policy(tmp_path / "whole"), saved_policy(tmp_path / "begun")
    assert all(torch.equal(weight, resumed[key]) for key, weight in whole.items())
    assert rows(tmp_path / "begun" / "metrics.jsonl", "train")[-1]["step"] == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__lora_rank": 0}, r"^model.load_in_8bit=true needs model.lora_rank > 0, got model.lora_rank=0$"),
        ({"model__load_in_4bit": True}, r"^model.load_in_8bit=true needs model.load_in_4bit = false"),
        ({"model__name": "nano"}, r"^model.load_in_8bit=true needs saved weights"),
        ({"parallel__strategy": "fsdp"}, r"^model.load_in_8bit=true needs parallel.strategy = ddp"),
    ],
)
def test_what_cannot_be_held_in_8_bits_is_refused_in_one_line(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    usual: dict[str, object] = {"model__name": str(tmp_path), "model__load_in_8bit": True, "model__lora_rank": 2}
    usual |= NOT_NANO
    with pytest.raises(ValueError, match=message):
        validate(small_config(**(usual | changes)))


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_that_others_quantised_are_refused_in_one_line_unless_the_setting_is_theirs(
    bits: int, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    plain, saved = saved_model(tmp_path / "plain", "llama", hidden_size=64), str(tmp_path / "saved")
    theirs, other = f"load_in_{bits}bit", f"load_in_{12 - bits}bit"
    config = BitsAndBytesConfig(**{theirs: True, "bnb_4bit_compute_dtype": torch.float32})
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, device_map={"": "cpu"})
    model.save_pretrained(saved)
    nano_tokenizer().save_pretrained(saved)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    # In memory, in which it stays as it is, and by name
    cure = rf"holds quantised weights \({theirs}\): take it by name, with model.{theirs}=true$"
    with pytest.raises(ValueError, match=f"^the model in memory {cure}"):
        policy_in_memory(model, nano_tokenizer(), ModelConfig(lora_rank=2), seed=0)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    for settings in ({}, {other: True}):
        with pytest.raises(ValueError, match=f"^model.name={saved} {cure}"):
            load_policy(ModelConfig(**{"name": saved, "lora_rank": 2, **settings}), seed=0)
    assert load_policy(ModelConfig(**{"name": saved, "lora_rank": 2, theirs: True}), seed=0).head_is_linear


def test_a_model_in_memory_is_not_quantised_afterwards() -> None:
    base = nano()
    message = r"^model.load_in_4bit=true loads weights by name, the model in memory holds plain numbers$"
    with pytest.raises(ValueError, match=message):
        policy_in_memory(base.causal_lm, base.tokenizer, ModelConfig(lora_rank=2, load_in_4bit=True), seed=0)


def test_weights_in_8_bits_take_a_byte_each_in_the_plan_of_memory() -> None:
    config = small_config(**NOT_NANO, model__name="Qwen/Qwen2.5-1.5B", model__precision="bfloat16", model__lora_rank=16)
    usual = plan(config, 1)["weights"]
    config.model.load_in_8bit = True
    linear = 28 * (2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960)
    assert usual - plan(config, 1)["weights"] == pytest.approx(0.99 * linear, rel=1e-3)
