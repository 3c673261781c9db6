"""Sampling in half precision: the casts are autocast's, and they follow the weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from covey.engine.native.decode_weights import build_decode_policy, is_wanted, own_bytes
from covey.engine.native.engine import NativeEngine
from covey.policy.attention.base import DENSE
from covey.policy.kernels import linear
from covey.policy.kernels.linear import MergedLinear, OneDnnLinear, PackedLinear, use_onednn
from covey.policy.policy import Policy, inference
from covey.types import Completion, Sampling

from ...support.builders import make_policy, nano
from .test_engine import one

PROMPT = (5, 6, 7, 8)


def full() -> Policy:
    return nano(precision="bfloat16")


def with_adapters(precision: str = "bfloat16", **settings: Any) -> Policy:
    """Its adapters do something: they begin with zeros."""
    policy = nano(precision=precision, lora_rank=4, **settings)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            parameter.add_(0.3) if "lora_B" in name else None
    return policy


def untied() -> Policy:
    policy = make_policy("llama")
    return Policy(model=policy.model, tokenizer=policy.tokenizer, precision=torch.bfloat16, head_is_linear=True)


KINDS: list[Callable[[], Policy]] = [full, with_adapters, untied]
PACKED: list[Callable[[], Policy]] = [
    lambda: through_onednn(),
    lambda: through_onednn(with_adapters),
    lambda: with_adapters("float32", kernels="torch"),
]


def logits(policy: Policy) -> Tensor:
    ids = torch.tensor([PROMPT])
    with inference(policy.model):
        return policy.logits(ids, torch.arange(len(PROMPT))[None], DENSE)


def sample(engine: NativeEngine) -> Completion:
    return one(engine, PROMPT, 1, Sampling(max_tokens=8, temperature=0.0))[0]


@pytest.mark.parametrize("make", KINDS)
def test_the_twin_computes_the_very_bits_of_autocast(make: Callable[[], Policy]) -> None:
    policy = make()
    assert torch.equal(logits(build_decode_policy(policy)), logits(policy))


@pytest.mark.parametrize("make", [*KINDS, *PACKED])
def test_an_engine_samples_from_the_weights_as_they_are_when_it_begins(make: Callable[[], Policy]) -> None:
    policy = make()
    engine = NativeEngine(policy, 1 << 20, 4)
    before = sample(engine)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(-1.5)
    after = sample(engine)
    assert after == sample(NativeEngine(policy, 1 << 20, 4))
    assert after.logprobs != before.logprobs


@pytest.mark.parametrize("make", KINDS)
def test_only_weights_of_linear_layers_exist_twice(make: Callable[[], Policy]) -> None:
    policy = make()
    twin = build_decode_policy(policy)
    held = {id(parameter) for parameter in policy.model.parameters()}
    own = [parameter for parameter in twin.model.parameters() if id(parameter) not in held]
    assert all(parameter.dtype == torch.bfloat16 and not parameter.requires_grad for parameter in own)
    assert sum(parameter.nbytes for parameter in own) == own_bytes(policy) > 0
    embeddings = [m for m in twin.model.modules() if isinstance(m, nn.Embedding)]
    assert all(id(parameter) in held for module in embeddings for parameter in module.parameters())


def test_the_policy_itself_is_left_as_it_was() -> None:
    policy = full()
    before = {name: (parameter, parameter.dtype) for name, parameter in policy.model.named_parameters()}
    build_decode_policy(policy)
    after = {name: (parameter, parameter.dtype) for name, parameter in policy.model.named_parameters()}
    assert all(after[name][0] is before[name][0] and after[name][1] == before[name][1] for name in before)
    assert len(after) == len(before)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_whole_precision_through_torch_needs_no_twin(precision: str) -> None:
    assert not is_wanted(nano(precision=precision, kernels="torch"))


def through_onednn(build: Callable[..., Policy] = nano, **settings: Any) -> Policy:
    """All its linear layers go through oneDNN, however small and whatever the processor."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(linear, "MIN_WEIGHTS", 0)
        patches.setattr(linear, "is_intel", lambda: False)
        return build(precision="float32", **settings)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_packed_weights_give_the_log_probs_of_plain_ones(lora_rank: int) -> None:
    policy = through_onednn(lora_rank=lora_rank)
    twin = build_decode_policy(policy)
    packed = [module for module in twin.model.modules() if isinstance(module, PackedLinear)]
    assert len(packed) == len([m for m in policy.model.modules() if type(m) is OneDnnLinear]) == 2 * 7 + 1
    assert torch.allclose(logits(twin).log_softmax(-1), logits(policy).log_softmax(-1), rtol=0.0, atol=1e-6)


def test_adapters_are_merged_for_sampling_and_the_trained_ones_stay() -> None:
    policy = with_adapters("float64")
    twin = build_decode_policy(policy)
    merged = [module for module in twin.model.modules() if isinstance(module, MergedLinear)]
    assert len(merged) == 2 * 7
    assert not [name for name, _ in twin.model.named_modules() if "lora_" in name]
    assert len([name for name, _ in policy.model.named_modules() if name.endswith("lora_A.default")]) == 2 * 7
    assert torch.allclose(logits(twin), logits(policy), rtol=0.0, atol=1e-12)
    with policy.model.disable_adapter():  # type: ignore[operator]
        assert not torch.allclose(logits(twin), logits(policy), rtol=0.0, atol=1e-2)


@pytest.mark.parametrize("through", ["onednn", "torch"])
def test_merged_adapters_are_far_within_what_sampled_is_trained_allows(through: str) -> None:
    policy = through_onednn(with_adapters) if through == "onednn" else with_adapters("float32", kernels="torch")
    apart = logits(build_decode_policy(policy)).log_softmax(-1) - logits(policy).log_softmax(-1)
    assert apart.abs().max() < 1e-5


def test_what_merged_weights_take_is_counted() -> None:
    policy = with_adapters("float64")
    weights = [module.base_layer.weight for _, module in policy.model.named_modules() if is_lora(module)]
    assert own_bytes(policy) == sum(weight.nbytes for weight in weights) > 0


def test_in_half_precision_adapters_stay_apart_for_the_merged_weight_would_be_rounded() -> None:
    twin = build_decode_policy(with_adapters("bfloat16"))
    assert not [module for module in twin.model.modules() if isinstance(module, MergedLinear)]


def is_lora(module: nn.Module) -> bool:
    return isinstance(module, LoraLayer)


@pytest.mark.parametrize("num_rows", [1, 3, 64, 65, 700])
def test_a_packed_layer_takes_any_number_of_rows(num_rows: int) -> None:
    layer = nn.Linear(48, 80)
    use_onednn(nn.ModuleList([layer]))
    assert isinstance(layer, OneDnnLinear)
    x = torch.randn(1, num_rows, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
        assert torch.allclose(PackedLinear(layer.weight, layer.bias)(x), expected, rtol=1e-5, atol=1e-6)
