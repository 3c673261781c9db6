"""The short convolution over forests of segments: token by token in float64, and as transformers compute it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.nemotron_h.modeling_nemotron_h import causal_conv1d_fn

from covey.policy.recurrence import compiled, plain
from covey.policy.recurrence.base import Holders

from .forests import FOREST, convolve_by_tokens, farthest, forest

Conv = Callable[..., Tensor]
CONVS: dict[str, Conv] = {"plain": plain.causal_conv, "compiled": compiled.causal_conv}
ROWS_S3 = forest(FOREST)
NUM_TOKENS = int(ROWS_S3[:, 1].sum())
ROUNDING = 3e-7

pytestmark = pytest.mark.parametrize("conv", CONVS.values(), ids=CONVS)


def inputs_of(channels: int, width: int, num_tokens: int = NUM_TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(width)
    return tuple(
        torch.randn(shape, generator=draw) for shape in ((num_tokens, channels), (channels, width), (channels,))
    )


def expected_of(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    out = convolve_by_tokens(x, weight, bias, ROWS_S3)[0]
    return functional.silu(out) if silu else out


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(
    ("channels", "width", "has_bias"), [(40, 4, True), (300, 4, False), (7, 3, True), (16, 6, False), (5, 1, True)]
)
def test_outputs_and_gradients_are_those_of_the_formula(
    conv: Conv, channels: int, width: int, has_bias: bool, silu: bool
) -> None:
    """Before a segment of one token stand inputs of its parent's parent."""
    inputs = inputs_of(channels, width)[: 2 + has_bias]
    found = [tensor.clone().requires_grad_() for tensor in inputs]
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    nothing = [] if has_bias else [None]
    mine, theirs = conv(*found, *nothing, ROWS_S3, silu=silu), expected_of(*exact, *nothing, silu)
    gradient = torch.randn(mine.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(mine, found, gradient)
    assert farthest([mine, *gradients], [theirs, *torch.autograd.grad(theirs, exact, gradient.double())]) < ROUNDING


@pytest.mark.parametrize("weight_type", [torch.float32, torch.bfloat16])
def test_half_precision_is_computed_in_float32_and_rounded_once(conv: Conv, weight_type: torch.dtype) -> None:
    x, weight, bias = (tensor.bfloat16() for tensor in inputs_of(40, 4))
    given = [x.requires_grad_(), weight.to(weight_type).requires_grad_(), bias.to(weight_type).requires_grad_()]
    wide = [tensor.detach().float().requires_grad_() for tensor in given]
    mine, theirs = conv(*given, ROWS_S3, silu=True), conv(*wide, ROWS_S3, silu=True)
    assert mine.dtype == torch.bfloat16
    assert torch.equal(mine, theirs.bfloat16())
    found, expected = (
        torch.autograd.grad(out, own, torch.ones_like(out)) for out, own in ((mine, given), (theirs, wide))
    )
    assert [gradient.dtype for gradient in found] == [torch.bfloat16, weight_type, weight_type]
    assert all(torch.equal(mine, theirs.to(mine.dtype)) for mine, theirs in zip(found, expected, strict=True))


def test_rows_of_a_wider_tensor_are_taken(conv: Conv) -> None:
    x, weight, bias = inputs_of(40, 4)
    wide, turned = torch.cat([x, x], 1)[:, :40], x.T.contiguous().T
    expected = conv(x, weight, bias, ROWS_S3)
    assert all(torch.equal(conv(other, weight, bias, ROWS_S3), expected) for other in (wide, turned))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_of_one_token_in_place_make_one_long_segment(conv: Conv, dtype: torch.dtype) -> None:
    x, weight, bias = inputs_of(40, 4, 100)
    x, kept, one = x.to(dtype), torch.tensor([3, 1]), torch.tensor([-1, -1])
    held = torch.full((4, 3, 40), 7.0, dtype=dtype)
    rows = torch.tensor([(0, 1, -1), (1, 1, -1)])
    outs = []
    for step in range(50):
        holders = Holders(held, kept if step else one, kept)
        outs.append(conv(x[[step, 50 + step]], weight, bias, rows, holders))
    expected = conv(x, weight, bias, torch.tensor([(0, 50, -1), (50, 50, -1)]))
    assert torch.equal(torch.stack(outs, 1).flatten(0, 1), expected)
    assert torch.equal(held[kept], torch.stack([x[47:50], x[97:]]))
    assert bool((held[[0, 2]] == 7.0).all())


def test_inputs_are_held_between_passes_over_forests(conv: Conv) -> None:
    """A short segment shifts them; one holder is read by several segments while one of them writes it."""
    x, weight, bias = inputs_of(24, 4, 13)
    rows = torch.tensor([(0, 2, -1), (2, 5, 0), (7, 1, 0), (8, 4, -1), (12, 1, 3)])
    held = torch.randn(4, 3, 24, generator=torch.Generator().manual_seed(4))
    before, read, write = held.clone(), torch.tensor([1, -1, 2, 1, 1]), torch.tensor([1, 0, -1, 3, 2])
    out = conv(x, weight, bias, rows, Holders(held, read, write))
    expected, kept = convolve_by_tokens(
        x, weight, bias, rows, [before[place] if place >= 0 else None for place in read]
    )
    assert farthest([out], [expected]) < ROUNDING
    assert torch.equal(held, kept[[1, 0, 4, 3]].float())


def test_what_is_no_number_stays_in_its_segment_and_its_children(conv: Conv) -> None:
    x, weight, bias = inputs_of(24, 4, 20)
    rows = forest(((6, (2, (3,)), (4,)), (5,)))
    x[7] = torch.nan
    x.requires_grad_()
    out = conv(x, weight, bias, rows, silu=True)
    assert out.isnan().any(1).nonzero().flatten().tolist() == [7, 8, 9, 10]
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert gradient.isnan().any(1).nonzero().flatten().tolist() == [4, 5, 6, 7, 8, 9, 10]


def test_a_layer_of_transformers_computes_the_same(conv: Conv) -> None:
    x, weight, bias = inputs_of(40, 4, 30)
    expected = causal_conv1d_fn(x.T[None], weight, bias, activation="silu")[0].T
    assert farthest([conv(x, weight, bias, torch.tensor([(0, 30, -1)]), silu=True)], [expected]) < ROUNDING
