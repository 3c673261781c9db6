"""The softmax of the head on a GPU, compiled by torch: no tensor of [tokens, vocabulary] is made beside the logits.

These are read three times and written once, and read and written once more for their gradient. Operation by operation
it would be 14 passes. Where torch cannot compile a function, it runs as it is, and a warning says so.

Shapes: L loss tokens, V vocabulary. Functions that end in _ work in place.
"""

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor

LOGGER = logging.getLogger(__name__)
T = TypeVar("T")


def is_fused(kernels: str, device: torch.device) -> bool:
    """Tell whether the head's softmax is compiled, by model.kernels: on a GPU, where there is Triton to compile to."""
    return kernels != "torch" and device.type == "cuda" and find_spec("triton") is not None


def sums(logits_LV: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Return of each row what the log-softmax takes off, (L, 1), and its entropy, (L,). Nothing is written.

    `temperature` has no dimension.
    """
    tempered_LV = logits_LV / temperature
    top_L1 = tempered_LV.amax(dim=-1, keepdim=True)
    below_LV = tempered_LV - top_L1
    share_LV = below_LV.exp()
    total_L1 = share_LV.sum(dim=-1, keepdim=True)
    mean_L1 = (share_LV * below_LV).sum(dim=-1, keepdim=True) / total_L1
    return top_L1 + total_L1.log(), (total_L1.log() - mean_L1)[:, 0]


def probabilities_(logits_LV: Tensor, taken_off_L1: Tensor, temperature: Tensor) -> None:
    """Turn logits into probabilities, in place."""
    logits_LV.copy_((logits_LV / temperature - taken_off_L1).exp())


def gradient_(probability_LV: Tensor, target_L: Tensor, coefficient_L: Tensor, of_entropy_L: Tensor | None) -> None:
    """coefficient (1 at the target - p) - of_entropy p (log p + entropy), in the place of the probabilities p."""
    factor_L, terms_LV = -coefficient_L, None
    if of_entropy_L is not None:
        terms_LV = torch.xlogy(probability_LV, probability_LV)
        factor_L = factor_L + of_entropy_L * terms_LV.sum(dim=-1)
    found_LV = probability_LV * factor_L[:, None]
    if of_entropy_L is not None and terms_LV is not None:
        found_LV = found_LV - terms_LV * of_entropy_L[:, None]
    # A comparison goes into the same pass, which a scatter would not
    is_target_LV = torch.arange(probability_LV.shape[1], device=target_L.device) == target_L[:, None]
    probability_LV.copy_(torch.where(is_target_LV, found_LV + coefficient_L[:, None], found_LV))


def fused_scores_(logits_LV: Tensor, target_L: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probs of the targets, entropies). The logits become probabilities."""
    divisor = torch.tensor(temperature, dtype=torch.float64)  # on the host: a number would be compiled in
    at_target_L1 = logits_LV.gather(1, target_L[:, None]) / divisor
    taken_off_L1, entropy_L = _compiled(sums)(logits_LV, divisor)
    _compiled(probabilities_)(logits_LV, taken_off_L1, divisor)
    return (at_target_L1 - taken_off_L1)[:, 0], entropy_L


def fused_gradient_(
    probability_LV: Tensor, target_L: Tensor, coefficient_L: Tensor, of_entropy_L: Tensor | None
) -> None:
    """`gradient_`, compiled."""
    _compiled(gradient_)(probability_LV, target_L, coefficient_L, of_entropy_L)


@cache
def _compiled(function: Callable[..., T]) -> Callable[..., T]:
    """Compile for any number of tokens. What cannot be compiled has touched nothing, and runs as it is from then on."""
    compiled: Callable[..., T] = torch.compile(function, dynamic=True, fullgraph=True)
    able = [True]

    def call(*given: Any) -> T:
        if able[0]:
            try:
                return compiled(*given)
            except torch._dynamo.exc.TorchDynamoException as error:
                able[0] = False
                LOGGER.warning("the head's softmax runs uncompiled, and slower: %s", " ".join(str(error).split())[:200])
        return function(*given)

    return call
