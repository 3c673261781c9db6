"""Importance ratios: how much likelier the policy makes what was sampled than the policy it is compared with.

Notation: N rollouts, T loss-token positions after padding. Masks are boolean, True where the policy chose the token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RatioOptions:
    """Over what a ratio is formed, and where its logarithm is cut.

    >>> RatioOptions(level="sequence_mean", clamp=20.0)
    """

    level: str = "token"
    """A key of LEVELS."""
    clamp: float | None = 20.0
    """Log ratios (after summing, for sequences) are clamped to +- this, with gradient 0 beyond; None does not clamp."""


def select(values_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Return `values_NT` with 0 outside the mask, so that NaN there reaches neither value nor gradient."""
    return torch.where(mask_NT, values_NT, 0.0)


def clamp_symmetric(values: Tensor, bound: float | None) -> Tensor:
    """Clamp to [-bound, bound], unless the bound is None."""
    return values if bound is None else values.clamp(-bound, bound)


def log_ratio(log_probs_NT: Tensor, base_NT: Tensor, mask_NT: Tensor, options: RatioOptions) -> Tensor:
    """Return log(pi / pi_base) at the chosen level, shape (N, T), 0 outside the mask.

    Carries the gradient of both inputs.

    A sequence's ratio stands at each of its tokens. Levels: token; sequence (product over the completion, RLOO,
    arXiv 2402.14740); sequence_mean (its geometric mean per token, GSPO, arXiv 2507.18071); sequence_mean_token
    (the same value, each token carrying its own gradient, GSPO-token).
    """
    delta_NT = select(log_probs_NT - base_NT, mask_NT)
    return select(clamp_symmetric(LEVELS[options.level](delta_NT, mask_NT), options.clamp), mask_NT)


def token_level(delta_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Return one log ratio for each token."""
    return delta_NT


def sequence_level(delta_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Return the sum over the completion, at each of its tokens."""
    return delta_NT.sum(1, keepdim=True).expand_as(delta_NT)


def sequence_mean_level(delta_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Return the mean over the completion's tokens, at each of its tokens."""
    counts_N1 = mask_NT.sum(1, keepdim=True).clamp(min=1)
    return (delta_NT.sum(1, keepdim=True) / counts_N1).expand_as(delta_NT)


def sequence_mean_token_level(delta_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Return the value of `sequence_mean_level`, the gradient of `token_level`."""
    return sequence_mean_level(delta_NT, mask_NT).detach() + delta_NT - delta_NT.detach()


LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": token_level,
    "sequence": sequence_level,
    "sequence_mean": sequence_mean_level,
    "sequence_mean_token": sequence_mean_token_level,
}
