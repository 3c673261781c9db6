"""KL penalties: estimators per token, the exact value, gradients.

Notation: N rollouts, T loss-token positions after padding, V vocabulary; q = log pi - log base at a sampled token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.algorithm.loss_inputs import RatioOptions, clamp_symmetric, log_ratio, select
from covey.algorithm.softmax import log_softmax


@dataclass(frozen=True, slots=True)
class KLOptions:
    """The KL estimator and its gradient.

    >>> KLOptions(estimator="k3", gradient="straight_through_k2")
    """

    estimator: str = "k3"
    """A key of ESTIMATORS, or the name of `custom`."""
    gradient: str = "straight_through_k2"
    """A key of GRADIENTS."""
    clamp_log_ratio: float | None = 20.0
    """q is clamped to +- this where it is exponentiated (k3); gradient 0 beyond."""
    clamp_value: float | None = None
    """The estimate is clamped to +- this; gradient 0 beyond."""
    custom: Callable[[Tensor, float | None], Tensor] | None = None
    """A custom function, in place of an entry of ESTIMATORS."""


def kl_penalty(
    log_probs_NT: Tensor, base_NT: Tensor, mask_NT: Tensor, options: KLOptions, old_log_probs_NT: Tensor | None = None
) -> Tensor:
    """Return the KL to `base_NT`, nats, (N, T), 0 outside the mask.

    In a loss use gradient `straight_through_k2`: a k1 loss has expected gradient 0, a k3 loss that of the forward KL
    (arXiv 2510.01555). `is_weighted` multiplies by pi / pi_old, needs `old_log_probs_NT`, and is unbiased in value
    and gradient when samples come from pi_old (DeepSeek-V3.2, arXiv 2512.02556).
    """
    q_NT = select(log_probs_NT, mask_NT) - select(base_NT, mask_NT)
    estimator = options.custom or ESTIMATORS[options.estimator]
    value_NT = clamp_symmetric(estimator(q_NT, options.clamp_log_ratio), options.clamp_value)
    if options.gradient != "is_weighted":
        return GRADIENTS[options.gradient](value_NT, q_NT)
    assert old_log_probs_NT is not None, "is_weighted needs old log-probs"
    ratio = RatioOptions("token", options.clamp_log_ratio)
    return value_NT * log_ratio(log_probs_NT, old_log_probs_NT, mask_NT, ratio).exp()


def k1(q_NT: Tensor, clamp: float | None) -> Tensor:
    """Return q, unbiased for KL(pi || base) under samples of pi, of either sign.

    It is the one to subtract from rewards.
    """
    return q_NT


def k2(q_NT: Tensor, clamp: float | None) -> Tensor:
    """Return q^2 / 2: biased as a value, its gradient is that of KL(pi || base)."""
    return q_NT.square() / 2


def k3(q_NT: Tensor, clamp: float | None) -> Tensor:
    """Return exp(-q) - 1 + q, never negative. It is unbiased for KL(pi || base) under samples of pi."""
    clamped_NT = clamp_symmetric(q_NT, clamp)
    return torch.expm1(-clamped_NT) + clamped_NT


def absolute(q_NT: Tensor, clamp: float | None) -> Tensor:
    return q_NT.abs()


def k1_forward(q_NT: Tensor, clamp: float | None) -> Tensor:
    """Return -q: unbiased for KL(base || pi) under samples of the base."""
    return -q_NT


def k3_forward(q_NT: Tensor, clamp: float | None) -> Tensor:
    """Return exp(q) - 1 - q: `k1_forward` with low variance, never negative."""
    return k3(-q_NT, clamp)


def naive(value_NT: Tensor, q_NT: Tensor) -> Tensor:
    """Return the estimator as it stands, differentiated."""
    return value_NT


def straight_through_k2(value_NT: Tensor, q_NT: Tensor) -> Tensor:
    """Return the estimator's value, with k2's gradient, that of KL(pi || base)."""
    k2_NT = q_NT.square() / 2
    return value_NT.detach() + (k2_NT - k2_NT.detach())


def full_kl(logits_TV: Tensor, base_logits_TV: Tensor) -> Tensor:
    """Return the exact KL(pi || base) at each position, (T,), nats.

    With the two exchanged it is KL(base || pi). Divide logits by the sampling temperature first. Tokens that a filter
    removed (logit -inf) from both policies add nothing.
    """
    log_p_TV, log_b_TV = log_softmax(logits_TV), log_softmax(base_logits_TV)
    possible_TV = log_p_TV.isfinite()
    # Selected before the product: 0 * -inf is NaN.
    gap_TV = select(log_p_TV, possible_TV) - select(log_b_TV, possible_TV)
    return (log_p_TV.exp() * gap_TV).sum(-1)


def refresh(reference: Tensor, policy: Tensor, alpha: float) -> Tensor:
    """Return (1 - alpha) reference + alpha policy (TR-DPO, arXiv 2404.09656).

    Both are one weight tensor. Alpha 1 copies, exactly.
    """
    return torch.lerp(reference, policy.to(reference), alpha)


ESTIMATORS: dict[str, Callable[[Tensor, float | None], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "k1_forward": k1_forward,
    "k3_forward": k3_forward,
}
SAMPLER_ESTIMATORS = {"k1_forward": "k1_forward", "k3": "k3_forward"}
"""Estimators of KL(sampler || pi) by setting: on the sampler's own tokens their naive gradient is right."""
GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"naive": naive, "straight_through_k2": straight_through_k2}
"""Gradients besides `is_weighted`, which needs a third policy."""
