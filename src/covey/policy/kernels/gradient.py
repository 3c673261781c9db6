"""The gradient of a linear layer's weight as one call of C (gradient.c), float32 on a CPU.

oneDNN and torch first copy both tensors for it; under a head, that copy is as long as the vocabulary.
"""

import ctypes

import torch
from torch import Tensor

from covey.policy.kernels.compiler import KERNELS, library

SOURCE = KERNELS / "gradient.c"


def weight_gradient(gradient_NO: Tensor, x_NI: Tensor) -> Tensor:
    """gradient^T @ x, (O, I): the same bits for any number of threads."""
    gradient_NO, x_NI = gradient_NO.contiguous(), x_NI.contiguous()
    sizes = [ctypes.c_int64(size) for size in (len(x_NI), gradient_NO.shape[1], x_NI.shape[1])]
    room_of = library(SOURCE).covey_weight_gradient_room
    room_of.restype = ctypes.c_int64
    out_OI, room = x_NI.new_empty(gradient_NO.shape[1], x_NI.shape[1]), x_NI.new_empty(room_of(*sizes[1:]))
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (gradient_NO, x_NI, out_OI, room))
    library(SOURCE).covey_weight_gradient(*pointers, *sizes, ctypes.c_int64(torch.get_num_threads()))
    return out_OI
