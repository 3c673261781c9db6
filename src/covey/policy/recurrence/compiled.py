"""Compute recurrence and convolution in C on a CPU, with gradients.

Each number follows from its tree of segments: it does not depend on threads or on what else is in the stream. A
bfloat16 is computed in float32 and rounded once.

Shapes: those of base.py; W' is W - 1, J blocks of tokens.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from covey.policy.kernels.compiler import library, struct_of
from covey.policy.kernels.support import LANES, SUPPORT
from covey.policy.recurrence.base import Holders, Recurrence

SCAN, SCAN_GRADIENT, CONV = SUPPORT["recurrence"].sources
SEGMENT_NUMBERS = 8
"""Numbers in a Segment of scan.h."""
BLOCK = 32
"""Tokens whose share of a weight's gradient is one sum, as in conv.c."""

MANY_TASKS = 32
"""Backward tasks of a tree into which heads that share keys are cut."""
TokenRows = struct_of(SCAN.with_suffix(".h"), "Heads")
"""A tensor with its strides by token and head."""
Scan = struct_of(SCAN.with_suffix(".h"), "Scan", Heads=TokenRows)
Conv = struct_of(CONV, "Conv")


class _GatedScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_S3: Tensor, holders: Holders | None, *given: Tensor | None) -> Tensor:
        inputs = [None if each is None else _dense(each) for each in given]
        value_THP = inputs[2]
        assert value_THP is not None
        out = torch.empty(value_THP.shape, dtype=torch.float32)
        call = _scan_of(inputs, rows_S3)
        call.out = out.data_ptr()
        lent, room = _lend(call, holders), _room(call, rows_S3)
        library(SCAN).covey_scan(ctypes.byref(call))
        del lent, room
        ctx.save_for_backward(rows_S3, *inputs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows_S3, *inputs = ctx.saved_tensors
        _, key, value, decay, beta = inputs
        call = _scan_of(inputs, rows_S3)
        out_gradient = _dense(out_gradient)
        call.out_gradient = _describe(out_gradient)
        shared, most = call.shared, max(1, MANY_TASKS // key.shape[1])
        call.slices = max(slices for slices in range(1, shared + 1) if shared % slices == 0 and slices <= most)
        of_query, of_key = torch.empty(2, call.slices, *key.shape, dtype=torch.float32)
        of_value, of_decay = (torch.empty(each.shape, dtype=torch.float32) for each in (value, decay))
        of_beta = None if beta is None else torch.empty(beta.shape, dtype=torch.float32)
        call.of_query, call.of_key, call.of_value = of_query.data_ptr(), of_key.data_ptr(), of_value.data_ptr()
        call.of_decay, call.of_beta = of_decay.data_ptr(), None if of_beta is None else of_beta.data_ptr()
        call.is_backward = True
        room = _room(call, rows_S3)
        library(SCAN_GRADIENT).covey_scan_backward(ctypes.byref(call))
        del room
        found = (of_query[0], of_key[0], of_value, of_decay)
        gradients = [of.to(each.dtype) for of, each in zip(found, inputs[:4], strict=True)]
        return None, None, *gradients, None if of_beta is None else of_beta.to(beta.dtype)


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_CW: Tensor,
        bias_C: Tensor | None,
        rows_S3: Tensor,
        holders: Holders | None,
        silu: bool,
    ) -> Tensor:
        x, rows_S3 = _dense(x), rows_S3.contiguous()
        out = x.new_empty(x.shape)
        call = _conv_of(x, weight_CW, bias_C, rows_S3, silu)
        call.out = out.data_ptr()
        lent = _lend(call, holders)
        call.half_held = holders is not None and holders.state_MHNP.dtype == torch.bfloat16
        library(CONV).covey_conv_plan(ctypes.byref(call))
        library(CONV).covey_conv(ctypes.byref(call))
        del lent
        ctx.save_for_backward(x, weight_CW, bias_C, rows_S3)
        ctx.silu = silu
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_CW, bias_C, rows_S3 = ctx.saved_tensors
        call = _conv_of(x, weight_CW, bias_C, rows_S3, ctx.silu)
        ends, readers = (torch.empty(size, dtype=torch.int64) for size in (len(x) + 1, len(x) * call.width))
        out_gradient, of_x = out_gradient.contiguous(), x.new_empty(x.shape)
        inner = torch.empty(x.shape, dtype=torch.float32)
        of_weight = torch.empty(call.width + 1, x.shape[1], dtype=torch.float32)
        sums = of_weight.new_empty(-(-len(x) // BLOCK), *of_weight.shape)
        call.ends, call.readers, call.out_gradient = ends.data_ptr(), readers.data_ptr(), out_gradient.data_ptr()
        call.of_x, call.inner, call.sums = of_x.data_ptr(), inner.data_ptr(), sums.data_ptr()
        call.of_weight = of_weight.data_ptr()
        library(CONV).covey_conv_plan(ctypes.byref(call))
        library(CONV).covey_conv_backward(ctypes.byref(call))
        of_bias = None if bias_C is None else of_weight[-1].to(bias_C.dtype)
        return of_x, of_weight[:-1].T.to(weight_CW.dtype), of_bias, None, None, None


def gated_scan(given: Recurrence, rows_S3: Tensor, holders: Holders | None = None) -> Tensor:
    """Return the recurrence over a forest of segments: (T, H, P), float32.

    The segments cover the stream. All holders are read before one is written, each by one segment at most; a pass with
    holders has no gradient.
    """
    width, padding = given.value_THP.shape[2], -given.value_THP.shape[2] % LANES
    value_THP = functional.pad(given.value_THP, (0, padding)) if padding else given.value_THP
    inputs = (given.query_TKN, given.key_TKN, value_THP, given.decay_THX, given.beta_TH)
    assert (
        holders is None
        or not torch.is_grad_enabled()
        or not any(each is not None and each.requires_grad for each in inputs)
    )
    rows_S3 = rows_S3.contiguous()
    assert int(rows_S3[:, 1].sum()) == len(value_THP), "segments cover the stream"
    own = _with_padding(holders, padding)
    out: Tensor = _GatedScan.apply(rows_S3, own, *inputs)
    if holders is not None and own is not None and own is not holders:
        holders.state_MHNP.copy_(own.state_MHNP[..., :width])
    return out[..., :width] if padding else out


def causal_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    rows_S3: Tensor,
    holders: Holders | None = None,
    silu: bool = False,
) -> Tensor:
    """Convolve channels causally over a forest of segments: (T, C).

    Holders keep the last W - 1 inputs, (M, W - 1, C). The result has the type of x.
    """
    assert int(rows_S3[:, 1].sum()) == len(x_TC), "segments cover the stream"
    assert holders is None or holders.state_MHNP.dtype in SUPPORT["layers"].dtypes
    assert holders is None or holders.state_MHNP.is_contiguous()
    dtype = x_TC.dtype
    out: Tensor = _CausalConv.apply(x_TC, weight_CW, bias_C, rows_S3, holders, silu)
    return out.to(dtype)


def _with_padding(holders: Holders | None, padding: int) -> Holders | None:
    if holders is None:
        return None
    state = holders.state_MHNP
    if not padding and state.dtype == torch.float32 and state.is_contiguous():
        return holders
    return Holders(functional.pad(state.float(), (0, padding)).contiguous(), holders.read_S, holders.write_S)


def _lend(call: ctypes.Structure, holders: Holders | None) -> tuple[Tensor, ...]:
    """Give a call its holders; return the memory that it reads."""
    if holders is None:
        return ()
    kept, pairs = holders.state_MHNP, list(zip(holders.read_S.tolist(), holders.write_S.tolist(), strict=True))
    written = {write for _, write in pairs if write >= 0}
    is_read_by_others = any(read in written and write != read for read, write in pairs)
    held = kept.clone() if is_read_by_others else kept
    read_S, write_S = (places.to(torch.int64).contiguous() for places in (holders.read_S, holders.write_S))
    call.held, call.kept, call.read, call.write = (each.data_ptr() for each in (held, kept, read_S, write_S))
    return held, read_S, write_S


def _room(call: ctypes.Structure, rows_S3: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Plan a call; its memory lives as long as the result."""
    segments = torch.empty(len(rows_S3), SEGMENT_NUMBERS, dtype=torch.int64)
    roots = torch.empty(len(rows_S3), dtype=torch.int64)
    call.segments, call.roots, call.num_segments = segments.data_ptr(), roots.data_ptr(), len(rows_S3)
    plan = library(SCAN).covey_scan_plan
    plan.restype = ctypes.c_int64
    call.room_size = plan(ctypes.byref(call))
    room = torch.empty(call.num_threads, call.room_size, dtype=torch.float32)
    call.room = room.data_ptr()
    return segments, roots, room


def _scan_of(inputs: list[Tensor | None], rows_S3: Tensor) -> ctypes.Structure:
    call = Scan(*(_describe(each) for each in inputs), rows=rows_S3.data_ptr())
    _, key, value, decay, _ = inputs
    assert key is not None
    assert value is not None
    assert decay is not None
    call.num_tokens, call.num_heads, call.value_width = value.shape
    call.key_width, call.decay_width, call.shared = key.shape[2], decay.shape[2], value.shape[1] // key.shape[1]
    call.num_threads, call.slices = torch.get_num_threads(), 1
    return call


def _conv_of(x: Tensor, weight_CW: Tensor, bias_C: Tensor | None, rows_S3: Tensor, has_silu: bool) -> ctypes.Structure:
    weight_WC = weight_CW.detach().float().T.contiguous()
    wide_C = None if bias_C is None else bias_C.detach().float().contiguous()
    sources = torch.empty(len(x), len(weight_WC), dtype=torch.int64)
    call = Conv(x.data_ptr(), weight_WC.data_ptr(), None if wide_C is None else wide_C.data_ptr(), has_silu=has_silu)
    call.alive = weight_WC, wide_C, sources
    call.rows, call.num_segments, call.sources = rows_S3.data_ptr(), len(rows_S3), sources.data_ptr()
    call.num_tokens, call.channels, call.width = len(x), x.shape[1], len(weight_WC)
    call.stride, call.half, call.num_threads = x.stride(0), x.dtype == torch.bfloat16, torch.get_num_threads()
    return call


def _dense(tensor: Tensor) -> Tensor:
    """Return a tensor of a computed type, its last numbers adjacent."""
    tensor = tensor if tensor.dtype == torch.bfloat16 else tensor.float()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _describe(tensor: Tensor | None) -> ctypes.Structure:
    if tensor is None:
        return TokenRows()
    return TokenRows(tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.dtype == torch.bfloat16)
