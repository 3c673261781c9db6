"""Log-probs from logits, exact to the last bits for any vocabulary.

torch's float32 `log_softmax` on a CPU adds up a row in as many sums as a vector has lanes: thousands of small terms to
a large one, which loses the same way in every row. On 152 thousand logits it is 5e-6 to 3e-5 nats too high, more than
all else in a float32 pass.

Shapes: ... any, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.algorithm.loss_inputs import at_least_float32

SLICE = {"cpu": 2**20, "cuda": 2**28}
"""Logits whose exponentials live at once; on a CPU no more than its cache holds."""
BLOCK = 512
"""Numbers that are added up before sums are."""


def log_softmax(logits: Tensor) -> Tensor:
    """Return natural log-probs (..., V), in float32 at least.

    -inf stays -inf, with gradient 0; a row with NaN or inf, or nothing but -inf, is NaN throughout. It holds no tensor
    of that size besides what it returns.
    """
    return _LogSoftmax.apply(at_least_float32(logits))


def log_softmax_(logits_NV: Tensor) -> Tensor:
    """Compute log-probs without gradient, overwriting float32 or float64 logits."""
    out_NV = logits_NV - logits_NV.amax(dim=-1, keepdim=True)
    return out_NV.sub_(_total(torch.exp(out_NV, out=logits_NV)).log_())


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        # Less the largest first: differences of large numbers would round as these do
        out = (logits - logits.amax(dim=-1, keepdim=True)).contiguous()
        num_rows = max(SLICE.get(out.device.type, SLICE["cuda"]) // out.shape[-1], 1)
        for row_NV in out.view(-1, out.shape[-1]).split(num_rows):
            row_NV.sub_(_total(row_NV.exp()).log_())
        ctx.save_for_backward(out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return gradient - out.exp().mul_(_total(gradient))


def _total(values: Tensor) -> Tensor:
    """Sum each row in blocks, (..., 1). So the bits are the same beside any rows and on any number of threads."""
    whole = values.shape[-1] // BLOCK * BLOCK
    rest = values[..., whole:].sum(dim=-1, keepdim=True)
    if not whole:
        return rest
    return values[..., :whole].unflatten(-1, (-1, BLOCK)).sum(dim=-1).sum(dim=-1, keepdim=True).add_(rest)
