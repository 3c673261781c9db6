"""LoRA: which weights train, adapters of a run before, and what is refused in one line."""

import asyncio
import random
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.checks.architecture_configs import tiny_config
from covey.engine.native.engine import NativeEngine
from covey.policy.models.adapters import add_adapters, base_of
from covey.policy.models.loading import load_policy, policy_in_memory
from covey.policy.models.nano import nano_tokenizer
from covey.policy.plain import plain_model, rollout_logprobs
from covey.policy.policy import Policy, is_adapted
from covey.policy.settings import ModelConfig
from covey.rollouts.rollout import causal_rollout
from covey.run.checkpoints.checkpoint import save_policy
from covey.system import collectives
from covey.types import Reward, Sampling

from ...support.builders import SGD, byte_batch, make_trainer, nano, probe_logits, same, weights

LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def trained_modules(policy: Policy) -> set[str]:
    return {name.split(".lora")[0].split(".")[-1] for name, p in policy.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_lora_trains_adapters_on_all_linear_layers_in_float32_and_nothing_else(precision: str) -> None:
    policy = nano(lora_rank=4, precision=precision)
    trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    assert is_adapted(policy.model)
    assert all("lora_" in name for name in trained)
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert trained_modules(policy) == LINEAR
    assert sum(p.numel() for p in trained.values()) == 2 * 4 * (4 * (32 + 32) + 3 * (32 + 80))
    frozen = {p.dtype for name, p in policy.model.named_parameters() if "lora_" not in name}
    assert frozen == {getattr(torch, precision)}


def test_lora_trains_only_the_targets_listed() -> None:
    policy = nano(lora_rank=4, lora_targets=["q_proj", "v_proj"])
    assert trained_modules(policy) == {"q_proj", "v_proj"}


def test_a_lora_target_that_is_not_there_is_one_line_that_says_so() -> None:
    with pytest.raises(ValueError, match=rf"^model.lora_targets .* \({LAYERS}\), got \[nope\]$"):
        nano(lora_rank=4, lora_targets=["nope"])


@pytest.mark.parametrize(
    ("targets", "unfit"),
    [
        (["q_proj", "v_porj"], "v_porj"),
        (["q_proj", "proj", "r.q_proj"], "proj,r.q_proj"),
        (["all-linear", "q_proj"], "all-linear"),
        (["q_proj", "embed_tokens"], "embed_tokens"),
        (["input_layernorm", "mlp"], "input_layernorm,mlp"),
        ([], ""),
    ],
)
def test_each_lora_target_must_lead_to_linear_layers(targets: list[str], unfit: str) -> None:
    message = f"model.lora_targets must name linear layers of the model ({LAYERS}), got [{unfit}]"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        nano(lora_rank=4, lora_targets=targets)


def test_named_lora_targets_never_become_experts_and_are_found_again(tmp_path: Path) -> None:
    name = str(tmp_path / "base")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config("deepseek_v3")).save_pretrained(name)
    nano_tokenizer().save_pretrained(name)
    for targets in (["gate_proj"], ["down_proj", "o_proj"]):
        policy = load_policy(ModelConfig(name=name, lora_rank=2, lora_targets=targets), seed=0)
        adapted = {known for known, _ in policy.model.named_parameters() if ".lora_A." in known}
        assert {known.partition(".lora_A.")[0].rpartition(".")[2] for known in adapted} == set(targets)
        assert any("shared_experts" in known for known in adapted)
        save_policy(policy, tmp_path / targets[0])
        again = ModelConfig(name=str(tmp_path / targets[0]), lora_rank=2, lora_targets=targets)
        assert same(weights(load_policy(again, seed=1)), weights(policy))
        with pytest.raises(ValueError, match=r"and needs model.lora_targets=.*, got model.lora_targets=\['q_a_proj'\]"):
            load_policy(replace(again, lora_targets=["q_a_proj"]), seed=1)
    with pytest.raises(ValueError, match=r"down_proj; experts get adapters by all-linear alone\), got \[w1\]$"):
        load_policy(ModelConfig(name=name, lora_rank=2, lora_targets=["w1"]), seed=0)


def test_adapters_begin_as_the_base_model_and_a_step_moves_nothing_but_them() -> None:
    policy, base = nano(lora_rank=4), nano()
    assert torch.equal(probe_logits(policy), probe_logits(base))
    before = weights(policy)
    make_trainer(policy, optimizer=SGD).step(byte_batch(), 0)
    moved = {name for name, tensor in weights(policy).items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if "lora_B" in name}  # with B = 0, A has no gradient yet


@pytest.mark.parametrize("in_memory", [False, True])
def test_adapters_are_a_function_of_the_seed(in_memory: bool) -> None:
    def made(seed: int, elsewhere: int) -> dict[str, Tensor]:
        torch.manual_seed(elsewhere)
        if in_memory:
            base = nano()
            policy = policy_in_memory(base.causal_lm, base.tokenizer, ModelConfig(lora_rank=4), seed=seed)
        else:
            policy = nano(seed=seed, lora_rank=4)
        found = weights(policy)
        return {name: tensor for name, tensor in found.items() if "lora_A" in name}

    with torch.random.fork_rng(devices=[]):
        assert same(made(1, elsewhere=5), made(1, elsewhere=6))
        assert not same(made(1, elsewhere=5), made(2, elsewhere=5))


@pytest.mark.parametrize(
    ("place", "is_own"), [("checkpoints/step_5/policy", True), ("step_5/checkpoints/policy", False)]
)
def test_the_base_in_the_run_folder_is_that_of_its_checkpoints(place: str, is_own: bool, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / place).mkdir(parents=True)
    assert base_of(tmp_path / place, "recorded") == (str(tmp_path / "base") if is_own else "recorded")
    (tmp_path / "base").rmdir()
    assert base_of(tmp_path / place, "recorded") == "recorded"


LAYERS = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
"""Linear layers of a nano model."""


def adapter_folder(folder: Path) -> tuple[Policy, str]:
    """Trained adapters on a saved base model, saved in their turn."""
    save_policy(nano(), folder / "base")
    policy = load_policy(ModelConfig(name=str(folder / "base"), lora_rank=4), seed=0)
    make_trainer(policy, optimizer=SGD).step(byte_batch(), 0)
    save_policy(policy, folder / "adapters")
    return policy, str(folder / "adapters")


def test_saved_adapters_are_loaded_on_their_base_model_and_trained_further(tmp_path: Path) -> None:
    policy, name = adapter_folder(tmp_path)
    state = torch.random.get_rng_state()
    again = load_policy(ModelConfig(name=name, lora_rank=4), seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert same(weights(again), weights(policy))
    assert {n for n, p in again.model.named_parameters() if p.requires_grad} == {
        n for n, p in policy.model.named_parameters() if p.requires_grad
    }
    for each in (policy, again):
        make_trainer(each, optimizer=SGD).step(byte_batch(), 1)
    assert same(weights(again), weights(policy))
    dropping = load_policy(ModelConfig(name=name, lora_rank=4, lora_dropout=0.25), seed=1).model
    assert {layer.p for layer in dropping.modules() if isinstance(layer, nn.Dropout)} == {0.25}
    save_policy(again, tmp_path / "further")
    assert same(weights(load_policy(ModelConfig(name=str(tmp_path / "further"), lora_rank=4), seed=0)), weights(again))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "and needs model.lora_rank=4, got model.lora_rank=0"),
        ({"lora_rank": 8}, "and needs model.lora_rank=4, got model.lora_rank=8"),
        (
            {"lora_rank": 8, "lora_alpha": 8.0},
            "needs model.lora_rank=4 model.lora_alpha=32.0, got model.lora_rank=8 model.lora_alpha=8.0",
        ),
        ({"lora_rank": 4, "lora_alpha": 8.0}, "needs model.lora_alpha=32.0, got model.lora_alpha=8.0"),
        ({"lora_rank": 4, "lora_targets": ["q_proj"]}, "needs model.lora_targets=.*got model.lora_targets=.'q_proj'."),
    ],
)
def test_saved_adapters_of_another_shape_than_asked_for_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, name = adapter_folder(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_policy(ModelConfig(name=name, **settings), seed=0)


NOT_PLAIN: dict[str, Any] = {
    "use_dora=True": LoraConfig(target_modules=["q_proj"], use_dora=True),
    "lora_bias=True": LoraConfig(target_modules=["q_proj"], lora_bias=True),
    "bias=all": LoraConfig(target_modules=["q_proj"], bias="all"),
    "modules_to_save=['lm_head']": LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "trainable_token_indices=[5]": LoraConfig(target_modules=["q_proj"], trainable_token_indices=[5]),
    "got one of model.embed_tokens": LoraConfig(target_modules=["embed_tokens"]),
    "PromptTuningConfig": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    "IA3Config": IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
}


@pytest.mark.parametrize("named", NOT_PLAIN)
def test_adapters_in_memory_that_are_more_than_plain_lora_are_refused_in_one_line(named: str) -> None:
    base = nano()
    with pytest.raises(ValueError, match="LoRA adapters") as refused:
        policy_in_memory(get_peft_model(base.causal_lm, NOT_PLAIN[named]), base.tokenizer, ModelConfig(), seed=0)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("more", [{"use_rslora": True}, {"rank_pattern": {"q_proj": 2}}, {"layers_to_transform": [1]}])
def test_plain_lora_in_memory_may_have_ranks_scales_and_layers_of_its_own(more: dict[str, Any]) -> None:
    base = nano()
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **more)
    policy = policy_in_memory(get_peft_model(base.causal_lm, lora), base.tokenizer, ModelConfig(), seed=0)
    sampling = Sampling(max_tokens=8)
    sampled = asyncio.run(NativeEngine(policy, None, 8).generate([5, 6, 7], 1, sampling))[0]
    rollout = causal_rollout([5, 6, 7], sampled, Reward(0.0), "")
    expected = rollout_logprobs(plain_model(policy), rollout, sampling).detach()
    torch.testing.assert_close(torch.tensor(sampled.logprobs), expected, rtol=0, atol=1e-5)


def test_adapters_of_a_policy_from_scratch_have_no_base_model(tmp_path: Path) -> None:
    save_policy(nano(lora_rank=4), tmp_path)
    with pytest.raises(ValueError, match="holds adapters that do not name their base model"):
        load_policy(ModelConfig(name=str(tmp_path), lora_rank=4), seed=0)


def test_the_dropout_of_adapters_follows_the_seed_and_the_step_and_nothing_global() -> None:
    def dropped(seed: int, step: int = 0) -> dict[str, Tensor]:
        policy = nano(lora_rank=2, lora_dropout=0.5)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(random.randrange(2**32))
            state = torch.random.get_rng_state()
            make_trainer(policy, optimizer=SGD, seed=seed).step(byte_batch(), step)
            assert torch.equal(torch.random.get_rng_state(), state)
        return weights(policy)

    assert same(dropped(seed=1), dropped(seed=1))
    assert not same(dropped(seed=1), dropped(seed=2))
    assert not same(dropped(seed=1), dropped(seed=1, step=1))


def test_ranks_drop_other_parts_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    for rank in range(2):
        monkeypatch.setattr(collectives, "rank", lambda rank=rank: rank)
        policy = nano(lora_rank=2, lora_dropout=0.5)
        make_trainer(policy, optimizer=SGD, seed=1).step(byte_batch(), 0)
        trained.append(weights(policy))
    assert not same(*trained)


def test_adapters_under_checkpointing_warn_of_nothing_that_a_user_could_change() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nano(lora_rank=2, gradient_checkpointing=True)


def test_adapters_in_half_precision_keep_no_copy_in_float32_and_compute_the_same_bits() -> None:
    gradients = []
    for casts in (True, False):
        policy = nano(lora_rank=2, precision="bfloat16")
        layers = [module for module in policy.model.modules() if hasattr(module, "cast_input_dtype_enabled")]
        assert layers
        assert not any(layer.cast_input_dtype_enabled for layer in layers)
        for layer in layers:
            layer.cast_input_dtype_enabled = casts  # type: ignore[assignment]
        make_trainer(policy, optimizer=SGD).step(byte_batch(), 0)
        gradients.append(weights(policy))
    assert same(*gradients)


ROUTERS = {"llama4_text": 2, "phimoe": 2}
"""Layers that are linear by class alone, by architecture."""


@pytest.mark.parametrize(
    ("name", "linear", "stacks"),
    [
        ("deepseek_v3", 16, 2),
        ("qwen3_next", 15, 4),
        ("qwen3_5_moe_text", 17, 4),
        ("qwen3_moe", 8, 4),
        ("qwen2_moe", 16, 4),
        ("glm4_moe", 14, 2),
        ("llama4_text", 16, 4),
        ("phimoe", 10, 4),
        ("gpt_oss", 8, 4),
        ("jetmoe", 6, 8),
    ],
)
def test_adapters_reach_every_linear_layer_and_all_experts(name: str, linear: int, stacks: int, tmp_path: Path) -> None:
    from peft import PeftModel

    model = AutoModelForCausalLM.from_config(tiny_config(name))
    plain = {known: weight.clone() for known, weight in model.state_dict().items()}
    layers = {known for known, layer in model.named_modules() if isinstance(layer, nn.Linear)} - {"lm_head"}
    adapted = add_adapters(model, ModelConfig(name=name, lora_rank=2), seed=0)
    with torch.no_grad():
        for known, weight in adapted.named_parameters():
            weight.normal_(0.0, 0.1) if ".lora_B." in known else None
    held = [known.partition(".lora_A.")[0] for known, _ in adapted.named_parameters() if ".lora_A." in known]
    found = {known.removeprefix("base_model.model.") for known in held}
    assert len(layers) == linear
    assert len(layers - found) == ROUTERS.get(name, 0)
    assert len(found - layers) == stacks
    # Read by peft alone, they say the same
    adapted.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_config(tiny_config(name))
    again.load_state_dict(plain)
    ids = torch.arange(5, 17)[None]
    expected = adapted.eval()(input_ids=ids).logits
    assert torch.equal(PeftModel.from_pretrained(again, tmp_path).eval()(input_ids=ids).logits, expected)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("mamba", {"x_proj", "dt_proj", "out_proj"}),
        ("falcon_mamba", {"x_proj", "dt_proj", "out_proj"}),
        ("mamba2", {"out_proj"}),
        ("nemotron_h", {"out_proj"}),
        ("jamba", {"dt_proj"}),
        ("longcat_flash", {"classifier"}),
        ("gemma3n_text", {"correction_coefs"}),  # in training alone
        ("doge", set()),
        ("bloom", set()),
    ],
)
def test_adapters_leave_out_layers_whose_weight_is_read_past_them(name: str, left_out: set[str]) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(name))
    head = model.get_output_embeddings()
    linear = {full for full, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head}
    found = [full for full, _ in add_adapters(model, ModelConfig(name=name, lora_rank=2), seed=0).named_parameters()]
    adapted = {full.partition(".lora_A.")[0].removeprefix("base_model.model.") for full in found}
    assert {full.rpartition(".")[2] for full in linear - adapted} == left_out
    if left_out:
        with pytest.raises(
            ValueError, match=rf"^model.lora_targets must name linear layers .* got \[{min(left_out)}\]$"
        ):
            add_adapters(model, ModelConfig(name=name, lora_rank=2, lora_targets=[min(left_out)]), seed=0)
