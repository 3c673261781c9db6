"""The inputs of a loss: log-probs, advantages and the importance ratio.

An importance ratio says how much likelier the policy makes what was sampled than the policy it is compared with.
Notation: N rollouts, T loss-token positions after padding. Masks are boolean, True where the policy chose the token.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RatioOptions:
    """Level of a ratio, and the clamp of its logarithm.

    >>> RatioOptions(level="sequence_mean", clamp=20.0)
    """

    level: str = "token"
    """A key of LEVELS."""
    clamp: float | None = 20.0
    """Log ratios (after summing, for sequences) are clamped to +- this, with gradient 0 beyond; None does not clamp."""


def select(values_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Set values to 0 outside the mask; NaN there has no gradient."""
    return torch.where(mask_NT, values_NT, 0.0)


def clamp_symmetric(values: Tensor, bound: float | None) -> Tensor:
    """Clamp to [-bound, bound], unless the bound is None."""
    return values if bound is None else values.clamp(-bound, bound)


def log_ratio(log_probs_NT: Tensor, base_NT: Tensor, mask_NT: Tensor, options: RatioOptions) -> Tensor:
    """Return log(pi / pi_base) at the chosen level, (N, T), 0 outside the mask.

    Carries the gradient of both inputs. A sequence's ratio stands at each of its tokens. Levels: token; sequence
    (product over the completion, RLOO, arXiv 2402.14740); sequence_mean (its geometric mean per token, GSPO, arXiv
    2507.18071); sequence_mean_token (the same value, each token carrying its own gradient, GSPO-token).
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


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The inputs of a loss, (N, T), finite, 0 outside the mask; see `loss_inputs`."""

    log_probs_NT: Tensor
    """Log-probs of the sampled tokens under the policy, with gradient."""
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
        """Return the ratio, (N, T), 1 outside the mask."""
        return self.log_ratio.exp()

    @property
    def token_log_ratio(self) -> Tensor:
        """Return the clamped log-ratio per token, at any level."""
        return self._log_ratio(RatioOptions("token", self.ratio_options.clamp))

    @property
    def sequence_log_ratio(self) -> Tensor:
        """Return the log-ratio summed over the completion, at any level."""
        return self._log_ratio(RatioOptions("sequence", self.ratio_options.clamp))

    @property
    def delta(self) -> Tensor:
        """Return log_probs - old_log_probs, unclamped, for penalties without an exponential."""
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
    """Select before anything is exponentiated, in float32 at least. (N,) advantages are repeated along their row."""
    advantages_NT = advantages if advantages.ndim == 2 else advantages[:, None].expand(mask_NT.shape)
    return LossInputs(
        log_probs_NT=select(at_least_float32(log_probs_NT), mask_NT),
        old_log_probs_NT=select(at_least_float32(old_log_probs_NT), mask_NT).detach(),
        advantages_NT=select(at_least_float32(advantages_NT), mask_NT).detach(),
        mask_NT=mask_NT,
        selected_NT=torch.zeros_like(mask_NT) if selected_NT is None else selected_NT & mask_NT,
        ratio_options=ratio_options or RatioOptions(),
    )


@dataclass(frozen=True, slots=True)
class ObjectiveInputs:
    """The objective's inputs, tensors (N, T), None where `needs_...` is False.

    Outside the mask anything may stand, NaN included. Before the first update on a batch `old_log_probs_NT` is
    `log_probs_NT.detach()`.
    """

    log_probs_NT: Tensor
    """Log-probs of the sampled tokens under the policy, with gradient."""
    old_log_probs_NT: Tensor
    """Log-probs under the trainer's weights before the first update on this batch."""
    sampler_log_probs_NT: Tensor
    """Log-probs recorded by the engine."""
    advantages: Tensor
    """(N,) or (N, T)."""
    mask_NT: Tensor
    """bool: the loss tokens."""
    ref_log_probs_NT: Tensor | None = None
    entropy_NT: Tensor | None = None
    """Entropy of the policy at each position, nats; with gradient where `needs_entropy_gradient`."""
    full_kl_NT: Tensor | None = None
    """Exact KL(policy || reference) at each position (`kl.full_kl`), with gradient."""
    balance_NT: Tensor | None = None
    """Balancing loss of each rollout's experts at all its tokens, coefficient included, with gradient."""
    teacher_log_probs_NT: Tensor | None = None
    teacher_mask_NT: Tensor | None = None
    """bool: tokens that a teacher judged."""
    position_NT: Tensor | None = None
    """Place of each token in its text, where a teacher's gaps are discounted; None: the columns are places."""
    divergence_NT: Tensor | None = None
    """Divergence of policy and teacher at each position (`teacher.divergence`), with gradient."""
    supervised_NT: Tensor | None = None
    """bool: tokens of answers to learn as they are, outside the mask."""

    def to(self, device: torch.device) -> "ObjectiveInputs":
        """Return the same rows on another device."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: values.to(device) for name, values in given.items() if values is not None})


def apply_mask(inputs: ObjectiveInputs) -> ObjectiveInputs:
    """Set every tensor to 0 outside the mask, in float32 at least."""

    def clean(values_NT: Tensor | None) -> Tensor | None:
        return None if values_NT is None else select(at_least_float32(values_NT), inputs.mask_NT)

    either_NT = inputs.mask_NT if inputs.supervised_NT is None else inputs.mask_NT | inputs.supervised_NT
    return replace(
        inputs,
        log_probs_NT=select(at_least_float32(inputs.log_probs_NT), either_NT),
        old_log_probs_NT=select(at_least_float32(inputs.old_log_probs_NT), inputs.mask_NT).detach(),
        sampler_log_probs_NT=select(at_least_float32(inputs.sampler_log_probs_NT), inputs.mask_NT).detach(),
        ref_log_probs_NT=clean(inputs.ref_log_probs_NT),
        entropy_NT=clean(inputs.entropy_NT),
        full_kl_NT=clean(inputs.full_kl_NT),
        teacher_log_probs_NT=clean(inputs.teacher_log_probs_NT),
        divergence_NT=clean(inputs.divergence_NT),
    )


def at_least_float32(values: Tensor) -> Tensor:
    """Convert bfloat16 and float16 to float32, leaving wider types as they are."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
