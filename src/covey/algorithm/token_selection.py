"""Choices of tokens that depend on the whole batch of an optimiser step.

They are made once, from detached values, before the first micro-batch; the losses then stay local to their rows and
no micro-batch split changes the update. Rows must come in batch order, from all ranks.
Notation: N rollouts of the step, T loss-token positions after padding, L valid tokens in row order.
"""

import torch
from torch import Tensor

from covey.algorithm.loss_inputs import LossInputs


def select_clip_cov(
    inputs: LossInputs,
    seed: int,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    cov_ratio: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Tensor:
    """Draw the tokens that clip_cov leaves out, by covariance and seed.

    Candidates have a covariance in (cov_low, cov_high) and are not clipped already.

    bool (N, T); max(1, floor(cov_ratio * tokens)) of them, or all candidates if fewer (arXiv 2505.22617).
    """
    ratio_NT, advantages_NT = inputs.ratio.detach(), inputs.advantages_NT
    clipped_NT = -ratio_NT.clamp(1 - eps_low, 1 + eps_high) * advantages_NT > -ratio_NT * advantages_NT
    cov_L = token_covariance(inputs)
    free_L = ~clipped_NT[inputs.mask_NT]
    candidates = torch.nonzero((cov_L > cov_low) & (cov_L < cov_high) & free_L).flatten()
    # The draw is over places in this order, which is the same however groups lie in the batch and on ranks.
    candidates = candidates[cov_L[candidates].argsort(stable=True)]
    # Drawn on the CPU: the generators of other devices give other numbers.
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed)).to(candidates.device)
    return _scatter(inputs.mask_NT, candidates[order[: _count(cov_ratio, len(cov_L))]])


def select_kl_cov(inputs: LossInputs, seed: int, *, cov_ratio: float = 2e-4) -> Tensor:
    """Select the tokens that kl_cov penalises, bool (N, T).

    These are the max(1, floor(cov_ratio * tokens)) of largest covariance.
    """
    order = torch.argsort(token_covariance(inputs), descending=True, stable=True)
    return _scatter(inputs.mask_NT, order[: _count(cov_ratio, len(order))])


def high_entropy_threshold(entropy_L: Tensor, keep_fraction: float) -> Tensor:
    """Return the entropy of the `keep_fraction` most uncertain tokens (arXiv 2506.01939).

    `entropy_L` holds the valid tokens of the *global* batch, so that all its micro-batches share one threshold: the
    (1 - keep_fraction) quantile, linearly interpolated. inf without any token.
    """
    if not entropy_L.numel():
        return entropy_L.new_full((), torch.inf)
    # torch.quantile refuses more than 2^24 values.
    ordered = entropy_L.detach().flatten().sort().values
    place = (1 - keep_fraction) * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return torch.lerp(ordered[below], ordered[above], place - below)


def high_entropy_mask(entropy: Tensor, mask: Tensor, threshold: Tensor) -> Tensor:
    """Return True for the valid tokens (...) whose entropy reaches the threshold.

    For the policy term only: KL and all denominators keep the full mask.
    """
    return mask & (entropy.detach() >= threshold)


def token_covariance(inputs: LossInputs) -> Tensor:
    """Return (A - mean A)(log pi - mean log pi) per token, (L,), detached. Means are over the batch."""
    advantages_L = inputs.advantages_NT[inputs.mask_NT]
    log_probs_L = inputs.log_probs_NT.detach()[inputs.mask_NT]
    if len(log_probs_L) == 0:
        return log_probs_L
    return (advantages_L - advantages_L.mean()) * (log_probs_L - log_probs_L.mean())


def _count(share: float, num_tokens: int) -> int:
    return max(1, int(share * num_tokens))


def _scatter(mask_NT: Tensor, chosen: Tensor) -> Tensor:
    flags_L = torch.zeros(int(mask_NT.sum()), dtype=torch.bool, device=mask_NT.device)
    flags_L[chosen] = True
    selected_NT = torch.zeros_like(mask_NT)
    selected_NT[mask_NT] = flags_L
    return selected_NT
