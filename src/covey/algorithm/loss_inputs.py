"""What a loss reads: log-probs, advantages and the importance ratio of the two policies.

Notation: N rollouts, T loss-token positions after padding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from covey.algorithm.ratio import RatioOptions, log_ratio, select


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss reads. Every tensor is (N, T), finite and 0 outside the mask. Make it with `loss_inputs`."""

    log_probs_NT: Tensor
    """Of the sampled tokens under the policy, with gradient."""
    old_log_probs_NT: Tensor
    """The denominator of the ratio, without gradient."""
    advantages_NT: Tensor
    mask_NT: Tensor
    """True where the policy chose the token and it takes part in the loss."""
    selected_NT: Tensor
    """Tokens chosen by a rule over the whole batch (clip_cov, kl_cov); elsewhere all False."""
    ratio_options: RatioOptions

    @property
    def log_ratio(self) -> Tensor:
        """Return log(pi / pi_old) at the chosen level, (N, T)."""
        return self._log_ratio(self.ratio_options)

    @property
    def ratio(self) -> Tensor:
        """Return the ratio at the chosen level, (N, T), 1 outside the mask."""
        return self.log_ratio.exp()

    @property
    def token_log_ratio(self) -> Tensor:
        """Return the log-ratio token by token whatever the level, clamped like the ratio."""
        return self._log_ratio(RatioOptions("token", self.ratio_options.clamp))

    @property
    def sequence_log_ratio(self) -> Tensor:
        """Return the log-ratio summed over the completion whatever the level."""
        return self._log_ratio(RatioOptions("sequence", self.ratio_options.clamp))

    @property
    def delta(self) -> Tensor:
        """Return log_probs - old_log_probs, not clamped: for penalties without an exponential."""
        return self.log_probs_NT - self.old_log_probs_NT

    def _log_ratio(self, options: RatioOptions) -> Tensor:
        return log_ratio(self.log_probs_NT, self.old_log_probs_NT, self.mask_NT, options)


def loss_inputs(
    log_probs_NT: Tensor,
    old_log_probs_NT: Tensor,
    advantages: Tensor,
    mask_NT: Tensor,
    selected_NT: Tensor | None = None,
    ratio_options: RatioOptions | None = None,
) -> LossInputs:
    """Select before anything is exponentiated, in float32 at least.

    (N,) advantages are repeated along their row.
    """
    advantages_NT = advantages if advantages.ndim == 2 else advantages[:, None].expand(mask_NT.shape)
    return LossInputs(
        log_probs_NT=select(at_least_float32(log_probs_NT), mask_NT),
        old_log_probs_NT=select(at_least_float32(old_log_probs_NT), mask_NT).detach(),
        advantages_NT=select(at_least_float32(advantages_NT), mask_NT).detach(),
        mask_NT=mask_NT,
        selected_NT=torch.zeros_like(mask_NT) if selected_NT is None else selected_NT & mask_NT,
        ratio_options=ratio_options or RatioOptions(),
    )


def at_least_float32(values: Tensor) -> Tensor:
    """Convert bfloat16 and float16 to float32, leaving wider types as they are."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
