"""The recurrence and the convolution in torch: gradients by differences, and what is kept for them."""

import pytest
import torch
from torch import Tensor

from covey.policy.recurrence.plain import causal_conv, gated_scan

from ...support.recurrences import Kind, drawn, forest, tensors, with_tensors

ROWS_S3 = forest(((3, (2,), (1, (2,))), (1,)))


@pytest.mark.parametrize("kind", [Kind(1, 2, 3, 2, c, b) for c in (False, True) for b in (False, True)], ids=str)
def test_gradients_of_the_recurrence_are_those_of_differences(kind: Kind) -> None:
    given = drawn(kind, 9, dtype=torch.float64)

    def scan(*inputs: Tensor) -> Tensor:
        return gated_scan(with_tensors(given, inputs), ROWS_S3)

    inputs = [tensor.requires_grad_() for tensor in tensors(given)]
    assert torch.autograd.gradcheck(scan, inputs)


@pytest.mark.parametrize("silu", [False, True])
def test_gradients_of_the_convolution_are_those_of_differences(silu: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = ((9, 3), (3, 4), (3,))
    inputs = [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]
    assert torch.autograd.gradcheck(lambda x, weight, bias: causal_conv(x, weight, bias, ROWS_S3, silu=silu), inputs)


@pytest.mark.parametrize("by_channel", [False, True])
def test_segments_that_stand_beside_others_change_by_rounding_only(by_channel: bool) -> None:
    given = drawn(Kind(by_channel=by_channel), 200)
    together = gated_scan(given, forest(((40, (20,), (30,)), (110,))))
    alone = gated_scan(with_tensors(given, [tensor[90:] for tensor in tensors(given)]), forest(((110,),)))
    assert float((together[90:] - alone).abs().max()) < 1e-6
