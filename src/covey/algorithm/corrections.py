"""Off-policy corrections: weights and masks for data of another policy.

Three policies: the sampler, the old policy (the trainer's weights before the first update on the batch) and the
policy. u = log pi_old - log pi_sampler at a sampled token. Everything here is detached.
Notation: N rollouts, T loss-token positions after padding, L valid tokens in row order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.algorithm.kl import k3
from covey.algorithm.loss_inputs import RatioOptions, clamp_symmetric, log_ratio, select


@dataclass(frozen=True, slots=True)
class WeightOptions:
    """Form and bounds of importance weights pi_old / pi_sampler.

    >>> WeightOptions(level="token", mode="truncate", max=2.0)
    """

    level: str = "token"
    """token, sequence (product) or sequence_mean (geometric mean)."""
    mode: str = "truncate"
    """`truncate` clamps to [min, max] (TIS); `mask` takes 0 outside and leaves the rest (IcePop)."""
    min: float | None = None
    max: float | None = 2.0
    self_normalize: bool = False
    """Divide by the mean weight over the batch."""
    log_ratio_clamp: float | None = 20.0

    def __post_init__(self) -> None:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"correction_max must be >= correction_min, got {self.max} and {self.min}")


def importance_weights(old_NT: Tensor, sampler_NT: Tensor, mask_NT: Tensor, options: WeightOptions) -> Tensor:
    """Return bounded pi_old / pi_sampler per token, (N, T), 0 outside the mask.

    They are not yet self-normalised. They multiply the policy term, and turn its expectation under the sampler into one
    under pi_old (decoupled PPO, arXiv 2110.00641 and 2505.24298).
    """
    ratio = RatioOptions(options.level, options.log_ratio_clamp)
    weights_NT = log_ratio(old_NT.detach(), sampler_NT.detach(), mask_NT, ratio).exp()
    low = 0.0 if options.min is None else options.min
    high = float("inf") if options.max is None else options.max
    if options.mode == "truncate":
        return select(weights_NT.clamp(low, high), mask_NT)
    return select(weights_NT, mask_NT & (weights_NT >= low) & (weights_NT <= high))


def mean_weight(weights_NT: Tensor, mask_NT: Tensor, level: str) -> Tensor:
    """Return the divisor of self-normalisation, 1 without tokens.

    It is the mean over valid tokens, or over non-empty sequences.
    """
    valid = weights_NT[mask_NT] if level == "token" else row_mean(weights_NT, mask_NT)[mask_NT.any(1)]
    mean = valid.mean() if len(valid) else valid.new_ones(())
    return torch.where(mean > 0, mean, 1.0)


def row_mean(values_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Return each row's mean over valid tokens, 0 for none, (N,)."""
    return select(values_NT, mask_NT).sum(1) / mask_NT.sum(1).clamp(min=1)


@dataclass(frozen=True, slots=True)
class Criterion:
    """A divergence of sampler and old policy to reject outside [low, high].

    >>> Criterion(scope="seq_mean", estimator="k3", low=-math.inf, high=0.02)
    """

    scope: str
    """A key of SCOPES."""
    estimator: str
    """A key of DIVERGENCES."""
    low: float
    high: float


def parse_rejection(criteria: str | None, thresholds: str | None) -> tuple[Criterion, ...]:
    """Read "token_k1,seq_mean_k3" and "0.5_2.0,0.02", with ValueError for the unreadable part.

    A k1 criterion takes bounds lo_hi on pi_sampler / pi_old, k2 and k3 one upper bound.
    """
    if criteria is None and thresholds is None:
        return ()
    if criteria is None or thresholds is None:
        raise ValueError(f"rejection={criteria} needs rejection_thresholds, got rejection_thresholds={thresholds}")
    names, bounds = criteria.split(","), str(thresholds).split(",")
    if len(names) != len(bounds):
        raise ValueError(f"rejection needs one threshold for each criterion, got {len(names)} and {len(bounds)}")
    return tuple(_parse_criterion(n.strip(), b.strip()) for n, b in zip(names, bounds, strict=True))


def _parse_criterion(name: str, bound: str) -> Criterion:
    scope, _, estimator = name.rpartition("_")
    if scope not in SCOPES or estimator not in DIVERGENCES:
        known = f"{{{','.join(SCOPES)}}}_{{{','.join(DIVERGENCES)}}}"
        raise ValueError(f"rejection must be made of {known}, got {name}")
    try:
        numbers = [float(part) for part in bound.split("_")]
    except ValueError:
        numbers = []
    # k1 has two bounds, ratios compared as logarithms; the others are at least 0 and have one
    if estimator == "k1" and len(numbers) == 2 and 0 < numbers[0] <= numbers[1]:
        low, high = torch.tensor(numbers, dtype=torch.float64).log().tolist()
        return Criterion(scope, estimator, low, high)
    if estimator != "k1" and len(numbers) == 1 and numbers[0] >= 0:
        return Criterion(scope, estimator, float("-inf"), numbers[0])
    form = "lo_hi with 0 < lo <= hi" if estimator == "k1" else "one number >= 0"
    raise ValueError(f"the rejection threshold of {name} must be {form}, got {bound}")


def rejection_keep(
    old_NT: Tensor, sampler_NT: Tensor, mask_NT: Tensor, criteria: Sequence[Criterion], clamp: float | None = 20.0
) -> Tensor:
    """Return the tokens that meet every criterion, bool (N, T). Denominators keep the count before rejection."""
    u_NT = clamp_symmetric(select(old_NT.detach() - sampler_NT.detach(), mask_NT), clamp)
    keep_NT = mask_NT
    for criterion in criteria:
        value_NT = SCOPES[criterion.scope](DIVERGENCES[criterion.estimator](u_NT), mask_NT)
        keep_NT = keep_NT & (value_NT >= criterion.low) & (value_NT <= criterion.high)
    return keep_NT


def off_policy_keep(
    advantages_NT: Tensor, log_probs_NT: Tensor, sampler_NT: Tensor, mask_NT: Tensor, delta: float
) -> Tensor:
    """Return False for sequences of negative advantage far from the sampler, (N,).

    Far: the mean log(pi_sampler / pi) exceeds delta (DeepSeek-V3.2, arXiv 2512.02556). The sign is that of a row's mean
    advantage.
    """
    gap_N = row_mean(sampler_NT.detach() - log_probs_NT.detach(), mask_NT)
    return ~((row_mean(advantages_NT, mask_NT) < 0) & (gap_N > delta))


def m2po_keep(old_NT: Tensor, sampler_NT: Tensor, mask_NT: Tensor, threshold: float) -> Tensor:
    """Drop tokens of largest u^2 until its mean is below the threshold.

    bool (N, T), over the whole batch; at least one token stays (M2PO, arXiv 2510.01161).
    """
    squared_L = select(old_NT.detach() - sampler_NT.detach(), mask_NT)[mask_NT].square()
    ordered, order = squared_L.sort(stable=True)
    ranks = torch.arange(1, len(ordered) + 1, device=ordered.device)
    num_kept = max(int((ordered.cumsum(0) / ranks < threshold).sum()), 1)
    keep_L = torch.zeros_like(squared_L, dtype=torch.bool)
    keep_L[order[:num_kept]] = True
    keep_NT = torch.zeros_like(mask_NT)
    keep_NT[mask_NT] = keep_L
    return keep_NT


SCOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda values_NT, mask_NT: values_NT,
    "seq_sum": lambda values_NT, mask_NT: select(values_NT, mask_NT).sum(1, keepdim=True),
    "seq_mean": lambda values_NT, mask_NT: row_mean(values_NT, mask_NT)[:, None],
    "seq_max": lambda values_NT, mask_NT: values_NT.masked_fill(~mask_NT, float("-inf")).amax(1, keepdim=True),
}
DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda u_NT: -u_NT,
    "k2": lambda u_NT: u_NT.square() / 2,
    "k3": lambda u_NT: k3(-u_NT, None),
}
"""Estimates of KL(sampler || old) from u = log pi_old - log pi_sampler."""
