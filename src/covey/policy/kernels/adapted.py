"""Layers with a LoRA adapter in bfloat16 on a CPU, fused.

x W + s (x A) B takes four passes over all outputs less than operation by operation, and their gradients five less.

Shapes: N inputs, I and O their width before and after, R rank.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from covey.policy.kernels.blocks import HALF, Joinable, Projection, is_computed, project, weight_gradient
from covey.policy.kernels.linear import OneDnnLinear, TiledLinear
from covey.policy.kernels.support import product_type


class _AdaptedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, *adapter: Any) -> Tensor:
        down_RI, up_OR, scale = adapter[0].to(HALF), adapter[1].to(HALF), adapter[2]
        half_OI = _halved(weight_OI)
        narrow_NR = nn.functional.linear(x_NI, down_RI).mul_(scale)
        ctx.save_for_backward(x_NI, half_OI, down_RI, up_OR, narrow_NR)
        ctx.scale = scale
        out_NO = nn.functional.linear(x_NI, half_OI, None if bias_O is None else bias_O.to(HALF))
        return out_NO.addmm_(narrow_NR, up_OR.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, half_OI, down_RI, up_OR, narrow_NR = ctx.saved_tensors
        of_x, of_weight, of_bias, of_down, of_up, _ = ctx.needs_input_grad
        of_narrow_NR = (gradient_NO @ up_OR).mul_(ctx.scale)
        return (
            (gradient_NO @ half_OI).addmm_(of_narrow_NR, down_RI) if of_x else None,
            weight_gradient(gradient_NO, x_NI) if of_weight else None,
            gradient_NO.sum(dim=0, dtype=torch.float32) if of_bias else None,
            weight_gradient(of_narrow_NR, x_NI) if of_down else None,
            weight_gradient(gradient_NO, narrow_NR) if of_up else None,
            None,
        )


def _halved(weight_OI: Tensor) -> Tensor:
    """Return the weight in bfloat16, cast once where it is frozen."""
    if weight_OI.requires_grad or weight_OI.dtype == HALF:
        return weight_OI.to(HALF)
    stamp = weight_OI.data_ptr(), weight_OI._version
    kept: tuple[tuple[int, int], Tensor] | None = getattr(weight_OI, "covey_half", None)
    if kept is None or kept[0] != stamp:
        kept = weight_OI.covey_half = stamp, weight_OI.detach().to(HALF)  # type: ignore[attr-defined]
    return kept[1]


def fuse_adapters(model: nn.Module) -> None:
    """Compute layers with one plain adapter as one function, in place."""
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        is_known = type(base) is TiledLinear or (type(base) is OneDnnLinear and base.through_c)
        if is_known and _is_plain(module):
            module.__class__ = _fused_class()


def _is_plain(module: nn.Module) -> bool:
    from peft.tuners.lora.layer import Linear

    if type(module) is not Linear or list(module.lora_A) != module.active_adapters or len(module.lora_A) != 1:
        return False
    (name,) = module.active_adapters
    has_dropout = not isinstance(module.lora_dropout[name], nn.Identity)
    return not (has_dropout or module.lora_variant or module.fan_in_fan_out or module.lora_B[name].bias is not None)


@cache
def _fused_class() -> type[nn.Module]:
    """Return the class of such layers; importing peft takes seconds."""
    from peft.tuners.lora.layer import Linear

    class FusedLora(Joinable, Linear):
        def forward(self, x: Tensor, *args: Any, **keywords: Any) -> Tensor:
            layer = None if args or keywords else self.as_layer(x)
            if layer is not None:
                return project(x, [layer])[0]
            base, is_plain = self.base_layer, not (args or keywords or self.disable_adapters or self.merged)
            assert isinstance(base, TiledLinear | OneDnnLinear), "as `fuse_adapters` found it"
            is_half = x.device.type == "cpu" and product_type("cpu", base.weight.dtype) == HALF and x.numel() > 0
            if not (is_plain and is_half) or isinstance(base, OneDnnLinear):
                return super().forward(x, *args, **keywords)
            adapter = self._adapter()
            flat_NI = x.reshape(-1, x.shape[-1]).to(HALF)
            found: Tensor = _AdaptedProduct.apply(flat_NI, base.weight, base.bias, *adapter)
            return found.view(*x.shape[:-1], -1)

        def as_layer(self, x: Tensor) -> Projection | None:
            base = self.base_layer
            if not isinstance(base, OneDnnLinear) or base.as_layer(x) is None:
                return None
            if self.disable_adapters or self.merged or not is_computed(self, x, base.weight):
                return None
            down, up, scale = self._adapter()
            return Projection(base.weight, base.bias, down, up, scale)

        def _adapter(self) -> tuple[Tensor, Tensor, float]:
            (name,) = self.active_adapters
            down, up = self.lora_A[name], self.lora_B[name]
            assert isinstance(down, nn.Linear), "plain"
            assert isinstance(up, nn.Linear), "plain"
            return down.weight, up.weight, self.scaling[name]

    FusedLora.__module__, FusedLora.__qualname__ = __name__, "FusedLora"
    globals()["FusedLora"] = FusedLora  # pickle and torch.save find a class by its name
    return FusedLora
