"""Sums with their norms: the numbers and gradients of plain operations, compiled once for each width and type."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

from covey.policy.kernels.gpu import inductor, residual

COUNTS: dict[str, CompileCounter] = {}
"""By function."""
HALF = torch.bfloat16
TYPES = (torch.float32, HALF), (HALF, HALF), (torch.float32, torch.float32)
"""Of the residual stream, and of what enters products."""


@pytest.fixture(autouse=True)
def _traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace what is compiled, run it as it is, and count the compilations."""
    compile_ = torch.compile
    COUNTS.clear()
    torch._dynamo.reset()

    def counted(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        return compile_(function, backend=COUNTS.setdefault(function.__name__, CompileCounter()), **how)

    monkeypatch.setattr(torch, "compile", counted)
    inductor.compile_once.cache_clear()
    yield
    inductor.compile_once.cache_clear()


def plain(hidden: Tensor, delta: Tensor | None, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    total = hidden if delta is None else hidden + delta
    return total, (F.rms_norm(total, weight.shape, eps=1e-6) * weight).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("is_summed", [False, True])
def test_sum_norm_and_gradients_are_those_of_plain_operations(is_summed: bool, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, added, of_sum, of_normed = (torch.randn(9, 16, generator=draw) for _ in range(4))
    weight = nn.Parameter(torch.rand(16, generator=draw))
    leaves = [hidden.requires_grad_(), *([added.to(dtype).requires_grad_()] if is_summed else []), weight]
    delta = leaves[1] if is_summed else None
    found = residual.add_norm(hidden, delta, weight, 1e-6, dtype)
    wanted = plain(hidden, delta, weight, dtype)
    outer = of_sum, of_normed.to(dtype)
    pairs = zip(
        (*found, *torch.autograd.grad(found, leaves, outer)),
        (*wanted, *torch.autograd.grad(wanted, leaves, outer)),
        strict=True,
    )
    for mine, theirs in pairs:
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-5 if mine.dtype == torch.float32 else 0.01, atol=2e-6)


@pytest.mark.long
def test_what_is_compiled_serves_any_number_of_rows_with_and_without_gradients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kinds = [
        (width, kind) for width in (16, 32, 48) for kind in ((torch.float32, HALF), (HALF, HALF), (torch.float32,) * 2)
    ]
    for width, (stream, dtype) in kinds:
        weight = nn.Parameter(torch.rand(width, dtype=stream))
        for num_rows in (1, 2, 16, 32, 48, 7):  # as many as the width too, which is no number of rows
            for has_gradient in (True, False):
                hidden = torch.randn(num_rows, width, dtype=stream, requires_grad=has_gradient)
                delta = torch.randn(num_rows, width, dtype=dtype)
                with torch.set_grad_enabled(has_gradient):
                    total, normed = residual.add_norm(hidden, delta, weight, 1e-6, dtype)
                if has_gradient:
                    (total.float().sum() + normed.float().sum()).backward()
    # One row or any number of rows, in one width or in any
    functions = "sum_and_norm", "norm_gradient", "weight_gradient"
    assert {name: count.frame_count for name, count in COUNTS.items()} == dict.fromkeys(functions, 4 * len(TYPES))
    assert not [record for record in caplog.records if record.name == inductor.__name__]


def test_beyond_as_many_kinds_as_torch_compiles_a_function_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(inductor, "KINDS", 0)
    with caplog.at_level(logging.WARNING), torch._dynamo.config.patch(recompile_limit=2):
        hidden, weight = torch.randn(3, 8), nn.Parameter(torch.ones(8))
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            with torch.no_grad():
                found = residual.add_norm(hidden, None, weight, 1e-6, dtype)
            torch.testing.assert_close(found, plain(hidden, None, weight, dtype))
    said = [record.getMessage() for record in caplog.records if record.name == inductor.__name__]
    assert [line.split(",")[0] for line in said] == ["norm runs uncompiled"]
