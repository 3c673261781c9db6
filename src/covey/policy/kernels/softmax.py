"""The head's softmax on a CPU in C (head.c), in place.

Shapes: L loss tokens, V vocabulary.
"""

import ctypes

import torch
from torch import Tensor

from covey.policy.kernels.compiler import KERNELS, library

SOURCE = KERNELS / "head.c"


class Softmax(ctypes.Structure):
    """The struct of the same name in head.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "out", "target", "logprob", "entropy", "logsum")),
        *((name, ctypes.c_void_p) for name in ("coefficient", "of_entropy")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "num_threads", "half")),
        ("temperature", ctypes.c_float),
    )


def compiled_scores(logits_LV: Tensor, target_L: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs of the targets, entropies, and the log-softmax's offset.

    Logits are float32 or bfloat16.
    """
    found = torch.empty(3, len(logits_LV), dtype=torch.float32)
    call = _call(logits_LV, target_L, temperature)
    call.logprob, call.entropy, call.logsum = (values_L.data_ptr() for values_L in found)
    library(SOURCE).covey_head_scores(ctypes.byref(call))
    return found[0], found[1], found[2]


def compiled_gradient_(
    logits_LV: Tensor,
    target_L: Tensor,
    coefficient_L: Tensor,
    of_entropy_L: Tensor | None,
    scores: tuple[Tensor, Tensor],
    temperature: float,
) -> None:
    """Overwrite logits by their gradient.

    `scores` are the log-softmax's offset and the entropies.
    """
    coefficient_L = coefficient_L.float().contiguous()
    of_entropy_L = None if of_entropy_L is None else of_entropy_L.float().contiguous()
    call = _call(logits_LV, target_L, temperature)
    call.out, call.coefficient = logits_LV.data_ptr(), coefficient_L.data_ptr()
    call.of_entropy = None if of_entropy_L is None else of_entropy_L.data_ptr()
    call.logsum, call.entropy = (values_L.data_ptr() for values_L in scores)
    library(SOURCE).covey_head_gradient(ctypes.byref(call))


def _call(logits_LV: Tensor, target_L: Tensor, temperature: float) -> Softmax:
    assert all(tensor.is_contiguous() for tensor in (logits_LV, target_L)), "rows lie one after the other"
    call = Softmax(logits_LV.data_ptr(), target=target_L.data_ptr(), temperature=temperature)
    call.rows, call.width = logits_LV.shape
    call.num_threads, call.half = torch.get_num_threads(), logits_LV.dtype == torch.bfloat16
    return call
