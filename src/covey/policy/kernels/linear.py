"""Linear layers on a CPU, through oneDNN and C.

The results are exact float32 products like MKL's, summed in another order; or, of bfloat16 factors, sums in float32.
Shapes: N inputs, I and O their width before and after.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from covey.policy.kernels.blocks import Joinable, Projection, has_tiles, is_computed, project, weight_gradient
from covey.policy.kernels.support import product_type
from covey.system.machine import is_intel

MIN_WEIGHTS = 2**16
"""Fewest weights of a layer for the automatic choice; smaller ones stay with torch: benchmarks/NOTES.md."""

PACKED_ROWS = 64
"""Rows for which weights are laid out; other numbers of rows take the same layout."""


class _Product(torch.autograd.Function):
    """x @ w.T + b with its gradients, in oneDNN."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.has_bias = bias_O is not None  # type: ignore[attr-defined]
        return _linear(x_NI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient_NO,) = gradients
        x_NI, weight_OI = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            _linear(gradient_NO, weight_OI.t()) if of_x else None,
            _linear(gradient_NO.t(), x_NI.t()) if of_weight else None,
            gradient_NO.sum(dim=0) if of_bias and ctx.has_bias else None,
        )


class OneDnnLinear(Joinable, nn.Linear):
    """A linear layer that computes through oneDNN or C on a CPU."""

    through_c = False
    """Whether products go through C."""

    def forward(self, input: Tensor) -> Tensor:
        if (own := self.as_layer(input)) is not None:
            return project(input, [own])[0]
        if not _is_whole(input) or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        flat = input.reshape(-1, input.shape[-1])
        if torch.is_grad_enabled():
            out = _Product.apply(flat, self.weight, self.bias)
        else:
            out = _linear(flat, self.weight, self.bias)
        return out.view(*input.shape[:-1], self.out_features)

    def as_layer(self, x: Tensor) -> Projection | None:
        return Projection(self.weight, self.bias) if self.through_c and is_computed(self, x, self.weight) else None


class _TiledProduct(torch.autograd.Function):
    """A product of bfloat16 factors with its gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        half_OI = weight_OI.to(torch.bfloat16)
        ctx.save_for_backward(x_NI, half_OI)
        return nn.functional.linear(x_NI, half_OI, None if bias_O is None else bias_O.to(torch.bfloat16))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient_NO,) = gradients
        x_NI, half_OI = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            gradient_NO @ half_OI if of_x else None,
            weight_gradient(gradient_NO, x_NI) if of_weight else None,
            gradient_NO.sum(dim=0, dtype=torch.float32) if of_bias else None,
        )


class TiledLinear(nn.Linear):
    """A linear layer whose weight gradient goes through tiles in bfloat16."""

    def forward(self, input: Tensor) -> Tensor:
        is_half = product_type(input.device.type, self.weight.dtype) == torch.bfloat16 and input.device.type == "cpu"
        if not (is_half and torch.is_grad_enabled() and input.numel() > 0):
            return super().forward(input)
        flat_NI = input.reshape(-1, input.shape[-1]).to(torch.bfloat16)
        out: Tensor = _TiledProduct.apply(flat_NI, self.weight, self.bias)
        return out.view(*input.shape[:-1], self.out_features)


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
        self.weight = weight_OI.detach()  # Mamba reads it past the layer

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight, self.bias)


def choose_library(model: nn.Module, kernels: str, precision: torch.dtype = torch.float32) -> None:
    """Choose between torch, oneDNN and tiles for large layers.

    Others than torch only with "auto". Never by a timing: a resumed run could choose differently, and lose bit-for-bit
    equality.
    """
    if kernels == "auto" and not is_intel():
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


def _is_whole(x: Tensor) -> bool:
    """Return True for non-empty float32 on a CPU."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0


def _linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")
