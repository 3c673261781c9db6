"""Projection layers with one input, and gated MLPs, as functions in C.

Their products are one call; adapters are terms of their sums. Nothing is kept that the backward pass can make in the
cache: neither a weight's copy nor what a gate gives.
Shapes: N rows, I and O a layer's width before and after, R rank of its adapter.
"""

import ctypes
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from covey.policy.kernels.compiler import KERNELS, NoCompilerError, library, struct_of
from covey.policy.kernels.elementwise import gate_backward, gate_forward
from covey.policy.kernels.support import product_type

HALF = torch.bfloat16
Tensors = list[Tensor | None]

SOURCE, TILES = KERNELS / "product.c", KERNELS / "half_gradient.c"
DEPTH, PIECES = 1024, 32
"""Steps of a sum before it is stored, numbers or pairs of bfloat16, and parts of it, at most: as in product.c."""
PartOfProduct = struct_of(SOURCE, "Part")
ProductCall = struct_of(SOURCE, "Product")


def product_call(
    parts: Sequence[tuple[Tensor, Tensor]], out_NM: Tensor, added_M: Tensor | None = None, *, half: bool | None = None
) -> ctypes.Structure:
    """Prepare a sum of products a @ b and of `added_M`.

    Factors are float32 or bfloat16 and may be turned. With `half`, those of float32 are rounded. `added_M` has a
    number for each column, or for each number of `out_NM`, or is that itself.
    """
    parts = [tuple(each if 1 in each.stride() else each.contiguous() for each in part) for part in parts]  # type: ignore[misc]
    half = any(each.dtype == HALF for part in parts for each in part) if half is None else half
    half_out, size = out_NM.dtype == HALF, numbers_of_a_step() if half else 1
    is_long = len(parts) > PIECES or sum(-(-a.shape[1] // size) for a, _ in parts) > DEPTH
    room = out_NM.new_empty(len(out_NM), out_NM.stride(0), dtype=torch.float32) if half_out and is_long else None
    sums = room if half_out else out_NM
    added_M = None if added_M is None else added_M.detach().contiguous()
    described = (PartOfProduct * len(parts))(*(_part(a, b, half) for a, b in parts))
    call = ProductCall(ctypes.addressof(described), num_parts=len(parts), half=half)
    (call.rows, call.columns), call.stride = out_NM.shape, out_NM.stride(0)
    call.sums, call.out = _place(sums), out_NM.data_ptr() if half_out else None
    call.added, call.added_stride = _place(added_M), 0 if added_M is None or added_M.dim() == 1 else call.columns
    call.half_added = added_M is not None and added_M.dtype == HALF
    call.held = (parts, described, sums, out_NM, added_M)
    return call


def numbers_of_a_step() -> int:
    """Return the numbers of bfloat16 that are multiplied at a time."""
    return ctypes.c_int64.in_dll(library(SOURCE), "covey_pair").value


def run_products(*calls: ctypes.Structure) -> None:
    """Compute products in order; no `b` comes from the product before."""
    kernels, count, threads = library(SOURCE), ctypes.c_int64, torch.get_num_threads()
    columns = max(call.columns for call in calls)
    kernels.covey_product_room.restype = count
    room = torch.empty(kernels.covey_product_room(count(columns), count(threads)), dtype=torch.float32)
    given = (ProductCall * len(calls))(*calls), count(len(calls)), ctypes.c_void_p(room.data_ptr())
    kernels.covey_products(*given, count(columns), count(threads))


def _part(a_NK: Tensor, b_KM: Tensor, half: bool) -> ctypes.Structure:
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


def weight_gradient(gradient_NO: Tensor, x_NI: Tensor, sum_OI: Tensor | None = None) -> Tensor:
    """Compute gradient^T @ x, (O, I), deterministic for any number of threads.

    Both are float32 or bfloat16; the result is float32, added to `sum_OI`.
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


@dataclass(frozen=True, slots=True)
class Projection:
    """Weights of a linear layer, and of its adapter."""

    weight_OI: Tensor
    bias_O: Tensor | None
    down_RI: Tensor | None = None
    up_OR: Tensor | None = None
    scale: float = 1.0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.weight_OI, self.bias_O, self.down_RI, self.up_OR

    @property
    def adapter(self) -> tuple[Tensor, Tensor] | None:
        """Return its down, and its up times the scale."""
        return None if self.down_RI is None or self.up_OR is None else (self.down_RI, self.up_OR * self.scale)


class Joinable(nn.Module):
    """A module that may be computed here."""

    @abstractmethod
    def as_layer(self, x: Tensor) -> Projection | None:
        """Return its weights if C computes it and no hook listens."""


def layers_of(x: Tensor, *modules: nn.Module) -> list[Projection]:
    """Return all modules' layers, none unless C computes all."""
    found = [module.as_layer(x) if isinstance(module, Joinable) else None for module in modules]
    return [] if None in found else [layer for layer in found if layer is not None]


def is_computed(module: nn.Module, x: Tensor, weight: Tensor) -> bool:
    """Return True where products of `x` and a weight go through C."""
    heard = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    kind = product_type("cpu", x.dtype)
    is_known = weight.dtype in (torch.float32, kind) and kind in (torch.float32, HALF)
    return is_known and x.device.type == "cpu" and x.numel() > 0 and not heard


def project(x: Tensor, layers: Sequence[Projection]) -> list[Tensor]:
    """Compute each layer's output."""
    flat_NI = x.reshape(-1, x.shape[-1]).to(product_type("cpu", x.dtype))
    outs: tuple[Tensor, ...] = _Project.apply(flat_NI, *_flat(layers))
    return [out_NO.view(*x.shape[:-1], -1) for out_NO in outs]


def add_gated(hidden: Tensor, x: Tensor, layers: Sequence[Projection]) -> Tensor:
    """Compute hidden + down(silu(gate(x)) * up(x))."""
    flat_NI = x.reshape(-1, x.shape[-1]).to(product_type("cpu", x.dtype))
    out: Tensor = _AddGated.apply(hidden.reshape(-1, hidden.shape[-1]), flat_NI, *_flat(layers))
    return out.view(hidden.shape)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, scales: tuple[float, ...], *flat: Tensor | None) -> tuple[Tensor, ...]:
        layers = _layers(scales, flat)
        narrow, calls, outs = _outputs(x_NI, layers, [x_NI.new_empty(len(x_NI), len(s.weight_OI)) for s in layers])
        run_products(*calls)
        ctx.save_for_backward(x_NI, *flat, *narrow)
        ctx.scales = scales
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, layers, narrow = _unpack(ctx)
        of_x = torch.empty_like(x_NI) if ctx.needs_input_grad[0] else None
        of_narrow, calls = _of_input(layers, gradients, x_NI, of_x)
        found, more = _of_weights(x_NI, layers, gradients, narrow, of_narrow, ctx.needs_input_grad[2:])
        run_products(*calls, *more)
        return of_x, None, *_scale_ups(layers, found)


class _AddGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NC: Tensor, x_NI: Tensor, scales: tuple[float, ...], *flat: Tensor | None) -> Tensor:
        layers = _layers(scales, flat)
        rooms = [x_NI.new_empty(len(x_NI), len(layer.weight_OI)) for layer in layers[:2]]
        narrow, calls, (gate, up) = _outputs(x_NI, layers[:2], rooms)
        run_products(*calls)
        out_NC = torch.empty_like(hidden_NC)
        last, calls, _ = _outputs(gate_forward(gate, up), layers[2:], [out_NC], hidden_NC)
        run_products(*calls)
        ctx.save_for_backward(x_NI, *flat, *narrow, *last, gate, up)
        ctx.scales = scales
        return out_NC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NC: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, layers, (*narrow, last, gate, up) = _unpack(ctx)
        needed, of_gated = ctx.needs_input_grad[3:], torch.empty_like(gate)
        of_last, calls = _of_input(layers[2:], [gradient_NC], x_NI, of_gated)
        run_products(*calls)
        gated = torch.empty_like(gate)
        gradients = gate_backward(gate, up, of_gated, gated)
        of_x = torch.empty_like(x_NI)
        of_narrow, calls = _of_input(layers[:2], gradients, x_NI, of_x)
        found, more = _of_weights(x_NI, layers[:2], gradients, narrow, of_narrow, needed)
        others, rest = _of_weights(gated, layers[2:], [gradient_NC], [last], of_last, needed[8:])
        run_products(*calls, *more, *rest)
        return gradient_NC, of_x, None, *_scale_ups(layers, found + others)


def _outputs(
    x_NI: Tensor, layers: Sequence[Projection], outs: list[Tensor], added: Tensor | None = None
) -> tuple[Tensors, list[ctypes.Structure], list[Tensor]]:
    """Return narrow outputs, calls and `outs`."""
    room_NR, narrow = _narrow_room(x_NI, layers)
    downs = [layer.down_RI for layer in layers if layer.down_RI is not None]
    calls = [product_call([(x_NI, torch.cat(downs).t())], room_NR)] if downs else []
    for layer, out_NO, own_NR in zip(layers, outs, narrow, strict=True):
        parts = [(x_NI, layer.weight_OI.t())]
        if own_NR is not None and layer.adapter is not None:
            parts.append((own_NR, layer.adapter[1].t()))
        calls.append(product_call(parts, out_NO, layer.bias_O if added is None else added))
    return narrow, calls, outs


def _ranks(layers: Sequence[Projection]) -> list[int]:
    return [0 if layer.down_RI is None else len(layer.down_RI) for layer in layers]


def _narrow_room(x_NI: Tensor, layers: Sequence[Projection]) -> tuple[Tensor, Tensors]:
    """Return room for narrow tensors, and each layer's part of it."""
    ranks = _ranks(layers)
    room_NR = x_NI.new_empty(len(x_NI), sum(ranks))
    return room_NR, [own_NR if own_NR.shape[1] else None for own_NR in room_NR.split(ranks, dim=1)]


def _of_input(
    layers: Sequence[Projection], gradients: Sequence[Tensor], x_NI: Tensor, of_x_NI: Tensor | None
) -> tuple[Tensor, list[ctypes.Structure]]:
    """Return narrow gradients side by side, and calls for these and `of_x_NI`."""
    room_NR, of_narrow = _narrow_room(x_NI, layers)
    calls, parts, half = [], [], x_NI.dtype == HALF
    for layer, gradient_NO, own_NR in zip(layers, gradients, of_narrow, strict=True):
        parts.append((gradient_NO, layer.weight_OI))
        if own_NR is not None and layer.adapter is not None:
            down_RI, up_OR = layer.adapter
            calls.append(product_call([(gradient_NO, up_OR)], own_NR, half=half))
            parts.append((own_NR, down_RI))
    return room_NR, calls if of_x_NI is None else [*calls, product_call(parts, of_x_NI, half=half)]


def _of_weights(
    x_NI: Tensor,
    layers: Sequence[Projection],
    gradients: Sequence[Tensor],
    narrow: Tensors,
    of_narrow_NR: Tensor,
    needed: Sequence[bool],
) -> tuple[Tensors, list[ctypes.Structure]]:
    """Return four gradients of each layer, and the calls for them."""
    found: Tensors = []
    half = x_NI.dtype == HALF
    of_downs_RI = x_NI.new_empty(of_narrow_NR.shape[1], x_NI.shape[1], dtype=torch.float32)
    calls = [product_call([(of_narrow_NR.t(), x_NI)], of_downs_RI, half=half)] if any(needed[2::4]) else []
    for place, (layer, gradient_NO, of_down_RI) in enumerate(
        zip(layers, gradients, of_downs_RI.split(_ranks(layers)), strict=True)
    ):
        asked = needed[4 * place : 4 * place + 4]
        own: Tensors = [
            gradient_NO.sum(dim=0, dtype=torch.float32) if asked[1] else None,
            of_down_RI if asked[2] else None,
        ]
        for at, tensor, right in ((0, layer.weight_OI, x_NI), (3, layer.up_OR, narrow[place])):
            own.insert(at, None)
            if asked[at] and tensor is not None and right is not None:
                own[at] = out = torch.empty_like(tensor)
                calls.append(product_call([(gradient_NO.t(), right)], out, half=half))
        found += own
    return found, calls


def _scale_ups(layers: Sequence[Projection], found: Tensors) -> Tensors:
    """Multiply gradients of adapters' ups by their scales."""
    for layer, of_up_OR in zip(layers, found[3::4], strict=True):
        if of_up_OR is not None and layer.scale != 1.0:
            of_up_OR.mul_(layer.scale)
    return found


def _flat(layers: Sequence[Projection]) -> tuple[Any, ...]:
    return tuple(layer.scale for layer in layers), *(tensor for layer in layers for tensor in layer.tensors)


def _layers(scales: Sequence[float], flat: Sequence[Any]) -> list[Projection]:
    own = [flat[4 * place : 4 * place + 4] for place in range(len(scales))]
    return [Projection(one, bias, down, up, scale) for (one, bias, down, up), scale in zip(own, scales, strict=True)]


def _unpack(ctx: Any) -> tuple[Tensor, list[Projection], list[Any]]:
    x_NI, *others = ctx.saved_tensors
    return x_NI, _layers(ctx.scales, others), others[4 * len(ctx.scales) :]
