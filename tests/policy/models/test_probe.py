"""Architectures: what is trained as it was sampled, what is scored another way, what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from covey.algorithm.settings import AlgorithmConfig
from covey.policy.logprobs import Scoring
from covey.policy.models import probe
from covey.policy.models.loading import load_policy
from covey.policy.policy import inference
from covey.policy.settings import ModelConfig
from covey.types import Sampling

from ...support.builders import (
    SGD,
    byte_batch,
    logprobs,
    make,
    make_trainer,
    nano,
    probe_logits,
    random_groups,
    saved_model,
)

DROPOUT = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
    "opt": {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "gpt_neox": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "qwen2": {"attention_dropout": 0.1},
}


@pytest.mark.parametrize("architecture", sorted(DROPOUT))
def test_the_trained_policy_is_the_sampled_one_despite_dropout(architecture: str, tmp_path: Path) -> None:
    policy = load_policy(ModelConfig(name=saved_model(tmp_path, architecture, **DROPOUT[architecture])), seed=0)
    policy.model.train()
    in_training = probe_logits(policy)
    with inference(policy.model):
        assert torch.equal(probe_logits(policy), in_training)
    groups = byte_batch()
    sampler = logprobs(policy, groups.micro_batches, Scoring(Sampling(), 0))
    metrics = make_trainer(policy, AlgorithmConfig(), SGD, updates_per_batch=1).step(groups, 0)
    assert metrics["mismatch"] == pytest.approx(float(-sampler.mean()), rel=1e-4)  # the recorded ones are 0
    assert metrics["ratio_max"] == 1.0


JITTER = {
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1, "router_jitter_noise": 0.5},
    "phimoe": {"num_local_experts": 4, "router_jitter_noise": 0.5, "sliding_window": None},
}
"""PhiMoE draws besides: it takes another expert at random where two are near each other."""


@pytest.mark.parametrize("architecture", JITTER)
def test_routers_that_are_noisy_in_training_are_trained_as_they_were_sampled(architecture: str, tmp_path: Path) -> None:
    policy = load_policy(ModelConfig(name=saved_model(tmp_path, architecture, **JITTER[architecture])), seed=0)
    with inference(policy.model):
        evaluated = probe_logits(policy)
    policy.model.train()
    assert policy.model.training
    for _ in range(5):
        assert torch.equal(probe_logits(policy), evaluated)


def test_a_model_that_computes_something_else_in_training_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = saved_model(tmp_path, "llama")
    apart = LlamaForCausalLM.forward

    def warmer(model: LlamaForCausalLM, *given: Any, **keywords: Any) -> Any:
        out = apart(model, *given, **keywords)
        out.logits = out.logits * (1.1 if model.training else 1.0)
        return out

    monkeypatch.setattr(LlamaForCausalLM, "forward", warmer)
    with pytest.raises(ValueError, match="without noise in training mode, LlamaForCausalLM has it"):
        load_policy(ModelConfig(name=name), seed=0)


PLAIN = {"gemma": {}, "phi3": {}, "olmo2": {}, "gpt_neox": {}}


OTHER_HEADS = {
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 4},
}


@pytest.mark.parametrize("architecture", [*PLAIN, *OTHER_HEADS])
def test_a_head_that_scales_its_logits_is_noticed_and_scored_right(architecture: str, tmp_path: Path) -> None:
    name = saved_model(tmp_path, architecture, **{**PLAIN, **OTHER_HEADS}[architecture])
    policy = load_policy(ModelConfig(name=name), seed=0)
    assert policy.head_is_linear == (architecture in PLAIN)
    groups = random_groups(vocabulary=250)
    expected = _plain_logprobs(AutoModelForCausalLM.from_pretrained(name, attn_implementation="eager"))
    for packing, budget, chunk in (("shared", 20, 3), ("padded", 10_000, 0)):
        got = logprobs(policy, make(groups, packing, budget).micro_batches, Scoring(Sampling(temperature=0.7), chunk))
        assert float((got - expected).abs().max()) < 1e-4
    assert make_trainer(policy, AlgorithmConfig(), SGD, logprob_chunk=3).step(byte_batch(), 0)["grad_norm"] > 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [0.3, 1.0])
def test_a_soft_cap_is_noticed_however_small_the_logits_of_the_probe(
    precision: str, size: float, tmp_path: Path
) -> None:
    for architecture, is_linear in (("gemma2", False), ("gemma", True)):
        folder = saved_model(tmp_path / architecture, architecture)
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            model.model.norm.weight.fill_(size - 1)
            assert model(input_ids=torch.arange(8)[None]).logits.abs().max() < 5  # a cap at 30 changes it by 1 %
        model.save_pretrained(folder)
        assert load_policy(ModelConfig(name=folder, precision=precision), seed=0).head_is_linear == is_linear


@torch.no_grad()
def _plain_logprobs(model: PreTrainedModel) -> Tensor:
    pieces = []
    for rollout in (r for g in random_groups(vocabulary=250) for r in g.rollouts):
        logprobs_TV = (model(input_ids=torch.tensor([rollout.input_ids])).logits[0] / 0.7).log_softmax(-1)
        chosen = logprobs_TV.gather(1, torch.tensor(rollout.target_ids)[:, None])[:, 0]
        pieces.append(chosen[torch.tensor(rollout.loss_mask)])
    return torch.cat(pieces)


def test_a_head_that_rounds_otherwise_is_plain_and_one_that_does_more_is_not() -> None:
    policy = nano()
    hidden = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = policy.head(hidden)
        assert probe._is_plain(policy, hidden, logits + 4 * torch.finfo(torch.float32).eps * logits.abs().max())
        assert not probe._is_plain(policy, hidden, logits * 1.001)
