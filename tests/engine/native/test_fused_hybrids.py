"""Hybrids in layer.c: what they make of a decode step, against transformers and against the layers module by module."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from covey.engine.native.decode_weights import is_fused
from covey.engine.native.engine import NativeEngine
from covey.engine.native.models.fused import FusedModel
from covey.engine.native.panels import CompiledLinear
from covey.engine.vllm.files import WRAPPED
from covey.policy.models.loading import load_policy
from covey.policy.policy import Policy
from covey.policy.settings import ModelConfig
from covey.types import Completion, Sampling

from ...support.models.composite_models import composite_folder
from ..tiny import TOKENIZER
from .test_sessions import GENEROUS, as_prompts, played
from .test_states import PROMPTS, largest_gap

SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
SPECIAL = {"vocab_size": len(TOKENIZER), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 32}
SELECT = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 24, "n_groups": 2, "chunk_size": 8}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_n_groups": 2, "mamba_chunk_size": 8}
FALCON = {"mamba_d_ssm": 128, "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.7, "key_multiplier": 0.6}
FALCON |= {
    "ssm_in_multiplier": 0.8,
    "ssm_out_multiplier": 1.3,
    "mlp_multipliers": [0.9, 1.4],
    "lm_head_multiplier": 0.5,
}
FALCON |= {"ssm_multipliers": [0.5, 1.5, 0.7, 0.6, 0.8], "embedding_multiplier": 3.0, "projectors_bias": True}
NORMED = {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_proj_bias": True, "mlp_bias": True}
NORMED |= {"attention_bias": True}
LFM3 = {"use_attention_gate": True, "use_sandwich_norm": True, "sliding_window": 6}
GRANITE = MAMBA | {
    "shared_intermediate_size": 96,
    "num_local_experts": 0,
    "residual_multiplier": 0.3,
    "embedding_multiplier": 5.0,
}
SHAPES = {
    "qwen3_5_text": {**DELTA, "layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    "nemotron_h": {**SELECT, "layers_block_type": ["mamba", "mlp", "attention", "mamba"]},
    "granitemoehybrid": {**GRANITE, "layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4, "block_auto_adjust_ff_dim": False},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention", "conv"], "num_hidden_layers": 4, **LFM3},
    "lfm3 of plain layers": {
        **LFM3,
        "layer_types": ["conv", "full_attention"],
        "num_hidden_layers": 2,
        "use_attention_gate": False,
        "use_sandwich_norm": False,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1], "num_hidden_layers": 3, "mamba_expand": 2},
    "falcon_h1": {**MAMBA, **FALCON, "num_hidden_layers": 2},
    "falcon_h1 with norms and biases": {**MAMBA, **FALCON, **NORMED, "num_hidden_layers": 2},
    "olmo_hybrid": {**DELTA, "layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
}
LARGE_WEIGHTS = 1e-4
"""Nats that the preflight allows; rounding makes 2e-5 of weights four times as large as usual."""
SAMPLING = Sampling(temperature=0.8, max_tokens=16, seed=5)


def policy_of(architecture: str, folder: Path, **settings: object) -> Policy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(architecture.split()[0], **SHAPE, **SPECIAL, **SHAPES[architecture])
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():  # so that nothing, biases of rates included, stays as it begins
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.03)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    policy = load_policy(ModelConfig(name=str(folder), **settings))  # type: ignore[arg-type]
    policy.causal_lm.generation_config.eos_token_id = list(range(0, 260, 23))  # type: ignore[union-attr]
    return policy


def sampled(engine: NativeEngine) -> list[list[Completion]]:
    async def run() -> list[list[Completion]]:
        calls = [engine.generate(ids, 3, replace(SAMPLING, seed=i)) for i, ids in enumerate(PROMPTS)]
        return list(await asyncio.gather(*calls))

    return asyncio.run(run())


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("architecture", SHAPES)
def test_a_hybrid_is_decoded_in_c_as_transformers_computes_it(architecture: str, rank: int, tmp_path: Path) -> None:
    policy = policy_of(architecture, tmp_path, lora_rank=rank)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            parameter.normal_(0, 0.05, generator=torch.Generator().manual_seed(1)) if ".lora_B." in name else None
    for max_rows in (64, 4):
        engine = NativeEngine(policy, GENEROUS, max_rows)
        assert is_fused(engine._policy)
        assert largest_gap(policy, sampled(engine)) < 1e-5


@pytest.mark.parametrize("architecture", SHAPES)
def test_new_weights_of_every_kind_are_taken(architecture: str, tmp_path: Path) -> None:
    policy = policy_of(architecture, tmp_path)
    engine = NativeEngine(policy, GENEROUS, 64)
    sampled(engine)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    engine.load_weights(1)
    assert largest_gap(policy, sampled(engine)) < 1e-5


@pytest.mark.parametrize("architecture", SHAPES)
def test_turns_and_neighbours_change_no_row(architecture: str, tmp_path: Path) -> None:
    policy = policy_of(architecture, tmp_path)
    together = sampled(NativeEngine(policy, GENEROUS, 64))
    for number, ids in enumerate(PROMPTS[:2]):
        alone = asyncio.run(NativeEngine(policy, GENEROUS, 64).generate(ids, 3, replace(SAMPLING, seed=number)))
        assert [each.token_ids for each in alone] == [each.token_ids for each in together[number]]
        for mine, theirs in zip(alone, together[number], strict=True):
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    engine = NativeEngine(policy, GENEROUS, 64)
    for mine, theirs in zip(played(engine.open, turns=3), played(as_prompts(engine), turns=3), strict=True):
        assert [each.token_ids for each in mine] == [each.token_ids for each in theirs]


@pytest.mark.parametrize("architecture", SHAPES)
def test_half_precision_stays_near_the_trainer(architecture: str, tmp_path: Path) -> None:
    policy = policy_of(architecture, tmp_path, precision="bfloat16")
    engine = NativeEngine(policy, GENEROUS, 64)
    assert is_fused(engine._policy)
    assert largest_gap(policy, sampled(engine)) < 0.05  # 0.005 to 0.012; module by module 0.006 to 0.020


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize(("name", "part"), [("qwen3_5", "language_model"), ("smolvlm", "text_model")])
def test_the_text_of_a_folder_with_pictures_is_decoded_in_c(name: str, part: str, rank: int, tmp_path: Path) -> None:
    folder = composite_folder(name, tmp_path, {**SHAPE, **SHAPES["qwen3_5_text"], "hidden_size": 32})
    policy = load_policy(ModelConfig(name=str(folder), lora_rank=rank, device="cpu"))
    engine = NativeEngine(policy, GENEROUS, 64)
    assert is_fused(engine._policy)
    held = [known for known, module in engine._policy.model.named_modules() if isinstance(module, CompiledLinear)]
    assert [known.rpartition(".")[2] for known in held] == ["lm_head"]  # none of the tower's
    assert isinstance(engine._policy.model.get_submodule(f"{WRAPPED if rank else ''}model.{part}"), FusedModel)
    assert largest_gap(policy, sampled(engine)) < LARGE_WEIGHTS
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight.add_(torch.randn_like(weight) * 0.03) if weight.requires_grad else None
    engine.load_weights(1)
    assert largest_gap(policy, sampled(engine)) < LARGE_WEIGHTS
