"""The types and shapes that the C kernels support."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from covey.policy.kernels.compiler import KERNELS, load

RECURRENCE = KERNELS.parents[1] / "recurrence"
"""The folder of layers with a state: their sources stand beside the module that calls them."""
LANES, MAX_WIDTH = 16, 256
"""Widths of heads: multiples of LANES up to MAX_WIDTH, as in attention.c and decode.h."""


@dataclass(frozen=True, slots=True)
class Support:
    """The sources of a kernel and the CPU types that it computes."""

    sources: tuple[Path, ...]
    dtypes: tuple[torch.dtype, ...]


SUPPORT: dict[str, Support] = {
    "attention": Support((KERNELS / "attention.c",), (torch.float32, torch.bfloat16)),
    "layers": Support(
        (KERNELS / "elementwise.c", KERNELS / "product.c", KERNELS / "head.c"), (torch.float32, torch.bfloat16)
    ),
    "recurrence": Support(
        tuple(RECURRENCE / name for name in ("scan.c", "scan_gradient.c", "conv.c")), (torch.float32, torch.bfloat16)
    ),
    "optimizer": Support((KERNELS / "adamw.c",), (torch.float32,)),
    "decode": Support((KERNELS / "layer.c",), (torch.float32, torch.bfloat16)),
}
"""Packed attention of the training pass; norms, gates, rotary positions and gradients of weights; layers with a state;
AdamW; decoding."""


def unsupported_reason(
    kernel: str,
    tensors: Iterable[tuple[torch.dtype, str]],
    widths: Collection[tuple[int, int]] = (),
    *,
    is_plain: bool = True,
) -> str:
    """Return why a kernel cannot compute such tensors, "" if it can.

    `tensors` are (type, device type); `widths` those of a head's keys and values; `is_plain`: no sinks, no soft caps.
    """
    support = SUPPORT[kernel]
    if not is_plain:
        return "it knows neither attention sinks nor soft caps"
    for dtype, device in sorted({(_name(dtype), device) for dtype, device in tensors}):
        if dtype not in map(_name, support.dtypes) or device != "cpu":
            return f"it computes {' and '.join(map(_name, support.dtypes))} on a CPU, got {dtype} on {device}"
    for key, value in sorted(set(widths)):
        if key != value or key > MAX_WIDTH or key % LANES:
            found = str(key) if key == value else f"keys of {key} with values of {value}"
            return f"heads must be {LANES}, {2 * LANES}, ... {MAX_WIDTH} wide, got {found}"
    return next((reason for reason in map(load, support.sources) if isinstance(reason, str)), "")


def product_type(device_type: str, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which products of `dtype` are computed, autocast included."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else dtype


def with_dense_heads(*tensors: Tensor) -> list[Tensor]:
    """Return heads (B, H, T, D) with adjacent numbers, copied if needed."""
    return [tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in tensors]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
