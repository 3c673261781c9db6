"""Which tokens take part, and the entropy of the distribution they were drawn from.

Masks are boolean, True where a token counts. Shapes: N rollouts, T loss-token positions after padding, V vocabulary;
`...` stands for any shape, (N, T) and the flat (L,) alike.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def policy_token_mask(mask_NT: Tensor, written_NT: Tensor) -> Tensor:
    """Leave out tokens of a tool or the environment: True only where the policy wrote the token."""
    return mask_NT & written_NT


def drop_truncated(mask_NT: Tensor, truncated_N: Tensor) -> Tensor:
    """Leave out completions cut by the token limit (overlong filtering, DAPO, arXiv 2503.14476).

    Their rewards stay in the group statistics.
    """
    return mask_NT & ~truncated_N[:, None]


def high_entropy_threshold(entropy_L: Tensor, keep_fraction: float) -> Tensor:
    """The entropy that the `keep_fraction` most uncertain tokens reach, a scalar (arXiv 2506.01939).

    `entropy_L` holds the valid tokens of the *global* batch, so that all its micro-batches share one threshold: the
    (1 - keep_fraction) quantile, linearly interpolated. inf without any token. ValueError unless
    0 < keep_fraction <= 1.
    """
    if not 0 < keep_fraction <= 1:
        raise ValueError(f"high_entropy_fraction must be in (0, 1], got {keep_fraction}")
    if not entropy_L.numel():
        return entropy_L.new_full((), torch.inf)
    # torch.quantile refuses more than 2^24 values.
    ordered = entropy_L.detach().flatten().sort().values
    place = (1 - keep_fraction) * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return torch.lerp(ordered[below], ordered[above], place - below)


def high_entropy_mask(entropy: Tensor, mask: Tensor, threshold: Tensor) -> Tensor:
    """True for the valid tokens (...) whose entropy reaches the threshold.

    For the policy term only: KL and all denominators keep the full mask.
    """
    return mask & (entropy.detach() >= threshold)


def token_log_probs(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Natural log-probability of each token (...) under softmax(logits (..., V) / temperature), what was sampled."""
    return _log_softmax(logits, temperature).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def entropy_of(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats (...) of softmax(logits (..., V) / temperature); logits of -inf are entries of probability 0."""
    log_probs = _log_softmax(logits, temperature)
    # 0 * -inf would be NaN, in value and gradient.
    return -(log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0.0)).sum(dim=-1)


def sum_pi_squared(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Sum over the vocabulary of squared probabilities (...), which the optimal token baseline needs."""
    return (2 * _log_softmax(logits, temperature)).exp().sum(dim=-1)


def entropy_bonus(entropy: Tensor, mask: Tensor, coef: float, num_loss_tokens: int) -> Tensor:
    """This micro-batch's share of the loss term -coef * token mean of the entropy, a scalar.

    `num_loss_tokens` is the global count. With no valid token 0, still attached to the graph.
    """
    return -coef * torch.where(mask, entropy, 0.0).sum() / max(num_loss_tokens, 1)


@dataclass(frozen=True, slots=True)
class EntropyControl:
    """State of an entropy bonus that adapts itself (Skywork-OR1, arXiv 2505.22312); part of a checkpoint.

    >>> update_entropy_control(EntropyControl(coef=0.0, active=False), entropy=0.1, target=0.2)
    EntropyControl(coef=0.005, active=True)
    """

    coef: float
    active: bool
    """Whether the last entropy seen was at or below the target; only then is the bonus applied."""

    @property
    def applied(self) -> float:
        """The coefficient to use now."""
        return self.coef if self.active else 0.0


def update_entropy_control(
    control: EntropyControl, *, entropy: float, target: float, step: float = 0.005, low: float = 0.0, high: float = 1.0
) -> EntropyControl:
    """One step up while the entropy (nats, token mean) is at or below the target, else one down, within bounds."""
    active = entropy <= target
    coef = control.coef + (step if active else -step)
    return EntropyControl(min(max(coef, low), high), active)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """In float32 at least. ValueError unless temperature > 0."""
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (wide / temperature).log_softmax(dim=-1)
