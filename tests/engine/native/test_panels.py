"""Products in C: the right numbers, a row's bits its own, and the weights as they are when they are taken."""

import pytest
import torch
from torch import Tensor

from covey.engine.native.panels import Adapter, CompiledLinear, PackedWeights, Weights, multiply

from ...support.builders import normal

DTYPES = [torch.float32, torch.bfloat16, torch.int8]
SHAPES = [(1, 16, 32), (7, 48, 33), (8, 64, 31), (64, 32, 1), (65, 128, 344), (200, 96, 100)]
"""Rows, inputs, outputs: beside and beyond blocks of 8 and 32 rows, tiles of 32 inputs, and batches of 64 rows."""

pytestmark = pytest.mark.usefixtures("own_threads")


def rounded(values: Tensor, dtype: torch.dtype, span: int | None = None) -> Tensor:
    """What enters a product, in float64; in int8 each `span` numbers of a row have a scale, or all."""
    if dtype != torch.int8:
        return values.to(dtype).double()
    pieces = []
    for piece in values.split(span or values.shape[1], 1):
        scale = piece.abs().amax(1, keepdim=True) / 127
        pieces.append((piece * (1 / scale)).round().double() * scale.double())
    return torch.cat(pieces, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_numbers_are_those_of_the_product(shape: tuple[int, int, int], has_bias: bool, dtype: torch.dtype) -> None:
    rows, inner, outer = shape
    x, weight, bias = normal(rows, inner), normal(outer, inner, seed=1), normal(outer, seed=2)
    expected = rounded(x, dtype, 32) @ rounded(weight, dtype).T + (bias.double() if has_bias else 0.0)
    found = CompiledLinear(Weights.of(weight, bias if has_bias else None), dtype)(x)
    assert found.shape == (rows, outer)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 2e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [0, 5])
def test_a_row_gets_the_same_bits_alone_and_with_any_number_of_threads(rank: int, dtype: torch.dtype) -> None:
    adapter = Adapter(normal(rank, 96, seed=3), normal(100, rank, seed=4), 0.5) if rank else None
    x, layer = normal(77, 96), CompiledLinear(Weights.of(normal(100, 96, seed=1), normal(100, seed=2), adapter), dtype)
    outputs = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        outputs.append(layer(x))
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    assert all(torch.equal(layer(x[row : row + 1])[0], outputs[0][row]) for row in range(77))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weight_is_the_one_that_was_taken_last(dtype: torch.dtype) -> None:
    first, second, x = normal(40, 32), normal(40, 32, seed=1), normal(5, 32, seed=2)
    bias = normal(40, seed=3)
    layer = CompiledLinear(Weights.of(first, bias), dtype)
    layer.take(Weights.of(second, 2 * bias))
    assert torch.equal(layer(x), CompiledLinear(Weights.of(second, 2 * bias), dtype)(x))
    assert not torch.equal(layer(x), CompiledLinear(Weights.of(first, bias), dtype)(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_whose_outputs_are_added_are_one_product(dtype: torch.dtype) -> None:
    x, widths = normal(9, 80), (32, 48)
    parts = [
        Weights.of(normal(40, width, seed=width), normal(40, seed=width + 1), adapter)
        for width, adapter in zip(
            widths, (None, Adapter(normal(3, 48, seed=6), normal(40, 3, seed=7), 0.5)), strict=True
        )
    ]
    alone = [CompiledLinear(part, dtype)(own) for part, own in zip(parts, x.split(widths, 1), strict=True)]
    assert torch.allclose(
        CompiledLinear(Weights.sum_of(parts), dtype)(x),
        sum(alone),
        atol={torch.float32: 2e-5, torch.bfloat16: 0.05, torch.int8: 0.2}[dtype],
    )


def test_a_weight_with_the_stamp_of_the_last_one_is_not_laid_out_again() -> None:
    made: list[str] = []

    def weights(name: str, stamp: tuple[int, ...] | None) -> Weights:
        def make() -> Tensor:
            made.append(name)
            return normal(40, 32)

        return Weights((40, 32), make, stamp, None, None)

    layer = CompiledLinear(weights("first", (1,)), torch.float32)
    for name, stamp in (("same", (1,)), ("changed", (2,)), ("trained", None), ("trained again", None)):
        layer.take(weights(name, stamp))
    assert made == ["first", "changed", "trained", "trained again"]


PARTS = [
    ((32, 4), (64, 3), (32, 8)),
    ((33, 1), (20, 0), (100, 7)),
    ((100, 40), (8, 2)),
    ((31, 3),),
    ((64, 64), (64, 64)),
]
"""Outputs and ranks of layers that are one product: beside panels of 32, of one number, of none, beyond a panel."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("rows", [1, 9, 70])
def test_adapters_beside_the_weights_of_layers_that_are_one_product(
    rows: int, parts: tuple[tuple[int, int], ...], dtype: torch.dtype
) -> None:
    x, weights, expected = normal(rows, 48), [], []
    for seed, (outer, rank) in enumerate(parts):
        weight, down, up = (
            normal(*shape, seed=10 * seed + 1) / 7 for shape in ((outer, 48), (rank, 48), (outer, rank))
        )
        adapter = Adapter(down, up, 1.3 - seed) if rank else None
        weights.append(Weights.of(weight, normal(outer, seed=seed) if seed == 1 else None, adapter))
        # What enters either product is rounded
        beside = torch.float32 if dtype == torch.int8 else dtype
        narrow = rounded((rounded(x, beside) @ rounded(down, beside).T).float(), beside)
        out = rounded(x, dtype, 32) @ rounded(weight, dtype).T + (1.3 - seed) * narrow @ rounded(up, beside).T
        expected.append(out + (normal(outer, seed=seed).double() if seed == 1 else 0.0))
    joined = PackedWeights(weights, dtype)
    joined.take(weights)
    found = multiply(joined, x, dtype)
    # A sum on the edge of two roundings may fall to either side
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-5
    assert (found - torch.cat(expected, dim=1)).abs().max() < tolerance
    assert (found - torch.cat(expected, dim=1)).abs().mean() < tolerance / 100


def test_dimensions_around_the_rows_keep_their_shape() -> None:
    layer = CompiledLinear(Weights.of(normal(6, 16)), torch.float32)
    x = normal(3, 5, 16, seed=1)
    assert layer(x).shape == (3, 5, 6)
    assert torch.equal(layer(x)[2, 4], layer(x[2, 4]))
    assert torch.equal(layer(x.transpose(0, 1)), layer(x).transpose(0, 1))


def test_a_trained_weight_is_freed_until_it_is_taken_again() -> None:
    weight, x = normal(40, 32), normal(5, 32, seed=2)
    trains = CompiledLinear(Weights.of(weight), torch.float32)
    frozen = CompiledLinear(Weights((40, 32), lambda: weight, (1,), None, None), torch.float32)
    expected = trains(x)
    for layer in (trains, frozen):
        layer.release()
    assert not trains.packed.product.panels
    assert torch.equal(frozen(x), expected)
    with pytest.raises(AssertionError, match="taken before a pass"):
        trains(x)
    trains.take(Weights.of(weight))
    assert torch.equal(trains(x), expected)
