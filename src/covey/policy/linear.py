"""Linear layers through oneDNN on CPUs: in float32, torch takes MKL, which on some processors runs at half the speed.

The results are exact float32 products like MKL's, summed in another order.
Shapes: N inputs, I and O their width before and after.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

MIN_WEIGHTS = 2**16
"""Layers with fewer weights stay with torch: oneDNN's calls cost more than they save."""


class _Product(torch.autograd.Function):
    """x @ w.T + b and its gradients, each one call of oneDNN."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.has_bias = bias_O is not None  # type: ignore[attr-defined]
        return _linear(x_NI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient_NO,) = gradients
        x_NI, weight_OI = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            _linear(gradient_NO, weight_OI.t()) if of_x else None,
            _linear(gradient_NO.t(), x_NI.t()) if of_weight else None,
            gradient_NO.sum(dim=0) if of_bias and ctx.has_bias else None,
        )


class OneDnnLinear(nn.Linear):
    """A linear layer that computes float32 on the CPU through oneDNN, and everything else as before."""

    def forward(self, input: Tensor) -> Tensor:
        is_plain = input.dtype == torch.float32 and input.device.type == "cpu" and input.numel() > 0
        if not is_plain or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        flat = input.reshape(-1, input.shape[-1])
        if torch.is_grad_enabled():
            out = _Product.apply(flat, self.weight, self.bias)
        else:
            out = _linear(flat, self.weight, self.bias)
        return out.view(*input.shape[:-1], self.out_features)


def is_wanted(choice: str) -> bool:
    """Whether `choice` ("torch", "onednn" or "auto") means oneDNN here; auto takes it where the processor is not
    Intel's, whom MKL is made for."""
    if choice != "auto":
        return choice == "onednn"
    try:
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


def use_onednn(model: nn.Module) -> None:
    """Let large plain linear layers of the model compute through oneDNN, in place; their weights stay as they are."""
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= MIN_WEIGHTS:
            module.__class__ = OneDnnLinear


def _linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")
