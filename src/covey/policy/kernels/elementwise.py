"""Norms, gates, rotary positions and the head's softmax in C.

As transformers write them, an RMSNorm is six operations forward and some ten backward, each through memory. The numbers
are torch's but for rounding, and a row's do not depend on the rows beside it. Tensors are float32 or bfloat16; bfloat16
is computed in float32 and rounded once.

Shapes: B sequences, T tokens, H heads, D head width; N rows, C their width; L loss tokens, V vocabulary.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.policy.kernels.compiler import KERNELS, library, struct_of

SOURCE, HEAD = KERNELS / "elementwise.c", KERNELS / "head.c"
BLOCK = 64
"""Rows whose share of a weight's gradient is one sum."""
Norm = struct_of(SOURCE, "Norm")
Gate = struct_of(SOURCE, "Gate")
Rotate = struct_of(SOURCE, "Rotate")
Softmax = struct_of(HEAD, "Softmax")


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None, weight_C: Tensor, eps: float, dtype: torch.dtype) -> Any:
        x, wide_C = x.contiguous(), weight_C.detach().float()
        out, scales_N = x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)
        call = _norm_of(x, wide_C, out)
        call.scales, call.out, call.eps = scales_N.data_ptr(), out.data_ptr(), eps
        if delta is not None:
            delta, x = delta.contiguous(), torch.empty_like(x)
            call.delta, call.sum, call.half_delta = delta.data_ptr(), x.data_ptr(), delta.dtype == torch.bfloat16
        library(SOURCE).covey_norm_forward(ctypes.byref(call))
        ctx.save_for_backward(x, weight_C, scales_N)
        ctx.delta_type = x.dtype if delta is None else delta.dtype
        return out if delta is None else (x, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_C, scales_N = ctx.saved_tensors
        *of_sum, gradient = (given.contiguous() for given in gradients)
        of_x, wide_C, of_weight_C = torch.empty_like(x), weight_C.float(), None
        of_delta = of_x if ctx.delta_type == x.dtype else torch.empty_like(x, dtype=ctx.delta_type)
        call = _norm_of(x, wide_C, gradient)
        call.scales, call.gradient, call.of_x = scales_N.data_ptr(), gradient.data_ptr(), of_x.data_ptr()
        call.of_sum = of_sum[0].data_ptr() if of_sum else None
        call.of_delta = None if of_delta.dtype == x.dtype else of_delta.data_ptr()
        if ctx.needs_input_grad[2]:
            of_weight_C = torch.empty_like(wide_C)
            sums = wide_C.new_empty(-(-scales_N.numel() // BLOCK), x.shape[-1])
            call.sums, call.of_weight = sums.data_ptr(), of_weight_C.data_ptr()
        library(SOURCE).covey_norm_backward(ctypes.byref(call))
        of_weight_C = None if of_weight_C is None else of_weight_C.to(weight_C.dtype)
        return of_x, of_delta if of_sum else None, of_weight_C, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return gate_forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return gate_backward(gate, up, gradient.contiguous())


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cosines_BTD: Tensor, sines_BTD: Tensor, *heads: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cosines_BTD, sines_BTD)
        return _call_rotate(cosines_BTD, sines_BTD, heads, is_backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cosines_BTD, sines_BTD = ctx.saved_tensors
        return None, None, *_call_rotate(cosines_BTD, sines_BTD, gradients, is_backward=True)


def rms_norm(x: Tensor, weight_C: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Compute x / sqrt(mean(x²) + eps) * weight (RMSNorm, arXiv 1910.07467)."""
    return _AddNorm.apply(x, None, weight_C, eps, dtype or x.dtype)


def add_norm(x: Tensor, delta: Tensor, weight_C: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _AddNorm.apply(x, delta, weight_C, eps, dtype)


def gate_forward(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up of contiguous tensors, without gradient."""
    out = torch.empty_like(gate)
    call = _gate_of(gate, up)
    call.out = out.data_ptr()
    library(SOURCE).covey_gate_forward(ctypes.byref(call))
    return out


def gate_backward(gate: Tensor, up: Tensor, gradient: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the gradients of both; `out` takes silu(gate) * up."""
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    call = _gate_of(gate, up)
    call.gradient, call.of_gate, call.of_up = gradient.data_ptr(), of_gate.data_ptr(), of_up.data_ptr()
    call.out = None if out is None else out.data_ptr()
    library(SOURCE).covey_gate_backward(ctypes.byref(call))
    return of_gate, of_up


def apply_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up (SwiGLU, arXiv 2002.05202)."""
    return _Gated.apply(gate, up)


def rotate(cosines_BTD: Tensor, sines_BTD: Tensor, *heads: Tensor) -> tuple[Tensor, ...]:
    """Rotate the halves of heads by their positions (RoPE, arXiv 2104.09864)."""
    assert all(cosines_BTD.shape[-1] == x_BTHD.shape[-1] for x_BTHD in heads), "the family turns whole heads"
    angles = (angle.expand(len(heads[0]), -1, -1).float().contiguous() for angle in (cosines_BTD, sines_BTD))
    turned: tuple[Tensor, ...] = _Rotated.apply(*angles, *heads)
    return turned


def _call_rotate(
    cosines_BTD: Tensor, sines_BTD: Tensor, heads: Sequence[Tensor], *, is_backward: bool
) -> tuple[Tensor, ...]:
    heads = [x_BTHD if x_BTHD.stride(3) == 1 else x_BTHD.contiguous() for x_BTHD in heads]
    outs, calls = tuple(x_BTHD.new_empty(x_BTHD.shape) for x_BTHD in heads), (Rotate * len(heads))()
    for call, x_BTHD, out_BTHD in zip(calls, heads, outs, strict=True):
        call.x, call.cosines, call.sines = x_BTHD.data_ptr(), cosines_BTD.data_ptr(), sines_BTD.data_ptr()
        call.sequences, call.tokens, call.heads, call.width = x_BTHD.shape
        call.strides, call.num_threads, call.is_backward = x_BTHD.stride()[:3], torch.get_num_threads(), is_backward
        call.half, call.out = x_BTHD.dtype == torch.bfloat16, out_BTHD.data_ptr()
    library(SOURCE).covey_rotate_heads(calls, ctypes.c_int64(len(calls)))
    return outs


def _norm_of(x: Tensor, weight_C: Tensor, out: Tensor) -> ctypes.Structure:
    width, num_threads = x.shape[-1], torch.get_num_threads()
    call = Norm(x.data_ptr(), weight_C.data_ptr(), block=BLOCK, num_threads=num_threads)
    call.rows, call.width = x.numel() // width, width
    call.half_x, call.half_out = x.dtype == torch.bfloat16, out.dtype == torch.bfloat16
    return call


def _gate_of(gate: Tensor, up: Tensor) -> ctypes.Structure:
    half, num_threads = gate.dtype == torch.bfloat16, torch.get_num_threads()
    return Gate(gate.data_ptr(), up.data_ptr(), count=gate.numel(), num_threads=num_threads, half=half)


def compiled_scores(logits_LV: Tensor, target_L: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs of the targets, entropies, and the log-softmax's offset.

    Logits are float32 or bfloat16.
    """
    found = torch.empty(3, len(logits_LV), dtype=torch.float32)
    call = _softmax_of(logits_LV, target_L, temperature)
    call.logprob, call.entropy, call.logsum = (values_L.data_ptr() for values_L in found)
    library(HEAD).covey_head_scores(ctypes.byref(call))
    return found[0], found[1], found[2]


def compiled_gradient_(
    logits_LV: Tensor,
    target_L: Tensor,
    coefficient_L: Tensor,
    of_entropy_L: Tensor | None,
    scores: tuple[Tensor, Tensor],
    temperature: float,
) -> None:
    """Overwrite logits by their gradient.

    `scores` are the log-softmax's offset and the entropies.
    """
    coefficient_L = coefficient_L.float().contiguous()
    of_entropy_L = None if of_entropy_L is None else of_entropy_L.float().contiguous()
    call = _softmax_of(logits_LV, target_L, temperature)
    call.out, call.coefficient = logits_LV.data_ptr(), coefficient_L.data_ptr()
    call.of_entropy = None if of_entropy_L is None else of_entropy_L.data_ptr()
    call.logsum, call.entropy = (values_L.data_ptr() for values_L in scores)
    library(HEAD).covey_head_gradient(ctypes.byref(call))


def _softmax_of(logits_LV: Tensor, target_L: Tensor, temperature: float) -> ctypes.Structure:
    assert all(tensor.is_contiguous() for tensor in (logits_LV, target_L)), "rows lie one after the other"
    call = Softmax(logits_LV.data_ptr(), target=target_L.data_ptr(), temperature=temperature)
    call.rows, call.width = logits_LV.shape
    call.num_threads, call.half = torch.get_num_threads(), logits_LV.dtype == torch.bfloat16
    return call
