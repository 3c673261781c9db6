"""Layers with one input and gated MLPs in C: the numbers of the plain formula, with adapters, in either type."""

import pytest
import torch
from torch import Tensor, nn

from covey.policy.kernels.blocks import (
    Projection,
    add_gated,
    layers_of,
    product_call,
    project,
    run_products,
)
from covey.policy.kernels.linear import OneDnnLinear

from ...support.builders import normal, relative_error

pytestmark = pytest.mark.usefixtures("own_threads")

ROWS, WIDTH, WIDER = 37, 48, 80


def layers(*shapes: tuple[int, int], rank: int = 4) -> list[Projection]:
    """Return layers (outputs, inputs) with biases, each other one with an adapter."""
    found = []
    for seed, (outer, inner) in enumerate(shapes):
        own = [normal(outer, inner, seed=seed) / inner**0.5, normal(outer, seed=seed + 9)]
        adapter = [normal(rank, inner, seed=seed + 20) / inner**0.5, normal(outer, rank, seed=seed + 30)]
        weights = [weight.requires_grad_() for weight in (*own, *(adapter if seed % 2 == 0 else []))]
        found.append(Projection(*weights, scale=1.5) if len(weights) == 4 else Projection(*weights))
    return found


def plain(x: Tensor, layer: Projection) -> Tensor:
    out = x @ layer.weight_OI.double().t()
    if layer.down_RI is not None and layer.up_OR is not None:
        out = out + layer.scale * x @ layer.down_RI.double().t() @ layer.up_OR.double().t()
    return out if layer.bias_O is None else out + layer.bias_O.double()


def gradients(out: Tensor, inputs: list[Tensor], used: list[Projection]) -> list[Tensor]:
    weights = [tensor for layer in used for tensor in layer.tensors if tensor is not None]
    seen = torch.linspace(-1, 1, out.numel()).view_as(out).to(out)
    return [out.detach(), *torch.autograd.grad((out * seen).sum(), [*inputs, *weights])]


def test_layers_with_one_input_give_the_plain_numbers_and_gradients() -> None:
    used, x = layers((WIDER, WIDTH), (32, WIDTH), (20, WIDTH)), normal(ROWS, WIDTH, seed=7).requires_grad_()
    mine = gradients(torch.cat(project(x, used), dim=1), [x], used)
    exact = gradients(torch.cat([plain(x.double(), layer) for layer in used], dim=1), [x], used)
    assert max(relative_error(a, b) for a, b in zip(mine, exact, strict=True)) < 2e-6


def _gated(hidden: Tensor, x: Tensor, used: list[Projection]) -> Tensor:
    gate, up, down = used
    return hidden.double() + plain(nn.functional.silu(plain(x, gate)) * plain(x, up), down)


@pytest.mark.parametrize("half", [False, True])
def test_a_gated_mlp_gives_the_plain_numbers_and_gradients(half: bool) -> None:
    used = layers((WIDER, WIDTH), (WIDER, WIDTH), (WIDTH, WIDER))
    used[2] = Projection(used[2].weight_OI, None, used[2].down_RI, used[2].up_OR, 1.5)
    hidden, x = (normal(ROWS, WIDTH, seed=seed).requires_grad_() for seed in (5, 6))
    own = [Projection(layer.weight_OI, None, layer.down_RI, layer.up_OR, layer.scale) for layer in used]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        mine = gradients(add_gated(hidden, x, own), [hidden, x], own)
    exact = gradients(_gated(hidden, x.double(), own), [hidden, x], own)
    assert max(relative_error(a, b) for a, b in zip(mine, exact, strict=True)) < (2e-2 if half else 2e-6)


def test_no_bit_depends_on_threads_or_on_the_rows_beside() -> None:
    used, x, found = layers((WIDER, WIDTH), (32, WIDTH)), normal(300, WIDTH), []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        found.append(torch.cat(project(x, used), dim=1))
    assert all(torch.equal(found[0], other) for other in found)
    assert torch.equal(torch.cat(project(x[17:60], used), dim=1), found[0][17:60])


def test_a_sum_of_many_products_is_one_sum_and_rounded_once() -> None:
    pairs = [(normal(9, 70, seed=seed), normal(70, 33, seed=seed + 50)) for seed in range(40)]
    exact = sum(a.double() @ b.double() for a, b in pairs)
    whole, rounded = torch.empty(9, 33), torch.empty(9, 33, dtype=torch.bfloat16)
    run_products(product_call(pairs, whole), product_call(pairs, rounded, half=False))
    assert relative_error(whole, exact) < 1e-6  # type: ignore[arg-type]
    assert torch.equal(rounded, whole.to(torch.bfloat16))


def test_a_layer_that_a_hook_listens_to_is_called_itself() -> None:
    layer = OneDnnLinear(WIDTH, WIDER)
    layer.through_c = True
    assert len(layers_of(normal(3, WIDTH), layer)) == 1
    layer.register_forward_hook(lambda *_: None)
    assert layers_of(normal(3, WIDTH), layer) == []
