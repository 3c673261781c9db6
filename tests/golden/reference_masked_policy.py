"""Compute the formulas of a single-step masked policy: one bidirectional pass fills all masked positions at once.

Given the masked input the positions are independent, so log-probs, KL and entropy are sums over masked positions, and
they are exact. The fills of one group share one forward pass.
Notation: B masked inputs, G fills of each, N = B * G rollouts, T tokens of the input, M masked positions (padded with
-1), V vocabulary.
"""

import torch
from torch import Tensor

from covey.algorithm.kl import full_kl
from covey.algorithm.loss_inputs import select

REDUCTIONS = ("masked_mean", "masked_sum")


def fill_mask(positions_BM: Tensor) -> Tensor:
    """True where there is a masked position, False on its padding (-1); bool (B, M)."""
    return positions_BM >= 0


def fill_log_probs(
    logits_BTV: Tensor, positions_BM: Tensor, samples_BGM: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """log pi(token | masked input) of every filled position, shape (N, M), 0 on padding: the loss tokens of N rollouts.

    `samples_BGM` holds the token of each masked position, in order. The sum of a row is the log-prob of the fill;
    a row without masked positions has log-prob 0 and no gradient.
    """
    log_p_BMV = position_logits(logits_BTV, positions_BM, temperature).log_softmax(-1)
    num_inputs, group_size, num_masked = samples_BGM.shape
    index_BMG = samples_BGM.clamp(min=0).transpose(1, 2)
    log_probs_BGM = log_p_BMV.gather(2, index_BMG).transpose(1, 2)
    mask_BGM = fill_mask(positions_BM)[:, None].expand_as(log_probs_BGM)
    return select(log_probs_BGM, mask_BGM).reshape(num_inputs * group_size, num_masked)


def fill_kl(logits_BTV: Tensor, ref_logits_BTV: Tensor, positions_BM: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Exact KL(policy || reference) at every masked position, shape (B, M), nats, 0 on padding.

    Both must have read the identical masked input.
    """
    pair = (position_logits(x, positions_BM, temperature).flatten(0, 1) for x in (logits_BTV, ref_logits_BTV))
    return select(full_kl(*pair).view(positions_BM.shape), fill_mask(positions_BM))


def fill_entropy(logits_BTV: Tensor, positions_BM: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy at every masked position, shape (B, M), nats, 0 on padding."""
    log_p_BMV = position_logits(logits_BTV, positions_BM, temperature).log_softmax(-1)
    possible_BMV = log_p_BMV.isfinite()
    return select(-(log_p_BMV.exp() * select(log_p_BMV, possible_BMV)).sum(-1), fill_mask(positions_BM))


def position_logits(logits_BTV: Tensor, positions_BM: Tensor, temperature: float) -> Tensor:
    """Logits of the masked positions at the sampling temperature, (B, M, V), 0 on padding."""
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    index_BMV = positions_BM.clamp(min=0)[..., None].expand(-1, -1, logits_BTV.shape[-1])
    picked_BMV = logits_BTV.gather(1, index_BMV) / temperature
    # Selected before the softmax: padding points at position 0, whose logits must get no gradient.
    return torch.where(fill_mask(positions_BM)[..., None], picked_BMV, 0.0)


def reduce_positions(values_BM: Tensor, positions_BM: Tensor, reduction: str = "masked_mean") -> Tensor:
    """One number for each masked input, (B,): `masked_mean` keeps inputs with many masks from dominating."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction}")
    mask_BM = fill_mask(positions_BM)
    sum_B = select(values_BM, mask_BM).sum(1)
    return sum_B if reduction == "masked_sum" else sum_B / mask_BM.sum(1).clamp(min=1)
