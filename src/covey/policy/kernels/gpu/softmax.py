"""The head's softmax on a GPU, without another [tokens, vocabulary] tensor.

Logits are read once for the largest, once for sums, and once for their gradient, which is written in the type of the
products it enters. Operation by operation it would be 14 passes and two casts.

Shapes: L loss tokens, V vocabulary.
"""

import torch
from torch import Tensor

from covey.policy.kernels.gpu.inductor import compile_once, number


def fused_scores(logits_LV: Tensor, target_L: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs of the targets, entropies, and the log-softmax's offset."""
    divisor = number(temperature)
    logsum_L, entropy_L = compile_once(sums)(logits_LV, divisor)
    return logits_LV.gather(1, target_L[:, None])[:, 0] / divisor - logsum_L, entropy_L, logsum_L


def fused_gradient(
    logits_LV: Tensor,
    target_L: Tensor,
    coefficient_L: Tensor,
    of_entropy_L: Tensor | None,
    scores: tuple[Tensor, Tensor],
    temperature: float,
    out_LV: Tensor,
) -> None:
    """Write the gradient of tempered logits to `out_LV`, of any type.

    `scores` are the log-softmax's offset and the entropies.
    """
    # Inputs without gradient are left out of the compiled function
    entropy = () if of_entropy_L is None else (of_entropy_L, scores[1])
    compile_once(gradient)(logits_LV, target_L, coefficient_L, scores[0], number(temperature), out_LV, *entropy)


def sums(logits_LV: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-softmax's offset and the entropy of each row, (L,)."""
    tempered_LV = logits_LV / temperature
    top_L1 = tempered_LV.amax(dim=-1, keepdim=True)
    below_LV = tempered_LV - top_L1
    share_LV = below_LV.exp()
    total_L = share_LV.sum(dim=-1)
    mean_L = (share_LV * below_LV).sum(dim=-1) / total_L
    return top_L1[:, 0] + total_L.log(), total_L.log() - mean_L


def gradient(
    logits_LV: Tensor,
    target_L: Tensor,
    coefficient_L: Tensor,
    logsum_L: Tensor,
    temperature: Tensor,
    out_LV: Tensor,
    of_entropy_L: Tensor | None = None,
    entropy_L: Tensor | None = None,
) -> None:
    """Compute coefficient (1 at the target - p) - of_entropy p (log p + H)."""
    logprob_LV = logits_LV / temperature - logsum_L[:, None]
    probability_LV = logprob_LV.exp()
    # A comparison goes into the same pass, which a scatter would not
    is_target_LV = torch.arange(logits_LV.shape[1], device=target_L.device) == target_L[:, None]
    found_LV = coefficient_L[:, None] * (is_target_LV.to(probability_LV.dtype) - probability_LV)
    if of_entropy_L is not None and entropy_L is not None:
        # It is 0 for tokens without probability, not 0 times infinity
        terms_LV = torch.xlogy(probability_LV, probability_LV) + probability_LV * entropy_L[:, None]
        found_LV = found_LV - of_entropy_L[:, None] * terms_LV
    out_LV.copy_(found_LV)
