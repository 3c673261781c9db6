"""The reference that covey is compared with is transformers' own forward of the same numbers."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from covey.policy.kernels.linear import use_onednn
from covey.policy.logprobs import Scoring
from covey.policy.models.loading import load_policy
from covey.policy.plain import _exactly, plain_model, rollout_logprobs, rounded_and_exact
from covey.policy.policy import Policy
from covey.policy.settings import ModelConfig
from covey.run.checkpoints.checkpoint import save_policy
from covey.types import Sampling

from ..support.builders import (
    as_fills,
    logprobs,
    make,
    make_policy,
    nano,
    normal,
    random_groups,
    relative_error,
    saved_model,
)

IDS = tuple(range(1, 30))


def transformers_logits(folder: str, ids: tuple[int, ...] = IDS, **how: Any) -> Tensor:
    """As a script of a few lines computes them."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **how).eval()
    with torch.no_grad():
        found: Tensor = model(torch.tensor([ids])).logits[0]
    return found


def plain_logits(policy: Policy, ids: tuple[int, ...] = IDS) -> Tensor:
    with torch.no_grad():
        return plain_model(policy).logits(ids, range(len(ids)))


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {"sliding_window": 5}),
        ("granite", {"residual_multiplier": 0.3, "embedding_multiplier": 3.0}),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1}),
    ],
)
def test_logits_are_bit_for_bit_those_of_a_freshly_loaded_model(
    architecture: str, config: dict[str, Any], tmp_path: Path
) -> None:
    folder = saved_model(tmp_path, architecture, **config)
    policy = load_policy(ModelConfig(name=folder), seed=0)
    use_onednn(policy.causal_lm)
    assert torch.equal(plain_logits(policy), transformers_logits(folder))


@pytest.mark.parametrize("precision", ["bfloat16", "float32", "float64"])
def test_adapters_are_added_to_what_they_adapt(precision: str, tmp_path: Path) -> None:
    folder = saved_model(tmp_path, "llama")
    policy = load_policy(ModelConfig(name=folder, precision=precision, lora_rank=3, lora_alpha=7.0), seed=0)
    move_adapters(policy)
    from peft import PeftModel

    save_policy(policy, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=policy.precision)
    dtype = torch.promote_types(policy.precision, torch.float32)
    whole = PeftModel.from_pretrained(base, tmp_path / "adapter").to(dtype).eval()
    with torch.no_grad(), _exactly(dtype):
        expected = whole(torch.tensor([IDS])).logits[0]
    found = plain_logits(policy)
    assert found.dtype == dtype
    # `whole.to` made the frequencies of rope float64, and with them its angles
    assert relative_error(found, expected) < (1e-7 if precision == "float64" else 1e-6)


def test_what_is_computed_in_float64_has_no_float32_in_it() -> None:
    """Norms and softmax of transformers are float32 in any model: over a step of 1e-7 the loss would rise by noise."""
    policy = make_policy("llama")
    weight = policy.causal_lm.get_input_embeddings().weight
    shift: dict[Tensor, Tensor] = {weight: torch.zeros_like(weight, dtype=torch.float64)}  # type: ignore[dict-item]
    plain = plain_model(policy, shift, torch.float64)
    loss = plain.logits(IDS, range(29)).log_softmax(-1)[:, 7].sum()
    (gradient,) = torch.autograd.grad(loss, weight)  # type: ignore[arg-type]
    with torch.no_grad():
        shift[weight].copy_(1e-7 * gradient)  # type: ignore[index]
        rise = plain.logits(IDS, range(29)).log_softmax(-1)[:, 7].sum() - loss
    assert float(rise / (1e-7 * gradient.double().square().sum())) == pytest.approx(1, rel=1e-4)


def test_half_precision_is_what_autocast_makes_of_transformers() -> None:
    policy = replace(make_policy("llama"), precision=torch.bfloat16)
    rounded, exact = rounded_and_exact(policy)
    model = plain_model(policy).model
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = model(input_ids=torch.tensor([IDS])).logits[0]
        assert torch.equal(rounded.logits(IDS, range(29)), expected)
        assert torch.equal(exact.logits(IDS, range(29)), plain_logits(policy))


def move_adapters(policy: Policy) -> None:
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                weight.copy_(0.1 * normal(*weight.shape))


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert"])
def test_a_masked_policy_reads_each_pass_in_both_directions(name: str) -> None:
    policy = make_policy(name)
    groups = as_fills(random_groups())
    plain = plain_model(policy)
    found = torch.cat([rollout_logprobs(plain, r, Sampling()) for g in groups for r in g.rollouts if r.num_loss_tokens])
    with torch.no_grad():
        assert torch.allclose(found, logprobs(policy, make(groups).micro_batches, Scoring(Sampling(), 0)), atol=1e-5)


def test_a_masked_model_is_the_saved_one(tmp_path: Path) -> None:
    policy = nano(name="nano-masked", kind="masked", nano_architecture="modernbert")
    save_policy(policy, tmp_path)
    ids = tuple(range(4, 30))
    model = AutoModelForMaskedLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
        assert torch.equal(plain_model(policy).logits(ids, range(len(ids))), expected)


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(0.0), Sampling(0.8, top_k=5, top_p=0.9, min_p=0.01)])
def test_log_probs_are_those_of_the_sampled_distribution(sampling: Sampling) -> None:
    policy = make_policy("llama", torch.float64)
    group = random_groups()[0]
    plain = plain_model(policy)
    with torch.no_grad():
        found = torch.cat([rollout_logprobs(plain, rollout, sampling) for rollout in group.rollouts])
    expected = logprobs(policy, make([group]).micro_batches, Scoring(sampling, 0))
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 2}, {"lora_rank": 2, "precision": "bfloat16"}])
def test_gradients_flow_to_the_weights_that_are_trained(settings: dict[str, Any]) -> None:
    policy = nano(**settings)
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    loss = plain_model(policy).logits(IDS, range(29)).log_softmax(-1)[:, 7].sum()
    gradients = torch.autograd.grad(loss, trained)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert sum(float(gradient.norm()) for gradient in gradients) > 0
    assert all(p.grad is None for p in policy.model.parameters())


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 2}])
def test_a_shift_moves_the_numbers_and_not_the_weights(settings: dict[str, Any]) -> None:
    policy = nano(**settings)
    move_adapters(policy)
    weight = next(p for n, p in policy.model.named_parameters() if p.requires_grad and "q_proj" in n and p.dim() == 2)
    before, base = weight.detach().clone(), plain_logits(policy)
    change = 0.1 * normal(*weight.shape)
    with torch.no_grad():
        shifted = plain_model(policy, {weight: change}).logits(IDS, range(29))
        assert torch.equal(weight, before)
        weight.add_(change)
    assert not torch.allclose(shifted, base, atol=1e-3)
    assert torch.allclose(shifted, plain_logits(policy), atol=1e-6)


def test_weights_in_4_bits_are_what_they_stand_for(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder = saved_model(tmp_path, "llama", hidden_size=64, head_dim=16)
    policy = load_policy(ModelConfig(name=folder, load_in_4bit=True, lora_rank=4), seed=0)
    move_adapters(policy)
    with torch.no_grad():
        expected = policy.model(torch.tensor([IDS])).logits[0]
    assert relative_error(plain_logits(policy), expected) < 1e-5


def test_nothing_of_the_global_state_moves() -> None:
    policy = nano()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    plain_logits(policy)
    assert torch.equal(torch.get_rng_state(), before)
    assert policy.causal_lm.config._attn_implementation == "covey"


def test_what_loading_has_done_to_a_module_is_not_in_it(tmp_path: Path) -> None:
    policy = load_policy(ModelConfig(name=saved_model(tmp_path, "granite", residual_multiplier=0.3)), seed=0)
    expected = plain_logits(policy)
    for layer in policy.causal_lm.base_model.layers:  # type: ignore[union-attr]
        layer.residual_multiplier = 1.0  # type: ignore[assignment]
    assert torch.equal(plain_logits(policy), expected)


@pytest.mark.long
def test_models_that_are_made_in_several_threads_at_once_all_have_their_weights() -> None:
    register = nn.Module.register_parameter

    def made(seed: int) -> list[bool]:
        return [
            weight.is_meta
            for weight in load_policy(
                ModelConfig(nano_hidden_size=16, nano_num_layers=2, device="cpu"), seed=seed
            ).model.parameters()
        ]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(made, range(16)))
    assert [flags for flags in found if any(flags)] == []
    assert nn.Module.register_parameter is register
