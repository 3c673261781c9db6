"""Activations of the training pass kept in the host's memory between the forward and the backward pass."""

import torch
from torch import Tensor, nn

MIN_BYTES = 2**20
"""Smaller tensors stay: fetching them would cost more than their room."""


def offloaded(device: torch.device, min_bytes: int = MIN_BYTES) -> torch.autograd.graph.saved_tensors_hooks:
    """Keep what autograd saves on `device` in host memory until the backward pass asks for it.

    Weights stay where they are. The numbers are the same bits.
    """

    def pack(tensor: Tensor) -> Tensor:
        is_large = tensor.numel() * tensor.element_size() >= min_bytes
        if tensor.device != device or not is_large or _is_weight(tensor):
            return tensor
        pinned = device.type == "cuda"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        # Not asynchronous: the tensor's room may be given away as soon as this returns.
        return host.copy_(tensor)

    def unpack(saved: Tensor) -> Tensor:
        return saved if saved.device == device else saved.to(device, non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _is_weight(tensor: Tensor) -> bool:
    """Return whether this is a parameter or a view of one, such as its transpose."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
