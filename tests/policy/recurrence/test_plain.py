"""The recurrence and the convolution in torch: gradients by differences, and what is kept for them."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.policy.recurrence import plain
from covey.policy.recurrence.base import Recurrence
from covey.policy.recurrence.plain import causal_conv, gated_scan

from .forests import Kind, drawn, farthest, forest, scan_by_tokens, tensors, with_tensors

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


@pytest.mark.parametrize(("by_channel", "has_beta"), plain.FUSED)
def test_other_kernels_get_heads_behind_tokens_and_states_as_they_are(
    monkeypatch: pytest.MonkeyPatch, by_channel: bool, has_beta: bool
) -> None:
    """Fakes with the arguments of flash-linear-attention 0.6.0; there is no GPU here to run its own on."""

    def fake(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None, **given: Any) -> Any:
        assert given.pop("scale") == 1.0
        assert given.pop("output_final_state")
        before = given.pop("initial_state")
        assert not given
        assert {each.dtype for each in (q, k, v)} == {torch.bfloat16}
        assert {each.dtype for each in (g, before)} == {torch.float32}
        assert g.shape == (k.shape if by_channel else k.shape[:3])
        rows = torch.tensor([(0, q.shape[1], -1)])
        beta = [None] * len(q) if beta is None else beta
        found = [
            scan_by_tokens(
                Recurrence(*(each[row] for each in (q, k, v)), g[row].view(*g.shape[1:3], -1), beta[row]),
                rows,
                [before[row]],
            )
            for row in range(len(q))
        ]
        return torch.stack([out for out, _ in found]).bfloat16(), torch.cat([final for _, final in found]).float()

    module, name = plain.FUSED[by_channel, has_beta]
    fakes = ModuleType(f"fla.ops.{module}")
    setattr(fakes, name, fake)
    for each in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, each, ModuleType(each))
    monkeypatch.setitem(sys.modules, fakes.__name__, fakes)
    kind = Kind(key_heads=3, by_channel=by_channel, has_beta=has_beta)
    given = drawn(kind, 40, dtype=torch.bfloat16)
    inputs = plain._rectangle(given, torch.arange(40).view(2, 20), torch.arange(20) < torch.tensor([[20], [7]]))
    state = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    found, expected = plain._scan_by_fla(inputs, state, torch.bfloat16), plain._scan(inputs, state, torch.bfloat16)
    assert farthest(found[:1], [expected[0].double()]) < 4e-3
    assert farthest(found[1:], [expected[1].double()]) < 1e-6
