"""Frozen base weights in 4 or 8 bits, through bitsandbytes.

In 8 bits bitsandbytes would round activations too, and treat outlier columns apart: a row would depend on others in its
pass. Here the weights alone are rounded, and dequantised for every product.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from covey.policy.kernels.support import product_type
from covey.policy.policy import DTYPES
from covey.policy.settings import ModelConfig

BY_SETTING = ("load_in_4bit", "load_in_8bit")
LARGEST = 127
"""The number of 8 bits that stands for the largest weight of a row."""


def quantized_bits(settings: ModelConfig) -> int | None:
    """Return the bits of quantised base weights, None for plain numbers."""
    return 4 if settings.load_in_4bit else 8 if settings.load_in_8bit else None


def quantization_config(settings: ModelConfig, bits: int) -> Any:
    """Return transformers' quantization config. ValueError without bitsandbytes."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        name = f"model.load_in_{bits}bit=true"
        raise ValueError(f"{name} needs bitsandbytes: pip install 'covey[quantization]'") from error
    from transformers import BitsAndBytesConfig

    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[settings.precision],
    )


def check_form(model: nn.Module, bits: int | None, name: str) -> None:
    """Refuse weights not in `bits` bits (None: quantised ones). ValueError.

    `name` is the model's in the message. The saved form wins over the settings.
    """
    wanted = None if bits is None else f"load_in_{bits}bit"
    found = _form(model)
    if found == wanted:
        return
    if found is None:
        raise ValueError(f"model.{wanted}=true loads weights by name, {name} holds plain numbers")
    cure = f"take it by name, with model.{found}=true" if found in BY_SETTING else "load it without quantization_config"
    raise ValueError(f"{name} holds quantised weights ({found}): {cure}")


def _form(model: nn.Module) -> str | None:
    """Return the quantisation setting or method of weights, None for plain numbers."""
    if not getattr(model, "is_quantized", False):
        return None
    how = model.config.quantization_config  # type: ignore[union-attr]
    by_setting = [name for name in BY_SETTING if getattr(how, name, False)]
    return by_setting[0] if by_setting else str(getattr(how, "quant_method", type(how).__name__))


def keep_promises(model: nn.Module, bits: int) -> None:
    """Choose layers with a backward pass and independent rows.

    On CPUs with AVX512-BF16, bitsandbytes packs a 4-bit weight at its first use without gradient; packed weights have
    no backward pass.
    """
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for module in model.modules():
        if bits == 4 and isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
            module.quant_state = module.weight.quant_state  # type: ignore[attr-defined] # sharded weights lose theirs
        if bits == 8 and isinstance(module, Linear8bitLt):
            module.__class__ = _plain_8_bit()  # type: ignore[assignment]


def is_quantized(layer: nn.Module) -> bool:
    """Return True for a linear layer in 4 or 8 bits."""
    weight = getattr(layer, "weight", None)
    return isinstance(weight, Tensor) and (_packing(weight, layer) is not None or weight.dtype == torch.int8)


def dequantize(weight: Tensor, layer: nn.Module | None = None) -> Tensor:
    """Return the plain numbers of a layer's whole weight."""
    if (state := _packing(weight, layer)) is not None:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight.data, state)
    return _from_8_bits(weight) if weight.dtype == torch.int8 else weight


def _packing(weight: Tensor, layer: nn.Module | None) -> Any:
    """Return the packing of a 4-bit weight, None for others."""
    return getattr(layer, "quant_state", None) or getattr(weight, "quant_state", None)


def _from_8_bits(weight_OI: Tensor) -> Tensor:
    """Return the float32 numbers of an 8-bit weight, scaled row by row."""
    largest_O: Tensor = weight_OI.SCB  # type: ignore[attr-defined]
    return weight_OI.data.float() * (largest_O.float() / LARGEST)[:, None]


class _Product(torch.autograd.Function):
    """x @ weight^T with a frozen 8-bit weight, dequantised during the product."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.weight_OI = weight_OI
        return x_NI @ _from_8_bits(weight_OI).to(x_NI.dtype).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (grad_NO,) = gradients
        return grad_NO @ _from_8_bits(ctx.weight_OI).to(grad_NO.dtype), None


@cache
def _plain_8_bit() -> type[nn.Module]:
    """Return bitsandbytes' layer with plain products; importing it takes seconds."""
    from bitsandbytes.nn import Linear8bitLt

    class Plain8bit(Linear8bitLt):
        """A linear layer of which the weight alone is rounded."""

        def forward(self, x: Tensor) -> Tensor:
            kind = x.device.type
            computed = product_type(kind, x.dtype)
            with torch.autocast(kind, enabled=False):
                out: Tensor = _Product.apply(x.to(computed), self.weight)
                return out if self.bias is None else out + self.bias.to(computed)

    return Plain8bit
