"""Activations that wait elsewhere give the same gradient; weights never move."""

import pytest
import torch
from torch import Tensor, nn

from covey.policy.policy import _is_weight, offload_saved

HERE = torch.device("cpu")


def gradient_and_moved(min_bytes: int) -> tuple[Tensor, list[tuple[int, ...]]]:
    """Of a small network, with the shapes of what was saved outside the tensors it computed."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    x_NI = torch.randn(32, 8)
    with offload_saved(HERE, min_bytes):
        out_NO = layers(x_NI)
    assert out_NO.grad_fn is not None
    tanh = out_NO.grad_fn.next_functions[1][0]
    product = out_NO.grad_fn
    input_of_last, weight_of_last = product._saved_mat1, product._saved_mat2
    own = {layer.weight.data_ptr() for layer in layers if isinstance(layer, nn.Linear)}
    assert weight_of_last.data_ptr() in own
    assert tanh is not None
    moved = [tuple(input_of_last.shape)] if input_of_last.data_ptr() != tanh._saved_result.data_ptr() else []
    out_NO.square().sum().backward()
    return torch.cat([p.grad.flatten() for p in layers.parameters() if p.grad is not None]), moved


def test_large_activations_are_copied_small_ones_and_weights_stay() -> None:
    assert gradient_and_moved(min_bytes=32 * 16 * 4)[1] == [(32, 16)]
    assert gradient_and_moved(min_bytes=32 * 16 * 4 + 1)[1] == []


@pytest.mark.parametrize("min_bytes", [0, 2**20])
def test_the_gradient_is_the_same_to_the_bit(min_bytes: int) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    layers(torch.randn(32, 8)).square().sum().backward()
    plain = torch.cat([p.grad.flatten() for p in layers.parameters() if p.grad is not None])
    assert gradient_and_moved(min_bytes)[0].equal(plain)


def test_autocast_s_copies_of_weights_stay_too() -> None:
    """They are there for all micro-batches of a step; fetching them would take as long as the activations."""
    layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    saved: list[tuple[tuple[int, ...], bool]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append((tuple(tensor.shape), _is_weight(tensor)))
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16):
        layers(torch.randn(32, 8, requires_grad=True) * 2.0)
    assert sorted(shape for shape, is_weight in saved if is_weight) == [(8, 16), (16, 4)]
    assert {shape for shape, is_weight in saved if not is_weight} == {(32, 8), (32, 16)}
