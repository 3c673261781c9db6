"""Fused layers: the log-probs of transformers' layers, the weights as they are, and never for another form of layer."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from covey.engine.native.decode_weights import build_decode_policy, is_wanted, refresh
from covey.engine.native.engine import NativeEngine
from covey.engine.native.models.fused import FusedModel
from covey.engine.native.runner import detect_capabilities
from covey.policy.attention.base import DENSE
from covey.policy.kernels.linear import TiledLinear, use_onednn
from covey.policy.policy import DTYPES, Policy, inference
from covey.types import Sampling

from ...policy.models.test_quantized import in_full, quantised
from ...support.builders import make_policy, nano
from ..tiny import tiny_policy
from .test_decode_weights import with_adapters
from .test_engine import GENEROUS, one

IDS = tuple(range(5, 25))
FAMILY = ["llama", "qwen2", "qwen3", "mistral"]


def through_onednn() -> Policy:
    policy = make_policy("qwen2")
    use_onednn(policy.model)
    return policy


KINDS: dict[str, Callable[[], Policy]] = {
    **{name: lambda name=name: make_policy(name) for name in FAMILY},
    **{f"{name}, window": lambda name=name: tiny_policy(f"{name}-window") for name in ("qwen2", "mistral")},
    "adapters": lambda: with_adapters("float32"),
    "onednn": through_onednn,
}


def fused_twin(policy: Policy) -> Policy:
    return build_decode_policy(policy, detect_capabilities(policy).rules)


def is_fused(policy: Policy) -> bool:
    return isinstance(policy.causal_lm.base_model, FusedModel)


def logprobs(policy: Policy) -> Tensor:
    """Of one pass over a sequence, which is causal attention without any cache."""
    ids = torch.tensor([IDS])
    with inference(policy.model):
        return policy.logits(ids, torch.arange(len(IDS))[None], DENSE).log_softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_fused_and_the_log_probs_stay(kind: str) -> None:
    policy = KINDS[kind]()
    twin = fused_twin(policy)
    assert is_fused(twin)
    assert not is_fused(policy)
    assert (logprobs(twin) - logprobs(policy)).abs().max() < 2e-5
    assert not torch.equal(logprobs(twin), logprobs(policy))


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_samples_from_the_weights_as_they_are_when_it_begins(kind: str) -> None:
    policy, sampling = KINDS[kind](), Sampling(max_tokens=8, temperature=0.0)
    engine = NativeEngine(policy, GENEROUS, 4)
    before = one(engine, IDS, 1, sampling)[0]
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(-1.5)
    after = one(engine, IDS, 1, sampling)[0]
    assert after == one(NativeEngine(policy, GENEROUS, 4), IDS, 1, sampling)[0]
    assert after.logprobs != before.logprobs


@pytest.mark.parametrize("architecture", FAMILY)
def test_any_changed_weight_changes_a_fused_layer_as_the_layer(architecture: str) -> None:
    policy = make_policy(architecture)
    before = logprobs(fused_twin(policy))
    for name, parameter in policy.model.named_parameters():
        if ".layers.1." not in name or name.endswith("k_proj.bias"):  # the same for all keys: softmax takes it away
            continue
        with torch.no_grad():
            kept = parameter.clone()
            parameter.mul_(1.5).add_(0.05)
            changed = logprobs(fused_twin(policy))
            assert (changed - logprobs(policy)).abs().max() < 2e-5, name
            assert (changed - before).abs().max() > 1e-4, name
            parameter.copy_(kept)


def test_layers_of_another_form_are_left_alone() -> None:
    gelu = make_policy("llama")
    for layer in gelu.causal_lm.base_model.layers:
        layer.mlp.act_fn = torch.nn.GELU()
    for policy in (gelu, tiny_policy("gpt2")):
        assert not is_fused(fused_twin(policy))
        assert not is_wanted(policy, detect_capabilities(policy).rules)


def test_without_rules_nothing_is_fused() -> None:
    policy = make_policy("llama")
    assert not is_wanted(policy)
    assert is_wanted(policy, detect_capabilities(policy).rules)
    assert not is_fused(build_decode_policy(policy))


@pytest.mark.parametrize("architecture", FAMILY)
def test_in_half_precision_it_is_no_further_from_float32_than_autocast_is(architecture: str) -> None:
    exact = make_policy(architecture)
    half = replace(exact, precision=torch.bfloat16)
    twin = build_decode_policy(half, detect_capabilities(half).rules)
    assert is_fused(twin)
    mine, theirs = ((logprobs(policy) - logprobs(exact)).abs().max() for policy in (twin, half))
    assert 0 < mine < 1.5 * theirs


def test_in_half_precision_widths_that_do_not_pair_are_left_alone() -> None:
    odd = make_policy("llama")
    for layer in odd.causal_lm.base_model.layers:
        layer.mlp = LlamaMLP(LlamaConfig(hidden_size=odd.causal_lm.config.hidden_size, intermediate_size=33))
    assert is_fused(fused_twin(odd))
    assert not is_fused(fused_twin(replace(odd, precision=torch.bfloat16)))


def varied_adapters() -> Policy:
    """Adapters of several ranks and scales, on some layers and some of their products, that do something."""
    how = LoraConfig(
        r=4,
        lora_alpha=3,
        use_rslora=True,
        target_modules=["q_proj", "v_proj", "up_proj", "down_proj"],
        rank_pattern={"layers.1.self_attn.v_proj": 7, "layers.1.mlp.down_proj": 1},
        alpha_pattern={"layers.0.mlp.up_proj": 11},
        exclude_modules=["model.layers.0.self_attn.q_proj"],
    )
    policy = nano(precision="float32")
    model = get_peft_model(policy.causal_lm, how)
    noise = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=noise))
    return replace(policy, model=model)


def through_tiles(precision: str) -> Policy:
    """Adapters so wide that their own products go through tiles, as those of rank 16 beside 4,864 outputs."""
    policy = with_adapters(precision)
    for module in policy.model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = TiledLinear
    return policy


ADAPTED: list[Callable[[str], Policy]] = [
    with_adapters,
    through_tiles,
    lambda precision: replace(varied_adapters(), precision=DTYPES[precision]),
]


@pytest.mark.parametrize("make", ADAPTED)
def test_half_precision_adapters_are_as_exact_as_autocast(
    make: Callable[[str], Policy],
) -> None:
    exact, half = make("float32"), make("bfloat16")
    twin = fused_twin(half)
    assert is_fused(twin)
    mine, theirs = ((logprobs(policy).float() - logprobs(exact)).abs() for policy in (twin, half))
    assert 0 < mine.max() < 1.5 * theirs.max()
    assert mine.mean() < 1.2 * theirs.mean()
    with exact.model.disable_adapter():  # type: ignore[operator]
        assert (logprobs(exact) - logprobs(twin)).abs().mean() > 5 * theirs.mean()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_base_weights_in_few_bits_are_sampled_from_as_the_numbers_they_stand_for(
    bits: int, precision: str, tmp_path: Path
) -> None:
    policy = quantised(tmp_path, precision=precision, load_in_8bit=bits == 8, load_in_4bit=bits == 4)
    engine = NativeEngine(policy, GENEROUS, 4)
    assert engine.kernels == "compiled"
    twin = fused_twin(policy)
    assert is_fused(twin)
    plain = in_full(policy, tmp_path)
    mine, theirs = ((logprobs(each).float() - logprobs(plain)).abs() for each in (twin, policy))
    limit = 1e-5 if precision == "float32" else 1.5 * theirs.max()
    assert mine.max() < limit
    with plain.model.disable_adapter():  # type: ignore[operator]
        assert (logprobs(twin) - logprobs(plain)).abs().max() > 3 * limit


def test_a_small_step_of_an_adapter_changes_what_is_sampled_from_in_half_precision() -> None:
    policy = with_adapters("bfloat16")
    twin = fused_twin(policy)
    before = logprobs(twin)
    frozen = [p.clone() for p in policy.model.parameters() if not p.requires_grad]
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.01) if parameter.requires_grad else None
    refresh(twin, policy)
    assert not torch.equal(logprobs(twin), before)
    assert torch.equal(logprobs(twin), logprobs(fused_twin(policy)))
    assert all(
        torch.equal(a, b)
        for a, b in zip(frozen, (p for p in policy.model.parameters() if not p.requires_grad), strict=True)
    )


@pytest.mark.parametrize("make", ADAPTED)
def test_rows_with_adapters_in_half_precision_are_independent_of_those_beside_them(
    make: Callable[[str], Policy],
) -> None:
    engine = NativeEngine(make("bfloat16"), GENEROUS, 16)
    assert engine.kernels == "compiled"
    alone = one(engine, IDS, 1, Sampling(max_tokens=6, seed=3))
    beside = one(engine, IDS, 11, Sampling(max_tokens=6, seed=3))
    assert beside[0] == alone[0]


def test_an_engine_in_half_precision_samples_through_c_what_the_trainer_scores() -> None:
    half = replace(make_policy("qwen2"), precision=torch.bfloat16)
    engine = NativeEngine(half, GENEROUS, 4)
    assert engine.kernels == "compiled"
    completion = one(engine, IDS, 1, Sampling(max_tokens=8, seed=1))[0]
    ids = torch.tensor([[*IDS, *completion.token_ids]])
    with inference(half.model):
        scored = half.logits(ids, torch.arange(ids.shape[1])[None], DENSE).float().log_softmax(-1)
    for at, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True), len(IDS) - 1):
        assert logprob == pytest.approx(float(scored[at, token]), abs=0.05)
