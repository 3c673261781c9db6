"""A residual sum with its norm in one pass on a GPU.

As transformers write a layer under autocast, the sum, the norm and the cast each read and write the stream, which is
float32 where weights are trained.

Shapes: N tokens, C hidden width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.policy.kernels.gpu.inductor import compile_once


def add_norm(
    hidden_NC: Tensor, delta_NC: Tensor | None, weight_C: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the residual sum and its RMSNorm (arXiv 1910.07467) in `dtype`.

    As in transformers: in float32, rounded to the stream's type before the weight.
    """
    return _AddNorm.apply(hidden_NC, delta_NC, weight_C, eps, dtype)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NC: Tensor, delta_NC: Tensor | None, weight_C: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        if delta_NC is None:
            normed_NC, scale_N = compile_once(norm)(hidden_NC, weight_C, eps, dtype)
            sum_NC = hidden_NC.view_as(hidden_NC)
        else:
            sum_NC, normed_NC, scale_N = compile_once(sum_and_norm)(hidden_NC, delta_NC, weight_C, eps, dtype)
        ctx.save_for_backward(sum_NC, scale_N, weight_C)
        ctx.of_delta = None if delta_NC is None else delta_NC.dtype
        return sum_NC, normed_NC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_sum_NC, of_normed_NC = gradients
        sum_NC, scale_N, weight_C = ctx.saved_tensors
        of_normed_NC = of_normed_NC.contiguous()
        given = of_sum_NC, of_normed_NC, sum_NC, scale_N, weight_C, ctx.of_delta
        of_hidden_NC, of_delta_NC = compile_once(norm_gradient)(*given)
        of_weight_C = compile_once(weight_gradient)(*given[1:4], weight_C.dtype) if ctx.needs_input_grad[2] else None
        return of_hidden_NC, of_delta_NC, of_weight_C, None, None


def norm(hidden_NC: Tensor, weight_C: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the norm over the last dimension, and its scale per row."""
    wide_NC = hidden_NC.float()
    scale_N = torch.rsqrt((wide_NC * wide_NC).mean(dim=-1) + eps)
    return ((wide_NC * scale_N[..., None]).to(hidden_NC.dtype) * weight_C).to(dtype), scale_N


def sum_and_norm(
    hidden_NC: Tensor, delta_NC: Tensor, weight_C: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    sum_NC = hidden_NC + delta_NC
    return sum_NC, *norm(sum_NC, weight_C, eps, dtype)


def norm_gradient(
    of_sum_NC: Tensor,
    of_normed_NC: Tensor,
    sum_NC: Tensor,
    scale_N: Tensor,
    weight_C: Tensor,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the stream's gradient, in its type and the addend's."""
    unit_NC = sum_NC.float() * scale_N[:, None]
    of_unit_NC = of_normed_NC.float() * weight_C.float()
    through_NC = of_unit_NC - unit_NC * (of_unit_NC * unit_NC).mean(dim=-1, keepdim=True)
    of_hidden_NC = (of_sum_NC.float() + through_NC * scale_N[:, None]).to(sum_NC.dtype)
    return of_hidden_NC, None if dtype is None else of_hidden_NC.to(dtype)


def weight_gradient(of_normed_NC: Tensor, sum_NC: Tensor, scale_N: Tensor, dtype: torch.dtype) -> Tensor:
    return (of_normed_NC.float() * (sum_NC.float() * scale_N[:, None])).sum(dim=0).to(dtype)
