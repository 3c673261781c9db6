"""Products in C: the right numbers, a row's bits its own, and the weights as they are when they are taken."""

import pytest
import torch
from torch import Tensor

from covey.engine.native.panels import CompiledLinear, has_half

from ...support.builders import normal

HALVES = [False, pytest.param(True, marks=pytest.mark.skipif(not has_half(), reason="no products in bfloat16 here"))]
SHAPES = [(1, 16, 32), (7, 48, 33), (8, 64, 31), (64, 32, 1), (65, 128, 344), (200, 96, 100)]
"""Rows, inputs, outputs: beside and beyond tiles of 8 x 32 and batches of 64 rows."""

pytestmark = pytest.mark.usefixtures("own_threads")


def rounded(values: Tensor, half: bool) -> Tensor:
    """What enters a product, in float64."""
    return (values.bfloat16() if half else values).double()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_numbers_are_those_of_the_product(shape: tuple[int, int, int], has_bias: bool, half: bool) -> None:
    rows, inner, outer = shape
    x, weight, bias = normal(rows, inner), normal(outer, inner, seed=1), normal(outer, seed=2)
    expected = rounded(x, half) @ rounded(weight, half).T + (bias.double() if has_bias else 0.0)
    found = CompiledLinear(weight, bias if has_bias else None, half)(x)
    assert found.shape == (rows, outer)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 2e-5


@pytest.mark.parametrize("half", HALVES)
def test_a_row_gets_the_same_bits_alone_and_with_any_number_of_threads(half: bool) -> None:
    x, layer = normal(77, 96), CompiledLinear(normal(100, 96, seed=1), normal(100, seed=2), half)
    outputs = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        outputs.append(layer(x))
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    assert all(torch.equal(layer(x[row : row + 1])[0], outputs[0][row]) for row in range(77))


@pytest.mark.parametrize("half", HALVES)
def test_the_weight_is_the_one_that_was_taken_last(half: bool) -> None:
    first, second, x = normal(40, 32), normal(40, 32, seed=1), normal(5, 32, seed=2)
    bias = normal(40, seed=3)
    layer = CompiledLinear(first, bias, half)
    layer.take(second, 2 * bias)
    assert torch.equal(layer(x), CompiledLinear(second, 2 * bias, half)(x))
    assert not torch.equal(layer(x), CompiledLinear(first, bias, half)(x))


def test_whatever_lies_around_the_rows_keeps_its_shape() -> None:
    layer = CompiledLinear(normal(6, 16), None, half=False)
    x = normal(3, 5, 16, seed=1)
    assert layer(x).shape == (3, 5, 6)
    assert torch.equal(layer(x)[2, 4], layer(x[2, 4]))
    assert torch.equal(layer(x.transpose(0, 1)), layer(x).transpose(0, 1))
