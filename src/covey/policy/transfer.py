"""Numbers of the host on their way to a device, and back, with as few waits as there can be."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Sequence[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers of the host as a tensor on `device`, without waiting for what that is still computing.

    A copy from pinned memory is queued like a kernel. `dtype` None: int64 for integers, as torch has it.
    """
    pinned = device.type == "cuda"
    if isinstance(values, Tensor):
        host = values.pin_memory() if pinned else values
    else:
        host = torch.tensor(values, dtype=dtype, pin_memory=pinned)
    return host.to(device, non_blocking=pinned)
