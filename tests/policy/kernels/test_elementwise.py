"""Norms, gates and rotary positions in C: the numbers of torch, a row's alone, whatever the number of threads."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from covey.policy.kernels.elementwise import add_norm, apply_gate, rms_norm, rotate

EPS = 1e-6
SHAPES = [(1, 5), (3, 7), (65, 48), (130, 100), (5, 3, 64), (700, 256), (2, 129, 513)]
"""Widths that fill no vector, rows that fill no block, enough of both for several threads."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The output, and the gradients of a fixed sum of it."""
    inputs = tuple(tensor.detach().requires_grad_() for tensor in inputs)
    out = function(*inputs)
    slopes = torch.linspace(-1, 1, out.numel()).to(out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, inputs, slopes)]


def assert_close(got: list[Tensor], exact: list[Tensor]) -> None:
    for mine, theirs in zip(got, exact, strict=True):
        assert mine.dtype == torch.float32
        assert mine.shape == theirs.shape
        assert float((mine.double() - theirs).norm()) <= 1e-6 * float(theirs.norm())


def in_torch(x: Tensor, weight_C: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight_C


def through_c(x: Tensor, weight_C: Tensor) -> Tensor:
    return rms_norm(x, weight_C, EPS)


def turned_in_torch(x_BTHD: Tensor, cosines_BTD: Tensor, sines_BTD: Tensor) -> Tensor:
    lower, upper = x_BTHD.chunk(2, dim=-1)
    return x_BTHD * cosines_BTD[:, :, None] + torch.cat([-upper, lower], dim=-1) * sines_BTD[:, :, None]


def with_threads(make: Callable[[], list[Tensor]]) -> list[list[Tensor]]:
    """What comes of it with 1, 2 and 3 threads."""
    before, made = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            made.append(make())
    finally:
        torch.set_num_threads(before)
    return made


@pytest.mark.parametrize("shape", SHAPES)
def test_a_norm_and_its_gradients_are_those_of_torch_in_float64(shape: tuple[int, ...]) -> None:
    x, weight = 3 * normal(*shape), 1 + 0.3 * normal(shape[-1], seed=1)
    assert_close(with_gradients(through_c, x, weight), with_gradients(in_torch, x.double(), weight.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sum_with_its_norm_has_the_bits_of_the_two(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = normal(*shape), normal(*shape, seed=1).to(dtype), 1 + 0.3 * normal(shape[-1], seed=2)
    x, delta, weight = (tensor.requires_grad_() for tensor in given)
    slopes = [normal(*shape, seed=3), normal(*shape, seed=4).to(dtype)]
    together = add_norm(x, delta, weight, EPS, dtype)
    total = x + delta
    apart = total, rms_norm(total, weight, EPS, dtype)
    mine, theirs = (torch.autograd.grad(outs, (x, delta, weight), slopes) for outs in (together, apart))
    for one, other in zip((*together, *mine), (*apart, *theirs), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def exactly(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """As `with_gradients` in float64, of the sum whose factors are rounded to bfloat16."""
    wide = [tensor.double().requires_grad_() for tensor in inputs]
    out = function(*wide)
    slopes = torch.linspace(-1, 1, out.numel()).bfloat16().double().view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, wide, slopes)]


def assert_rounded_once(got: list[Tensor], exact: list[Tensor]) -> None:
    """Each number is the nearest bfloat16 of one that float32 computes; gradients of a weight are sums, in float32."""
    for mine, theirs in zip(got, exact, strict=True):
        if mine.dtype == torch.float32:
            assert_close([mine], [theirs])
        else:
            assert mine.dtype == torch.bfloat16
            assert bool(((mine.double() - theirs).abs() <= 1.001 * 2**-8 * theirs.abs() + 1e-6).all())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_in_bfloat16_is_rounded_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = (3 * normal(*shape)).to(dtype), 1 + 0.3 * normal(shape[-1], seed=1)
    got = with_gradients(lambda x, weight: rms_norm(x, weight, EPS, torch.bfloat16), x, weight)
    assert_rounded_once(got, exactly(in_torch, x, weight))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_gate_in_bfloat16_is_rounded_once(shape: tuple[int, ...]) -> None:
    gate, up = (4 * normal(*shape)).bfloat16(), normal(*shape, seed=1).bfloat16()
    assert_rounded_once(with_gradients(apply_gate, gate, up), exactly(lambda a, b: F.silu(a) * b, gate, up))


@pytest.mark.parametrize(("sequences", "tokens", "heads", "width"), [(2, 37, 3, 10), (1, 300, 8, 64)])
def test_rotary_positions_in_bfloat16_are_rounded_once(sequences: int, tokens: int, heads: int, width: int) -> None:
    x, angles = normal(sequences, tokens, heads, width).bfloat16(), normal(sequences, tokens, width, seed=1)
    got = with_gradients(lambda x: rotate(angles.cos(), angles.sin(), x)[0], x)
    assert_rounded_once(got, exactly(lambda x: turned_in_torch(x, angles.cos().double(), angles.sin().double()), x))


@pytest.mark.parametrize("size", [1e-20, 1e-4, 1e4, 1e15])
def test_a_norm_of_very_small_or_large_numbers_is_that_of_torch(size: float) -> None:
    x, weight = size * normal(9, 80), normal(80, seed=1)
    exact = in_torch(x.double(), weight.double())
    assert float((through_c(x, weight) - exact).norm()) <= 1e-6 * float(exact.norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_gate_and_its_gradients_are_those_of_torch_in_float64(shape: tuple[int, ...]) -> None:
    gate, up = 4 * normal(*shape), normal(*shape, seed=1)
    exact = with_gradients(lambda a, b: F.silu(a) * b, gate.double(), up.double())
    assert_close(with_gradients(apply_gate, gate, up), exact)


def test_every_number_of_a_gate_is_that_of_torch_at_any_size() -> None:
    gate = torch.cat([torch.linspace(-80, 80, 32001), torch.tensor([0.0, -0.0, 1e-30, -200.0, 3e4, -3e4])])
    got = with_gradients(apply_gate, gate, torch.ones_like(gate))
    exact = with_gradients(lambda a, b: F.silu(a) * b, gate.double(), torch.ones_like(gate).double())
    for mine, theirs in zip(got, exact, strict=True):
        assert torch.allclose(mine.double(), theirs, rtol=1e-6, atol=3e-7 * (mine is got[1]) + 1e-33)


@pytest.mark.parametrize(("sequences", "tokens", "heads", "width"), [(1, 1, 1, 2), (2, 37, 3, 10), (1, 300, 8, 64)])
@pytest.mark.parametrize("is_shared", [True, False])
def test_rotary_positions_and_their_gradients_are_those_of_torch(
    sequences: int, tokens: int, heads: int, width: int, is_shared: bool
) -> None:
    x = normal(sequences, tokens, heads, width)
    angles = normal(1 if is_shared else sequences, tokens, width, seed=1).double()  # halves differ, as they may
    exact = with_gradients(lambda x: turned_in_torch(x, angles.cos(), angles.sin()), x.double())
    got = with_gradients(lambda x: rotate(angles.cos().float(), angles.sin().float(), x)[0], x)
    assert_close(got, exact)


def test_inputs_and_gradients_that_are_not_contiguous_are_read_as_they_are() -> None:
    x, other, weight = normal(48, 33).t(), normal(33, 96, seed=1)[:, ::2], normal(48, seed=2)
    for mine, theirs in ((through_c, in_torch), (apply_gate, lambda a, b: F.silu(a) * b)):
        second = weight if mine is through_c else other
        got = with_gradients(lambda a, b: mine(a, b).t(), x, second)  # noqa: B023
        assert_close(got, with_gradients(lambda a, b: theirs(a, b).t(), x.double(), second.double()))  # noqa: B023


@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (0, 1, 3, 2), (1, 2, 0, 3)])
def test_heads_in_any_order_are_turned_as_they_are(axes: tuple[int, ...]) -> None:
    x = normal(4, 4, 4, 4).permute(axes)
    angles = normal(4, 4, 4, seed=1)
    cosines, sines = angles.cos(), angles.sin()
    got = with_gradients(lambda x: rotate(cosines, sines, x)[0].permute(axes), x)
    exact = with_gradients(lambda x: turned_in_torch(x, cosines.double(), sines.double()).permute(axes), x.double())
    assert_close(got, exact)


@pytest.mark.parametrize("width", [100, 256])
def test_the_number_of_threads_changes_no_bit(width: int) -> None:
    x, up, weight = normal(1300, width), normal(1300, width, seed=1), normal(width, seed=2)
    angles = normal(1, 1300, width, seed=3)

    def everything() -> list[Tensor]:
        turned = with_gradients(lambda x: rotate(angles.cos(), angles.sin(), x[None, :, None])[0], x)
        return [*with_gradients(through_c, x, weight), *with_gradients(apply_gate, x, up), *turned]

    first, *others = with_threads(everything)
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(other, first, strict=True))


@pytest.mark.parametrize("width", [7, 48, 100])
def test_a_row_gets_the_same_bits_alone(width: int) -> None:
    x, up, weight = normal(600, width), normal(600, width, seed=1), normal(width, seed=2)
    slopes = normal(600, width, seed=3)

    def rows(chosen: slice) -> list[Tensor]:
        made = []
        for function, inputs in ((through_c, (x[chosen], weight)), (apply_gate, (x[chosen], up[chosen]))):
            inputs = tuple(tensor.detach().requires_grad_() for tensor in inputs)
            out = function(*inputs)
            gradients = torch.autograd.grad(out, inputs, slopes[chosen])
            made += [out, *(gradient for gradient in gradients if gradient.dim() == 2)]
        return made

    together = rows(slice(None))
    for row in (0, 1, 333, 599):
        for alone, all_rows in zip(rows(slice(row, row + 1)), together, strict=True):
            assert torch.equal(alone[0], all_rows[row])


def test_what_is_no_number_stays_in_its_row() -> None:
    x = normal(20, 48)
    x[3, 5] = torch.nan
    for out in (through_c(x, torch.ones(48)), apply_gate(x, torch.ones_like(x))):
        assert out[3].isnan().any()
        assert not out[torch.arange(20) != 3].isnan().any()


def test_a_frozen_weight_gets_no_gradient_and_the_one_of_the_input_stays() -> None:
    x, weight = normal(70, 48).requires_grad_(), normal(48, seed=1)
    through_c(x, weight).sum().backward()
    assert weight.grad is None
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad(through_c(x, weight.requires_grad_()).sum(), x)[0])


def test_a_gradient_of_a_gradient_is_refused() -> None:
    x = normal(3, 16).requires_grad_()
    (first,) = torch.autograd.grad(apply_gate(x, x.detach()).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_the_backward_pass_of_a_gate_keeps_gate_and_up_alone() -> None:
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.data_ptr()), t)[1], lambda t: t):
        gate, up = normal(9, 32).requires_grad_(), normal(9, 32, seed=1).requires_grad_()
        apply_gate(gate, up)
    assert kept == [gate.data_ptr(), up.data_ptr()]
