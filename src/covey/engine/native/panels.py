"""Linear layers by layer.c, for passes without gradient: weights laid out in panels, which decoding reads in one go.

What a row gets does not depend on the rows beside it, down to the last bit. In bfloat16 both operands of a product are
rounded, as autocast rounds them, and the product is kept in float32.

Shapes: N rows, I and O their width before and after.
"""

import ctypes

import torch
from torch import Tensor, nn

from covey.policy.kernels.compiler import KERNELS, library

SOURCE = KERNELS / "layer.c"
BATCH = 64
"""As in layer.c: rows there must be room for."""


class Product(ctypes.Structure):
    """The struct of the same name in layer.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "bias")),
        *((name, ctypes.c_int64) for name in ("inner", "outer")),
    )


class PackedWeights:
    """Room for a weight and its bias, laid out, of the shape of those given. `take` fills it."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, half: bool) -> None:
        outer, inner = weight_OI.shape
        self._width = ctypes.c_int64.in_dll(library(SOURCE), "covey_panel").value
        num_panels = -(-outer // self._width)
        dtype = torch.bfloat16 if half else torch.float32
        self._panels = torch.empty(num_panels * self._width * inner, dtype=dtype)
        self._bias = None if bias_O is None else torch.zeros(num_panels * self._width)
        bias = None if self._bias is None else self._bias.data_ptr()
        self.product = Product(self._panels.data_ptr(), bias, inner, outer)

    @torch.no_grad()
    def take(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        """Lay out the weight as it is now."""
        outer, inner = weight_OI.shape
        weight_OI = weight_OI.detach().float().contiguous()
        half = self._panels.dtype == torch.bfloat16
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (weight_OI, self._panels))
        numbers = (ctypes.c_int64(number) for number in (inner, outer, half, torch.get_num_threads()))
        library(SOURCE).covey_pack(*pointers, *numbers)
        if self._bias is not None and bias_O is not None:
            self._bias[:outer].copy_(bias_O)


class CompiledLinear(nn.Module):
    """A linear layer, its adapter merged in, as panels."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, half: bool) -> None:
        super().__init__()
        self._panels, self._half = PackedWeights(weight_OI, bias_O, half), half
        self.take(weight_OI, bias_O)

    def take(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        """Lay out the weight as it is now."""
        self._panels.take(weight_OI, bias_O)

    def forward(self, input: Tensor) -> Tensor:
        product = self._panels.product
        x_NI = input.float().reshape(-1, product.inner).contiguous()
        out_NO, room = x_NI.new_empty(len(x_NI), product.outer), x_NI.new_empty(BATCH * product.inner)
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (x_NI, out_NO, room))
        numbers = (ctypes.c_int64(number) for number in (len(x_NI), self._half, torch.get_num_threads()))
        library(SOURCE).covey_product(ctypes.byref(product), *pointers, *numbers)
        return out_NO.view(*input.shape[:-1], product.outer)


def has_half() -> bool:
    """Return whether the processor multiplies bfloat16. NoCompilerError."""
    return bool(ctypes.c_int64.in_dll(library(SOURCE), "covey_has_half").value)
