"""Choose the attention of packed streams by the policy's heads."""

from collections.abc import Collection, Iterable

import torch

from covey.policy.attention import varlen
from covey.policy.attention.base import Heads
from covey.policy.kernels.support import unsupported_reason


def choose_attention(choice: str, kernels: str, heads: Iterable[Heads]) -> str:
    """Return a key of `layouts.ATTENTIONS`; raise ValueError where varlen cannot compute `heads`.

    With `auto`, a kernel where there is one for all heads, else sdpa.
    """
    heads = list(heads)
    no_varlen = varlen_obstacle(heads)
    if choice == "varlen" and no_varlen:
        raise ValueError(f"model.attention=varlen {no_varlen}; take model.attention=sdpa")
    if choice != "auto":
        return choice
    if not no_varlen and heads[0].device_type == "cuda":
        return "varlen"
    tensors, widths = [(h.dtype, h.device_type) for h in heads], [(h.key_width, h.value_width) for h in heads]
    is_plain = all(h.is_plain for h in heads)
    can = kernels == "auto" and not unsupported_reason("attention", tensors, widths, is_plain=is_plain)
    return "compiled" if can else "sdpa"


def varlen_obstacle(heads: Collection[Heads]) -> str:
    """Return why varlen cannot compute such heads, "" if it can."""
    if not all(h.is_plain for h in heads):
        return "knows neither attention sinks nor soft caps"
    if not any(h.device_type == "cuda" for h in heads):
        return ""
    if not any(h.dtype in varlen.HALF for h in heads):
        return "needs model.precision=bfloat16 or float16 on a GPU"
    for width in sorted({width for h in heads for width in (h.key_width, h.value_width)}):
        if width % varlen.MULTIPLE or width > varlen.MAX_WIDTH:
            return f"needs heads of {varlen.MULTIPLE}, {2 * varlen.MULTIPLE}, ... {varlen.MAX_WIDTH}, got {width}"
    if any(h.key_width != h.value_width for h in heads):
        return "needs keys as wide as values"
    if not varlen.is_there():
        return "needs torch 2.11 or later"
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else varlen.LEAST_CAPABILITY
    if capability < varlen.LEAST_CAPABILITY:
        return f"needs a GPU of compute capability 8.0 or higher, got {'.'.join(map(str, capability))}"
    return ""
