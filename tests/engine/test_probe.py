"""The probe of a push: whatever part of an engine keeps old weights, it says so, and rounding it lets pass."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from covey.engine.base import Probe
from covey.engine.weights import disproof, make_probe, probe_logprobs
from covey.policy.attention.base import register
from covey.policy.policy import Policy

from .tiny import TOKENIZER, tiny_policy

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gpt2"]
PROMPT = (5, 9, 200, 17, 3, 44)
STEP = 1e-3
"""By which an update moves a weight: as much as one step of Adam at that rate."""


def mixture() -> Policy:
    """A policy of 8 experts, of which each token asks 2, with an untied head."""
    register()
    config = Qwen3MoeConfig(
        vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_experts=8,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=128, initializer_range=0.2, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="covey")
    return replace(tiny_policy("qwen3"), model=model)


def moved(policy: Policy, size: float = STEP) -> Policy:
    """The policy after an update of every weight."""
    model = copy.deepcopy(policy.model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(size * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return replace(policy, model=model)


def stale(new: Policy, old: Policy, is_old: Callable[[str], bool], index: int | None = None) -> Policy:
    """The new policy with old weights where `is_old` says so, of one expert where its index is given."""
    model = copy.deepcopy(new.model)
    before = dict(old.model.named_parameters())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if is_old(name):
                part: Tensor = weight if index is None else weight[index]
                part.copy_(before[name] if index is None else before[name][index])
    return replace(new, model=model)


def names(policy: Policy) -> list[str]:
    return [name for name, _ in policy.model.named_parameters()]


def found(engine: Policy, trainer: Policy, text: tuple[int, ...] = PROMPT) -> str:
    """What the probe says of an engine that should be on the trainer's weights."""
    probe = make_probe(trainer, text)
    return disproof(probe_logprobs(engine, probe.token_ids), probe)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_engine_on_the_pushed_weights_is_believed(architecture: str) -> None:
    new = moved(tiny_policy(architecture))
    assert found(new, new) == ""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_single_stale_tensor_is_found(architecture: str) -> None:
    old = tiny_policy(architecture)
    new = moved(old)
    for name in names(old):
        assert found(stale(new, old, name.__eq__), new), f"{name} is old and nobody says so"


@pytest.mark.parametrize("part", ["layers.1.", "lm_head", "embed_tokens", "norm"])
def test_a_late_layer_the_head_or_the_embeddings_that_are_old_are_found(part: str) -> None:
    old = mixture()
    new = moved(old)
    assert any(part in name for name in names(old))
    assert "differs from the trainer's probe" in found(stale(new, old, lambda name: part in name), new)


@pytest.mark.long
def test_one_old_expert_that_a_token_of_the_probe_asks_is_found() -> None:
    old = mixture()
    new = moved(old)
    for layer, asked in enumerate(asked_experts(new)):
        assert len(asked) >= 7  # of 8; one that no token asks cannot be seen, and has no gradient from such tokens
        for index in asked:
            for name in ("gate_up_proj", "down_proj"):
                tensor = f"model.layers.{layer}.mlp.experts.{name}"
                assert found(stale(new, old, tensor.__eq__, index), new), f"expert {index} of {tensor} is old"


def asked_experts(policy: Policy) -> list[set[int]]:
    """The experts of each layer that the probe's tokens are sent to."""
    asked: list[set[int]] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out: asked.append(set(out[2].flatten().tolist())))
        for layer in policy.causal_lm.model.layers
    ]
    make_probe(policy, PROMPT)
    for hook in hooks:
        hook.remove()
    return asked


def test_old_embeddings_are_found_where_only_those_of_the_prompts_tokens_were_trained() -> None:
    old = mixture()
    new = replace(old, model=copy.deepcopy(old.model))
    probe = make_probe(old)
    trained = [token for token in PROMPT if token not in probe.token_ids]
    with torch.no_grad():
        rows(new.causal_lm)[trained] += STEP
    assert trained
    assert found(old, new, text=()) == ""
    assert found(old, new)


def rows(model: PreTrainedModel) -> Tensor:
    return model.get_input_embeddings().weight  # type: ignore[return-value]


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_rounding_of_half_precision_passes_and_an_old_layer_does_not(precision: torch.dtype) -> None:
    old = tiny_policy("qwen3")
    new = moved(old, size=0.05)
    half = replace(new, precision=precision)
    assert found(replace(half, precision=torch.float32), half) == ""
    assert found(replace(stale(new, old, lambda name: "layers.1." in name), precision=precision), half)


@pytest.mark.parametrize(
    ("gaps", "is_rounding"),
    [
        ([0.9e-4] + [0.0] * 99, True),
        ([1.1e-4] + [0.0] * 99, False),
        ([0.2e-4] * 100, False),
        ([0.0] * 99 + [math.nan], False),
        ([0.0] * 99, False),
    ],
    ids=["one token near the bound", "one token beyond it", "every token a little", "no number", "a token too few"],
)
def test_gaps_are_rounding_where_neither_the_largest_nor_the_mean_is_more(gaps: list[float], is_rounding: bool) -> None:
    probe = Probe(tuple(range(101)), (0.0,) * 100, tolerance=1e-4)
    assert (disproof(gaps, probe) == "") == is_rounding


@pytest.mark.parametrize(
    ("precision", "rounding", "expected"),
    [
        (torch.float32, 0.0, 1e-4),
        (torch.float32, 1e-7, 1e-4),
        (torch.float32, 8e-6, 2.4e-4),  # a pretrained model of thirty layers
        (torch.float32, 1e-2, 1e-3),
        (torch.bfloat16, 0.03, 0.9),
        (torch.bfloat16, 1.0, 1.0),
    ],
)
def test_a_probe_allows_what_the_policy_rounds_within_bounds(
    precision: torch.dtype, rounding: float, expected: float
) -> None:
    policy = replace(tiny_policy("llama"), precision=precision, rounding=rounding)
    assert make_probe(policy).tolerance == pytest.approx(expected)


def test_a_probe_fits_the_policy_with_a_token_to_spare() -> None:
    policy = tiny_policy("llama")
    probe = make_probe(policy, tuple(range(500)))
    assert len(probe.token_ids) == 64
    assert probe.token_ids[32:] == tuple(range(32))
    policy.causal_lm.config.max_position_embeddings = 20
    assert len(make_probe(policy, PROMPT).token_ids) == 19
