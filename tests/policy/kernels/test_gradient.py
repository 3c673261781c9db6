"""The gradient of a weight in C: the right numbers in every shape, with the same bits for any number of threads."""

import pytest
import torch

from covey.policy.kernels.blocks import multiply, weight_gradient
from covey.policy.kernels.layers import use_compiled
from covey.policy.kernels.linear import OneDnnLinear, use_onednn

from ...support.builders import make_policy, normal, relative_error

SHAPES = [
    (1, 1, 1),
    (3, 8, 32),
    (7, 9, 33),
    (600, 16, 64),
    (513, 40, 31),
    (1100, 7, 100),
    (20, 2050, 33),
    (70, 300, 600),
]
"""Tokens, outputs, inputs: beside and beyond tiles, stretches of tokens, and what stays in a cache."""
TYPES = [torch.float32, torch.bfloat16]

pytestmark = pytest.mark.usefixtures("own_threads")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_numbers_are_those_of_the_product(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    tokens, outer, inner = shape
    gradient, x = normal(tokens, outer).to(dtype), normal(tokens, inner, seed=1).to(dtype)
    expected = gradient.double().T @ x.double()
    assert (weight_gradient(gradient, x).shape, weight_gradient(gradient, x).dtype) == ((outer, inner), torch.float32)
    assert (weight_gradient(gradient, x) - expected).abs().max() < 1e-6 * tokens**0.5 * 10


@pytest.mark.parametrize("dtype", TYPES)
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    gradient, x = normal(700, 50).to(dtype), normal(700, 70, seed=1).to(dtype)
    found = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        found.append(weight_gradient(gradient, x))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_tensors_need_not_lie_side_by_side() -> None:
    gradient, x = normal(40, 30), normal(50, 30, seed=1)
    assert torch.equal(weight_gradient(gradient.T, x.T), weight_gradient(gradient.T.contiguous(), x.T.contiguous()))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "depth", "columns"), [(37, 53, 29), (5, 2, 1), (100, 2500, 70), (16, 4999, 2100)])
def test_factors_may_lie_turned_and_sums_be_long(dtype: torch.dtype, rows: int, depth: int, columns: int) -> None:
    first, second = normal(rows, depth).to(dtype), normal(depth, columns, seed=1).to(dtype)
    expected = first.double() @ second.double()
    for a in (first, first.t().contiguous().t()):
        for b in (second, second.t().contiguous().t()):
            assert relative_error(multiply(a, b, dtype=torch.float32), expected) < 1e-6
            assert relative_error(multiply(a, b, torch.ones(rows, columns)), expected + 1) < 1e-6
            rounded = multiply(a, b)
            assert torch.equal(rounded, multiply(a, b, dtype=torch.float32).to(dtype))


def test_a_row_of_a_product_does_not_depend_on_the_rows_beside_it() -> None:
    first, second = normal(50, 1100), normal(1100, 70, seed=1)
    assert torch.equal(multiply(first, second)[17:31], multiply(first[17:31], second))


def test_a_model_takes_it_where_onednn_would_compute() -> None:
    models = [make_policy("llama").model for _ in range(2)]
    for model in models:
        use_onednn(model)
    use_compiled(models[1])
    assert all(module.through_c for module in models[1].modules() if isinstance(module, OneDnnLinear))
    assert not any(module.through_c for module in models[0].modules() if isinstance(module, OneDnnLinear))
    layers = [model.get_submodule("model.layers.0.mlp.down_proj") for model in models]
    x = normal(2, 9, layers[0].in_features)  # type: ignore[arg-type]
    for layer in layers:
        layer(x).square().sum().backward()
    plain, compiled = (layer.weight.grad for layer in layers)
    assert torch.allclose(plain, compiled, rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]
    out = layers[1](x).detach().flatten(0, 1)
    assert torch.equal(compiled, weight_gradient(2 * out, x.flatten(0, 1)))  # type: ignore[arg-type]
