"""Linear layers in layer.c, without gradient, on packed weights.

A row's bits do not depend on the rows beside it. In bfloat16 both operands of a product are rounded, as autocast rounds
them, and the product is kept in float32. In int8 a weight has a scale for each output and rows have one for every 32
inputs; adapters stay float32.

Shapes: N rows, I and O their width before and after, R rank of an adapter, P layers that are one product.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from covey.policy.kernels.compiler import KERNELS, library, struct_of

SOURCE = KERNELS / "layer.c"
BATCH = 64
"""Rows in a batch, as in layer.c: there must be room for them."""
PanelProduct = struct_of(SOURCE, "Product")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter (arXiv 2106.09685): scale * x @ down^T @ up^T."""

    down_RI: Tensor
    up_OR: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a linear layer for sampling."""

    shape: tuple[int, int]
    """Width after it, and before it."""
    make: Callable[[], Tensor]
    """Returns the weight (O, I) as plain numbers."""
    stamp: tuple[int, ...] | None
    """Another for another weight, None where training changes it."""
    bias_O: Tensor | None
    adapter: Adapter | None

    def rows(self, index_O: Tensor) -> "Weights":
        """Return the weights of some outputs."""
        bias_O = None if self.bias_O is None else self.bias_O[index_O]
        adapter = None if self.adapter is None else replace(self.adapter, up_OR=self.adapter.up_OR[index_O])
        return Weights((len(index_O), self.shape[1]), lambda: self.make()[index_O], self.stamp, bias_O, adapter)

    def times(self, before: float, after: Tensor | float) -> "Weights":
        """Return the weights of a multiplied input and multiplied outputs (O)."""
        factor = before * after if isinstance(after, float) else before * after[:, None]
        bias_O = None if self.bias_O is None else self.bias_O * after
        adapter = None if self.adapter is None else replace(self.adapter, up_OR=self.adapter.up_OR * factor)
        return Weights(self.shape, lambda: self.make() * factor, self.stamp, bias_O, adapter)

    @staticmethod
    def sum_of(parts: "Sequence[Weights]") -> "Weights":
        """Return the weights of a sum of layers, inputs side by side."""
        if len(parts) == 1:
            return parts[0]
        outer, inner = parts[0].shape[0], sum(part.shape[1] for part in parts)
        stamps = [part.stamp for part in parts]
        stamp = None if None in stamps else tuple(number for each in stamps if each for number in each)
        biases = [part.bias_O for part in parts if part.bias_O is not None]
        bias_O = torch.stack(biases).sum(0) if biases else None
        adapter = None
        if any(part.adapter for part in parts):
            nothing = [Adapter(torch.zeros(0, part.shape[1]), torch.zeros(outer, 0), 1.0) for part in parts]
            adapters = [part.adapter or none for part, none in zip(parts, nothing, strict=True)]
            down_RI = torch.block_diag(*(each.down_RI.float() for each in adapters))
            adapter = Adapter(down_RI, torch.cat([each.up_OR.float() * each.scale for each in adapters], 1), 1.0)
        return Weights((outer, inner), lambda: torch.cat([part.make() for part in parts], 1), stamp, bias_O, adapter)

    @staticmethod
    def of(weight_OI: Tensor, bias_O: Tensor | None = None, adapter: Adapter | None = None) -> "Weights":
        return Weights((len(weight_OI), weight_OI.shape[1]), lambda: weight_OI, None, bias_O, adapter)


class Beside(ctypes.Structure):
    """The struct Adapter in layer.c."""

    _fields_ = (("down", PanelProduct), ("up", PanelProduct), ("first", ctypes.c_void_p), ("scales", ctypes.c_void_p))


class Panels:
    """A buffer for a packed weight (outer, inner), filled by `take`."""

    def __init__(self, outer: int, inner: int, dtype: torch.dtype) -> None:
        self.num_outputs = -(-outer // panel_width()) * panel_width()
        self._size = self.num_outputs * (row_bytes(inner, torch.uint8) if dtype == torch.int8 else inner)
        self._panels = torch.empty(self._size, dtype=dtype)
        self.product = PanelProduct(self._panels.data_ptr(), inner=inner, outer=outer)
        self._scales = torch.zeros(self.num_outputs if dtype == torch.int8 else 0)
        if dtype == torch.int8:
            self.product.scales = self._scales.data_ptr()

    def release(self) -> None:
        """Free the buffer until `take` fills another."""
        self._panels, self.product.panels = self._panels.new_empty(0), None

    @torch.no_grad()
    def take(self, weight_OI: Tensor) -> None:
        if len(self._panels) < self._size:
            self._panels = self._panels.new_empty(self._size)
            self.product.panels = self._panels.data_ptr()
        outer, inner = weight_OI.shape
        weight_OI = weight_OI.detach().float().contiguous()
        tensors, numbers = [weight_OI, self._panels], [inner, outer, self._panels.dtype == torch.bfloat16]
        if self._panels.dtype == torch.int8:
            tensors, numbers = [*tensors, self._scales], [inner, outer]
        pack = "covey_pack_eighths" if self._panels.dtype == torch.int8 else "covey_pack"
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
        library(SOURCE)[pack](*pointers, *map(ctypes.c_int64, (*numbers, torch.get_num_threads())))


class PackedWeights:
    """A buffer for one input's linear layers and adapters, filled by `take`."""

    def __init__(self, parts: Sequence[Weights], dtype: torch.dtype) -> None:
        self._panels = Panels(sum(part.shape[0] for part in parts), parts[0].shape[1], dtype)
        self.product = self._panels.product
        self.eighths = BATCH * row_bytes(self.product.inner, torch.int8) if self.product.scales else 0
        """Bytes of a batch of rows that enter in eight bits."""
        self._stamps: list[tuple[int, ...] | None] = [None]
        self._bias = torch.zeros(self._panels.num_outputs)
        if any(part.bias_O is not None for part in parts):
            self.product.bias = self._bias.data_ptr()
        beside = torch.float32 if dtype == torch.int8 else dtype
        self._adapters = PackedAdapters(parts, beside) if any(part.adapter for part in parts) else None
        if self._adapters is not None:
            self.product.adapter = ctypes.addressof(self._adapters.call)

    @torch.no_grad()
    def take(self, parts: Sequence[Weights]) -> None:
        """Pack the weights; frozen ones only once."""
        stamps = [part.stamp for part in parts]
        if None in stamps or stamps != self._stamps:
            made = [part.make() for part in parts]
            self._panels.take(made[0] if len(made) == 1 else torch.cat(made))
            self._stamps = stamps
        for bias_O, part in zip(_pieces(self._bias, parts), parts, strict=True):
            if part.bias_O is not None:
                bias_O.copy_(part.bias_O)
        if self._adapters is not None:
            self._adapters.take(parts)

    def release(self) -> None:
        """Free what training changes, until `take` packs it again."""
        if None in self._stamps:
            self._panels.release()

    @property
    def narrow_width(self) -> int:
        """Return the inner numbers per row of the adapters' products."""
        return 0 if self._adapters is None else int(self._adapters.call.down.outer)


class PackedAdapters:
    """A buffer for the adapters of one product's layers, filled by `take`.

    A panel of outputs reads the stretch of `count` numbers of its own layers.
    """

    def __init__(self, parts: Sequence[Weights], dtype: torch.dtype) -> None:
        ranks = [0 if part.adapter is None else len(part.adapter.down_RI) for part in parts]
        self._total = sum(ranks) + sum(ranks) % 2  # in half precision numbers lie in pairs
        outer, width = sum(part.shape[0] for part in parts), panel_width()
        part_O = torch.repeat_interleave(torch.tensor([part.shape[0] for part in parts]))
        ends_P = torch.tensor(ranks).cumsum(0)
        begin_O, end_O = (ends_P - torch.tensor(ranks))[part_O], ends_P[part_O]
        begin = torch.stack([piece.min() for piece in begin_O.split(width)]) // 2 * 2
        end = torch.stack([piece.max() for piece in end_O.split(width)])
        count = int((end - begin).max())
        count += count % 2
        self._first = begin.clamp(max=self._total - count)
        self._columns = [
            begin_O[part_O == index] - self._first.repeat_interleave(width)[:outer][part_O == index]
            for index in range(len(parts))
        ]
        self._down, self._up = Panels(self._total, parts[0].shape[1], dtype), Panels(outer, count, dtype)
        self._scales = torch.zeros(self._up.num_outputs)
        pointers = self._first.data_ptr(), self._scales.data_ptr()
        self.call = Beside(self._down.product, self._up.product, *pointers)

    def take(self, parts: Sequence[Weights]) -> None:
        down_RI = torch.zeros(self._total, parts[0].shape[1])
        up_OR = torch.zeros(self._up.product.outer, self._up.product.inner)
        places = _pieces(up_OR, parts), _pieces(self._scales, parts), self._columns
        begin = 0
        for part, own_OR, scale_O, column_O in zip(parts, *places, strict=True):
            if part.adapter is None:
                continue
            rank = len(part.adapter.down_RI)
            down_RI[begin : begin + rank].copy_(part.adapter.down_RI)
            own_OR.scatter_(1, column_O[:, None] + torch.arange(rank), part.adapter.up_OR.float())
            scale_O.fill_(part.adapter.scale)
            begin += rank
        self._down.take(down_RI)
        self._up.take(up_OR)


def _pieces(padded: Tensor, parts: Sequence[Weights]) -> list[Tensor]:
    """Return each layer's rows of a tensor."""
    sizes = [part.shape[0] for part in parts]
    return list(padded[: sum(sizes)].split(sizes))


class CompiledLinear(nn.Module):
    """A packed linear layer, its adapter merged or beside it."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed, self.dtype = PackedWeights([weights], dtype), dtype
        self.take(weights)

    def take(self, weights: Weights) -> None:
        self.packed.take([weights])

    def release(self) -> None:
        self.packed.release()

    def forward(self, input: Tensor) -> Tensor:
        x_NI = input.float().reshape(-1, input.shape[-1]).contiguous()
        return multiply(self.packed, x_NI, self.dtype).view(*input.shape[:-1], -1)


def multiply(weights: PackedWeights, x_NI: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply rows in float32: (N, O)."""
    product = weights.product
    assert product.panels, "weights are taken before a pass"
    out_NO = x_NI.new_empty(len(x_NI), product.outer)
    rooms = [x_NI.new_empty(BATCH * width) for width in (product.inner, weights.narrow_width)]
    rooms.append(torch.empty(weights.eighths, dtype=torch.int8))
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (x_NI, out_NO))
    room = (ctypes.c_void_p * 3)(*(tensor.data_ptr() for tensor in rooms))
    numbers = (ctypes.c_int64(number) for number in (len(x_NI), dtype == torch.bfloat16, torch.get_num_threads()))
    library(SOURCE).covey_product(ctypes.byref(product), *pointers, room, *numbers)
    return out_NO


def row_bytes(inner: int, dtype: torch.dtype) -> int:
    """Return the bytes of a row of int8 with scales, or uint8."""
    return int(library(SOURCE).covey_eighths(ctypes.c_int64(inner), ctypes.c_int64(dtype == torch.int8)))


def panel_width() -> int:
    """Return the number of outputs side by side in a panel."""
    return ctypes.c_int64.in_dll(library(SOURCE), "covey_panel").value
