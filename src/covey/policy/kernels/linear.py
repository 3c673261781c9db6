"""Linear layers on a CPU, through oneDNN and C.

The results are exact float32 products like MKL's, summed in another order; or, of bfloat16 factors, sums in float32.
Shapes: N inputs, I and O their width before and after.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from covey.policy.kernels.compiler import KERNELS, NoCompilerError, library
from covey.policy.kernels.support import product_type

SOURCE, TILES = KERNELS / "product.c", KERNELS / "half_gradient.c"
STRETCH = 2048
"""Numbers of a sum before it is rounded or stored, at most: DEPTH pairs of product.c."""


class ProductCall(ctypes.Structure):
    """The struct Product of product.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "out", "sums", "room")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "depth", "a_stride", "b_stride")),
        *((name, ctypes.c_int64) for name in ("a_turned", "b_turned", "half", "half_out", "a_wide", "b_wide")),
        *(("keep", ctypes.c_int64), ("num_threads", ctypes.c_int64), ("bias", ctypes.c_void_p)),
    )


def multiply(
    a_NK: Tensor,
    b_KM: Tensor,
    sum_NM: Tensor | None = None,
    dtype: torch.dtype | None = None,
    bias_M: Tensor | None = None,
) -> Tensor:
    """Compute a @ b + bias in C, added to a float32 `sum_NM`.

    Factors are float32, or bfloat16 where `multiplies_half`, and may be turned. Where one is bfloat16, or else `dtype`,
    that of the result, the other is rounded as it is read.
    """
    a_NK, b_KM = (each if 1 in each.stride() else each.contiguous() for each in (a_NK, b_KM))
    (rows, depth), columns, threads = a_NK.shape, b_KM.shape[1], torch.get_num_threads()
    out = a_NK.new_empty(rows, columns, dtype=dtype) if sum_NM is None else sum_NM
    half, half_out = torch.bfloat16 in (a_NK.dtype, b_KM.dtype, out.dtype), out.dtype == torch.bfloat16
    kernels = library(SOURCE)
    kernels.covey_product_room.restype = ctypes.c_int64
    room = out.new_empty(
        kernels.covey_product_room(*map(ctypes.c_int64, (rows, columns, threads))), dtype=torch.float32
    )
    sums = out.new_empty(rows, columns, dtype=torch.float32) if half_out and depth > STRETCH else None
    turned = a_NK.stride(1) != 1, b_KM.stride(1) != 1
    strides = a_NK.stride(int(turned[0])), b_KM.stride(int(turned[1]))
    places = None if sums is None else sums.data_ptr(), room.data_ptr()
    call = ProductCall(a_NK.data_ptr(), b_KM.data_ptr(), out.data_ptr(), *places, rows, columns, depth, *strides)
    call.a_turned, call.b_turned, call.half, call.half_out = *turned, half, half_out
    call.a_wide, call.b_wide = (half and each.dtype == torch.float32 for each in (a_NK, b_KM))
    call.keep, call.num_threads = sum_NM is not None, threads
    bias_M = None if bias_M is None else bias_M.detach().float().contiguous()
    call.bias = None if bias_M is None else bias_M.data_ptr()
    kernels.covey_product(ctypes.byref(call))
    return out


@cache
def multiplies_half() -> bool:
    """Return True where C multiplies bfloat16 by vectors."""
    try:
        return bool(library(SOURCE).covey_multiplies_half())
    except NoCompilerError:
        return False


def weight_gradient(gradient_NO: Tensor, x_NI: Tensor, sum_OI: Tensor | None = None) -> Tensor:
    """Compute gradient^T @ x, (O, I), deterministic for any number of threads.

    Both are float32, or bfloat16 where `has_tiles` or `multiplies_half`; the result is float32, added to `sum_OI`.
    """
    if x_NI.dtype == torch.float32 or not has_tiles():
        return multiply(gradient_NO.t(), x_NI, sum_OI, torch.float32)
    more_OI = _tiled_gradient(gradient_NO, x_NI)
    return more_OI if sum_OI is None else sum_OI.add_(more_OI)


def _tiled_gradient(gradient_NO: Tensor, x_NI: Tensor) -> Tensor:
    gradient_NO, x_NI, kernels = gradient_NO.contiguous(), x_NI.contiguous(), library(TILES)
    sizes = (len(x_NI), gradient_NO.shape[1], x_NI.shape[1], torch.get_num_threads())
    kernels.covey_weight_gradient_room.restype = ctypes.c_int64
    num_floats = kernels.covey_weight_gradient_room(*map(ctypes.c_int64, sizes))
    out_OI, room = (x_NI.new_empty(shape, dtype=torch.float32) for shape in (sizes[1:3], num_floats))
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (gradient_NO, x_NI, out_OI, room))
    kernels.covey_weight_gradient(*pointers, *map(ctypes.c_int64, sizes))
    return out_OI


@cache
def has_tiles() -> bool:
    """Return True where C multiplies bfloat16 in tiles (AMX)."""
    try:
        return bool(library(TILES).covey_has_tiles() and library(KERNELS / "head.c"))
    except NoCompilerError:
        return False


MIN_WEIGHTS = 2**16
"""Fewest weights of a layer for the automatic choice; smaller ones stay with torch: benchmarks/NOTES.md."""

PACKED_ROWS = 64
"""Rows for which weights are laid out; other numbers of rows take the same layout."""


class _Product(torch.autograd.Function):
    """x @ w.T + b with its gradients, in oneDNN or C."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, through_c: bool) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.has_bias, ctx.through_c = bias_O is not None, through_c  # type: ignore[attr-defined]
        return _linear(x_NI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (gradient_NO,) = gradients
        x_NI, weight_OI = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        return (
            _linear(gradient_NO, weight_OI.t()) if of_x else None,
            product_of_transposed(gradient_NO, x_NI, ctx.through_c) if of_weight else None,
            gradient_NO.sum(dim=0) if of_bias and ctx.has_bias else None,
            None,
        )


class OneDnnLinear(nn.Linear):
    """A linear layer that computes float32 on the CPU through oneDNN."""

    through_c = False
    """Whether the gradient of the weight goes through C."""

    def forward(self, input: Tensor) -> Tensor:
        if self.through_c and _is_half(input, self.weight) and multiplies_half():
            return _half_linear(input, self.weight, self.bias)
        if not _is_whole(input) or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        flat = input.reshape(-1, input.shape[-1])
        if torch.is_grad_enabled():
            out = _Product.apply(flat, self.weight, self.bias, self.through_c)
        else:
            out = _linear(flat, self.weight, self.bias)
        return out.view(*input.shape[:-1], self.out_features)


class _HalfProduct(torch.autograd.Function):
    """A product of bfloat16 factors with its gradients; of a float32 weight no copy is kept where C rounds it."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        held_OI = weight_OI.to(torch.bfloat16) if has_tiles() else weight_OI
        ctx.save_for_backward(x_NI, held_OI)
        return half_product(x_NI, held_OI.t(), bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient_NO,) = gradients
        x_NI, held_OI = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            half_product(gradient_NO, held_OI) if of_x else None,
            weight_gradient(gradient_NO, x_NI) if of_weight else None,
            gradient_NO.sum(dim=0, dtype=torch.float32) if of_bias else None,
        )


def half_product(x_NI: Tensor, weight_IO: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute x @ w + b in bfloat16; the library rounds the weight's copy, C the weight as it reads it."""
    if not has_tiles():
        return multiply(x_NI, weight_IO, None, torch.bfloat16, bias_O)
    bias_O = None if bias_O is None else bias_O.to(torch.bfloat16)
    return nn.functional.linear(x_NI, weight_IO.to(torch.bfloat16).t(), bias_O)


def _half_linear(input: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    flat_NI = input.reshape(-1, input.shape[-1]).to(torch.bfloat16)
    if torch.is_grad_enabled():
        out: Tensor = _HalfProduct.apply(flat_NI, weight_OI, bias_O)
    else:
        out = half_product(flat_NI, weight_OI.t(), bias_O)
    return out.view(*input.shape[:-1], -1)


def _is_half(x: Tensor, weight: Tensor) -> bool:
    """Return True for non-empty tensors on a CPU whose products are bfloat16."""
    return x.device.type == "cpu" and product_type("cpu", weight.dtype) == torch.bfloat16 and x.numel() > 0


class TiledLinear(nn.Linear):
    """A linear layer whose weight gradient goes through tiles in bfloat16."""

    def forward(self, input: Tensor) -> Tensor:
        if not (_is_half(input, self.weight) and torch.is_grad_enabled()):
            return super().forward(input)
        return _half_linear(input, self.weight, self.bias)


PLAIN = (nn.Linear, OneDnnLinear, TiledLinear)
"""Products and nothing more; adapters and quantised layers are other types."""


class PackedLinear(nn.Module):
    """An OneDnnLinear for passes without gradient, its weight packed beforehand.

    With few rows, as in decoding, most of a product's time goes into reading weights; packed, they are read
    sequentially.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        super().__init__()
        self.take(weight_OI, bias_O)

    def take(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        """Pack the weight as it is now; the bias is shared."""
        self.bias = bias_O
        self._packed_OI = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), PACKED_ROWS)

    def forward(self, input: Tensor) -> Tensor:
        return _linear(input.reshape(-1, input.shape[-1]), self._packed_OI, self.bias).view(*input.shape[:-1], -1)


class MergedLinear(nn.Module):
    """A linear layer with its adapter merged, without gradient."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        super().__init__()
        self.take(weight_OI, bias_O)

    def take(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.bias = bias_O
        self._weight_OI = weight_OI.detach()

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self._weight_OI, self.bias)


def choose_library(model: nn.Module, kernels: str, precision: torch.dtype = torch.float32) -> None:
    """Choose between torch, oneDNN and tiles for large layers.

    Others than torch only with "auto". Never by a timing: a resumed run could choose differently, and lose bit-for-bit
    equality.
    """
    if kernels == "auto" and not _is_intel():
        use_onednn(model, MIN_WEIGHTS)
    elif kernels == "auto" and precision == torch.bfloat16 and has_tiles():
        _change(model, TiledLinear, MIN_WEIGHTS)


def use_onednn(model: nn.Module, min_weights: int = 0) -> None:
    """Let linear layers of at least `min_weights` weights use oneDNN, in place."""
    if torch.backends.mkldnn.is_available():
        _change(model, OneDnnLinear, min_weights)


def _change(model: nn.Module, kind: type[nn.Linear], min_weights: int) -> None:
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= min_weights:
            module.__class__ = kind


def product(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute x @ w.T + b without gradient, as OneDnnLinear does."""
    return (_linear if _is_whole(x_NI) else nn.functional.linear)(x_NI, weight_OI, bias_O)


def product_of_transposed(gradient_NO: Tensor, x_NI: Tensor, through_c: bool) -> Tensor:
    """Compute gradient^T @ x, (O, I), as OneDnnLinear does for its weight."""
    if through_c and _is_whole(x_NI):
        return weight_gradient(gradient_NO, x_NI)
    return product(gradient_NO.t(), x_NI.t())


def _is_whole(x: Tensor) -> bool:
    """Return True for non-empty float32 on a CPU."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0


def _is_intel() -> bool:
    """Return True for Intel, whose MKL is fast, and for unknown processors."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True


def _linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")
