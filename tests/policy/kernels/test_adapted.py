"""Layers with an adapter as one function: what peft computes, with gradients that are rounded once less."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from covey.policy.kernels.adapted import fuse_adapters
from covey.policy.kernels.linear import TiledLinear, has_tiles

from ...support.builders import normal

pytestmark = pytest.mark.skipif(not has_tiles(), reason="the processor has no tiles (AMX)")
OUTER, INNER, RANK = 96, 64, 4


def adapted(dropout: float = 0.0, kind: type[nn.Linear] = TiledLinear) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(kind(INNER, OUTER))
    lora = LoraConfig(r=RANK, lora_alpha=12, lora_dropout=dropout, target_modules=["0"], init_lora_weights=False)
    return inject_adapter_in_model(lora, model)[0]


def results(layer: nn.Module, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Outputs, and gradients of inputs and adapters, under autocast where there is no type."""
    layer.zero_grad()
    x = normal(3, 11, INNER, seed=1).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
        out = layer(x)
    (out * normal(3, 11, OUTER, seed=2)).sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, *[p.grad for p in layer.parameters() if p.grad is not None]]


def error(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, exact, strict=True)]


def test_numbers_are_as_near_to_the_exact_ones_as_pefts() -> None:
    plain = adapted()
    fused = copy.deepcopy(plain)
    fuse_adapters(nn.ModuleList([fused]))
    assert type(fused).__name__ == "FusedLora"
    exact = results(copy.deepcopy(plain).double(), torch.float64)
    assert len(exact) == 4
    for mine, theirs in zip(error(results(fused), exact), error(results(plain), exact), strict=True):
        assert 0 < mine < max(1.25 * theirs, 2**-8)


def test_without_gradient_the_bits_are_the_same() -> None:
    fused = adapted()
    fuse_adapters(nn.ModuleList([fused]))
    expected = results(fused)[0]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fused(normal(3, 11, INNER, seed=1)), expected)


def test_a_frozen_weight_is_cast_once_until_it_changes() -> None:
    fused = adapted()
    fuse_adapters(nn.ModuleList([fused]))
    weight = fused.base_layer.weight
    assert not weight.requires_grad
    first, cast = results(fused)[0], weight.covey_half[1]
    assert torch.equal(results(fused)[0], first)
    assert weight.covey_half[1] is cast
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(results(fused)[0], results(copy.deepcopy(fused))[0])
    assert torch.equal(weight.covey_half[1], weight.bfloat16())


def test_a_disabled_adapter_adds_nothing() -> None:
    fused = adapted()
    fuse_adapters(nn.ModuleList([fused]))
    x = normal(5, INNER)
    fused.enable_adapters(False)  # type: ignore[operator]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fused(x), fused.base_layer(x))  # type: ignore[operator]


@pytest.mark.parametrize(("dropout", "kind"), [(0.1, TiledLinear), (0.0, nn.Linear)])
def test_other_layers_are_left_to_peft(dropout: float, kind: type[nn.Linear]) -> None:
    layer = adapted(dropout, kind)
    before = type(layer)
    fuse_adapters(nn.ModuleList([layer]))
    assert type(layer) is before


def test_a_layer_is_pickled_as_any_other() -> None:
    fused = adapted()
    fuse_adapters(nn.ModuleList([fused]))
    assert type(pickle.loads(pickle.dumps(fused))) is type(fused)
