"""Joined layers: the log-probs of transformers' layers in half precision, on weights as they are now."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from covey.engine.native import graph
from covey.engine.native.decode_weights import build_decode_policy, is_wanted, refresh
from covey.engine.native.engine import NativeEngine
from covey.engine.native.models import joined
from covey.engine.native.runner import detect_capabilities
from covey.policy.attention.base import DENSE
from covey.policy.kernels.gpu import inductor
from covey.policy.policy import Policy, inference
from covey.types import Sampling

from ...support.builders import make_policy
from .test_decode_weights import with_adapters
from .test_engine import GENEROUS, sampled

IDS = tuple(range(5, 25))
FAMILY = ["llama", "qwen2", "qwen3", "mistral"]
ROUNDING = 0.03
"""Nats that sums of bfloat16 products in another order may differ by."""


@pytest.fixture(autouse=True)
def _traced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Trace what is compiled, and run it as it is."""
    compile_ = torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda function, **how: compile_(function, backend="eager", **how))
    inductor.compile_once.cache_clear()
    yield
    inductor.compile_once.cache_clear()
    assert not [record for record in caplog.records if "uncompiled" in record.getMessage()]


def half(kind: str) -> Policy:
    return replace(make_policy(kind), precision=torch.bfloat16, compiles=True)


def twin_of(policy: Policy) -> Policy:
    return build_decode_policy(policy, detect_capabilities(policy).rules)


def is_joined(policy: Policy) -> bool:
    return isinstance(policy.causal_lm.base_model, joined.JoinedModel)


def logprobs(policy: Policy) -> Tensor:
    """Of one pass over a sequence, which is causal attention without any cache."""
    ids = torch.tensor([IDS])
    with inference(policy.model):
        return policy.logits(ids, torch.arange(len(IDS))[None], DENSE).float().log_softmax(-1)


@pytest.mark.parametrize("kind", FAMILY)
def test_the_model_is_joined_and_the_log_probs_stay(kind: str) -> None:
    policy = half(kind)
    twin = twin_of(policy)
    assert is_joined(twin)
    assert not is_joined(policy)
    assert (logprobs(twin) - logprobs(policy)).abs().max() < ROUNDING


@pytest.mark.long
def test_weights_are_copied_to_where_they_lay_and_norms_are_read_as_they_are() -> None:
    policy = half("qwen3")
    twin = twin_of(policy)
    layer = twin.causal_lm.base_model._layers[0]
    lay = layer.qkv._weight_OI.data_ptr()
    before = logprobs(twin)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    refresh(twin, policy)
    assert layer.qkv._weight_OI.data_ptr() == lay
    assert (logprobs(twin) - before).abs().max() > 10 * ROUNDING
    assert (logprobs(twin) - logprobs(policy)).abs().max() < ROUNDING


@pytest.mark.parametrize(
    "kept",
    [
        replace(half("qwen2"), compiles=False),
        replace(half("qwen2"), precision=torch.float32),
        replace(with_adapters("bfloat16"), compiles=True),
        half("gpt2"),
    ],
    ids=["uncompiled", "whole precision", "adapters", "another family"],
)
def test_others_are_computed_as_they_were(kept: Policy) -> None:
    assert not is_joined(twin_of(kept) if is_wanted(kept, detect_capabilities(kept).rules) else kept)


def test_weights_that_lie_in_the_type_of_products_are_not_held_twice() -> None:
    policy = half("llama")
    policy.model.to(torch.bfloat16)
    assert not is_wanted(policy, detect_capabilities(policy).rules)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_graph_of_joined_layers_samples_what_is_trained(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New keys and values are written to the cache with the rotation of the heads."""
    monkeypatch.setattr(graph, "is_wanted", lambda policy: True)
    policy = half(kind)
    engine = NativeEngine(policy, GENEROUS, max_rows=16, kernels="torch")
    assert is_joined(engine._policy)
    prompts = [IDS[:5], IDS[:9]]
    found = sampled(engine, prompts, 3, [Sampling(max_tokens=20, seed=seed) for seed in range(2)])
    for prompt, group in zip(prompts, found, strict=True):
        for completion in group:
            ids = torch.tensor([[*prompt, *completion.token_ids]])
            with inference(policy.model):
                logits_TV = policy.logits(ids, torch.arange(ids.shape[1])[None], DENSE).float()
            wanted = logits_TV.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0]
            assert (wanted - torch.tensor(completion.logprobs)).abs().max() < ROUNDING
