"""Matrix products in C (product.c, half_gradient.c).

Sums are float32, of factors of either type that may lie either way, and rounded once.
Shapes: N rows, K depth, M columns; O and I a layer's width after and before.
"""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from covey.policy.kernels.compiler import KERNELS, NoCompilerError, library

SOURCE, TILES = KERNELS / "product.c", KERNELS / "half_gradient.c"
DEPTH, PIECES = 1024, 32
"""Steps of a sum before it is stored, numbers or pairs of bfloat16, and parts of it, at most: as in product.c."""


class PartOfProduct(ctypes.Structure):
    """The struct Part of product.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b")),
        *((name, ctypes.c_int64) for name in ("depth", "a_stride", "b_stride", "a_turned", "b_turned")),
        *(("a_wide", ctypes.c_int64), ("b_wide", ctypes.c_int64)),
    )


class ProductCall(ctypes.Structure):
    """The struct Product of product.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("parts", "sums", "out", "added")),
        *((name, ctypes.c_int64) for name in ("added_stride", "num_parts", "rows", "columns", "half")),
    )
    held: tuple[object, ...]


def product_call(
    parts: Sequence[tuple[Tensor, Tensor]], out_NM: Tensor, added_M: Tensor | None = None, *, half: bool | None = None
) -> ProductCall:
    """Prepare a sum of products a @ b and of `added_M`.

    Factors are float32, or bfloat16 where `multiplies_half`, and may be turned. With `half`, those of float32
    are rounded. `added_M` is float32: a number for each column, or for each number of `out_NM`, or that itself.
    """
    parts = [tuple(each if 1 in each.stride() else each.contiguous() for each in part) for part in parts]  # type: ignore[misc]
    half = any(each.dtype == torch.bfloat16 for part in parts for each in part) if half is None else half
    half_out, size = out_NM.dtype == torch.bfloat16, 2 if half else 1
    is_long = len(parts) > PIECES or sum(-(-a.shape[1] // size) for a, _ in parts) > DEPTH
    sums = out_NM if not half_out else out_NM.new_empty(out_NM.shape, dtype=torch.float32) if is_long else None
    added_M = None if added_M is None else added_M.detach().float().contiguous()
    described = (PartOfProduct * len(parts))(*(_part(a, b, half) for a, b in parts))
    call = ProductCall(ctypes.addressof(described), num_parts=len(parts), half=half)
    call.rows, call.columns = out_NM.shape
    call.sums, call.out = _place(sums), out_NM.data_ptr() if half_out else None
    call.added, call.added_stride = _place(added_M), 0 if added_M is None or added_M.dim() == 1 else call.columns
    call.held = (parts, described, sums, out_NM, added_M)
    return call


def run_products(*calls: ProductCall) -> None:
    """Compute products in order; no `b` comes from the product before."""
    kernels, count, threads = library(SOURCE), ctypes.c_int64, torch.get_num_threads()
    columns = max(call.columns for call in calls)
    kernels.covey_product_room.restype = count
    room = torch.empty(kernels.covey_product_room(count(columns), count(threads)), dtype=torch.float32)
    given = (ProductCall * len(calls))(*calls), count(len(calls)), ctypes.c_void_p(room.data_ptr())
    kernels.covey_products(*given, count(columns), count(threads))


def _part(a_NK: Tensor, b_KM: Tensor, half: bool) -> PartOfProduct:
    part = PartOfProduct(a_NK.data_ptr(), b_KM.data_ptr(), a_NK.shape[1])
    part.a_turned, part.b_turned = a_NK.stride(1) != 1, b_KM.stride(1) != 1
    part.a_stride, part.b_stride = a_NK.stride(int(part.a_turned)), b_KM.stride(int(part.b_turned))
    part.a_wide, part.b_wide = (half and each.dtype == torch.float32 for each in (a_NK, b_KM))
    return part


def _place(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def multiply(
    a_NK: Tensor,
    b_KM: Tensor,
    sum_NM: Tensor | None = None,
    dtype: torch.dtype | None = None,
    bias_M: Tensor | None = None,
) -> Tensor:
    """Compute a @ b + bias, added to a float32 `sum_NM`."""
    out = a_NK.new_empty(len(a_NK), b_KM.shape[1], dtype=dtype) if sum_NM is None else sum_NM
    is_half = torch.bfloat16 in (a_NK.dtype, b_KM.dtype, out.dtype)
    run_products(product_call([(a_NK, b_KM)], out, bias_M if sum_NM is None else sum_NM, half=is_half))
    return out


@cache
def multiplies_half() -> bool:
    """Return True where C multiplies bfloat16 by vectors."""
    try:
        return bool(library(SOURCE).covey_multiplies_half())
    except NoCompilerError:
        return False


def half_product(x_NI: Tensor, weight_IO: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute x @ w + b in bfloat16."""
    return multiply(x_NI, weight_IO, None, torch.bfloat16, bias_O)


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
