"""oneDNN computes what torch computes, up to the order of sums."""

import copy

import pytest
import torch
from torch import Tensor, nn

from covey.policy.kernels import linear
from covey.policy.kernels.linear import OneDnnLinear, TiledLinear, choose_library, has_tiles, use_onednn


def layers(bias: bool, inputs: int = 192, outputs: int = 400) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs, bias=bias)
    fast = copy.deepcopy(plain)
    use_onednn(nn.ModuleList([fast]))
    assert isinstance(fast, OneDnnLinear)
    return plain, fast


def gradients(layer: nn.Linear, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out = layer(x)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, *[p.grad for p in layer.parameters() if p.grad is not None]]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 192), (7, 192), (2, 33, 192), (1, 0, 192)])
def test_values_and_gradients_are_those_of_a_plain_layer(bias: bool, shape: tuple[int, ...]) -> None:
    plain, fast = layers(bias)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for got, expected in zip(gradients(fast, x), gradients(plain, x), strict=True):
        assert got.shape == expected.shape
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_a_frozen_layer_passes_the_gradient_on_and_keeps_none() -> None:
    plain, fast = layers(bias=True)
    x = torch.randn(5, 192, requires_grad=True)
    fast.requires_grad_(False)
    fast(x).sum().backward()
    assert fast.weight.grad is None
    assert x.grad is not None
    assert torch.allclose(x.grad, plain.weight.sum(0).expand(5, -1), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_computed_as_before(dtype: torch.dtype) -> None:
    plain, fast = (layer.to(dtype) for layer in layers(bias=True))
    x = torch.randn(5, 192, dtype=dtype)
    assert torch.equal(fast(x), plain(x))


def test_autocast_computes_as_before() -> None:
    plain, fast = layers(bias=True)
    x = torch.randn(5, 192)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fast(x), plain(x))


def test_the_same_input_gives_the_same_bits_with_several_threads() -> None:
    _, fast = layers(bias=True, inputs=256, outputs=512)
    x = torch.randn(300, 256)
    first = gradients(fast, x)
    for _ in range(5):
        for got, expected in zip(gradients(fast, x), first, strict=True):
            assert torch.equal(got, expected)


def test_only_large_plain_linear_layers_are_touched() -> None:
    class Own(nn.Linear):
        pass

    model = nn.ModuleList([nn.Linear(256, 256), nn.Linear(256, 255), Own(256, 256), nn.Embedding(256, 256)])
    use_onednn(model, 2**16)
    assert [type(module) for module in model] == [OneDnnLinear, nn.Linear, Own, nn.Embedding]


def test_auto_takes_onednn_for_large_layers_where_the_processor_is_not_intels(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(kernels: str, is_intel: bool) -> list[type[nn.Module]]:
        monkeypatch.setattr(linear, "is_intel", lambda: is_intel)
        model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(256, 256)])
        choose_library(model, kernels)
        return [type(module) for module in model]

    assert chosen("auto", is_intel=False) == [nn.Linear, OneDnnLinear]
    assert chosen("auto", is_intel=True) == chosen("torch", is_intel=False) == [nn.Linear, nn.Linear]


def test_auto_takes_tiles_for_large_layers_in_bfloat16_alone() -> None:
    def chosen(kernels: str, precision: torch.dtype) -> type[nn.Module]:
        model = nn.ModuleList([nn.Linear(256, 256)])
        choose_library(model, kernels, precision)
        return type(model[0])

    assert (chosen("auto", torch.bfloat16) is TiledLinear) == has_tiles()
    assert TiledLinear not in (chosen("torch", torch.bfloat16), chosen("auto", torch.float32))


@pytest.mark.skipif(not has_tiles(), reason="the processor has no tiles (AMX)")
@pytest.mark.parametrize("bias", [True, False])
def test_in_tiles_all_but_the_weights_gradient_is_what_autocast_computes(bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(192, 400, bias=bias)
    tiled = copy.deepcopy(plain)
    tiled.__class__ = TiledLinear
    x = torch.randn(2, 33, 192)
    with torch.autocast("cpu", torch.bfloat16):
        (out, of_x, of_weight, *of_bias), (same, same_x, rounded, *rounded_bias) = (
            gradients(layer, x) for layer in (tiled, plain)
        )
        with torch.no_grad():
            assert torch.equal(tiled(x), plain(x))
    assert torch.equal(out, same)
    assert torch.equal(of_x, same_x)
    for mine, theirs in zip([of_weight, *of_bias], [rounded, *rounded_bias], strict=True):
        assert mine.dtype == torch.float32
        assert not torch.equal(mine, theirs)  # theirs is rounded to eight bits
        assert torch.allclose(mine, theirs, rtol=2**-8, atol=2**-8 * float(theirs.abs().max()))
    half = x.flatten(0, 1).bfloat16().double()
    exact = torch.linspace(-1, 1, out.numel()).view(-1, 400).bfloat16().double().T @ half
    assert float((of_weight - exact).norm()) <= 1e-6 * float(exact.norm())
