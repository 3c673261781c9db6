"""The parts of the objective: what it reads, what it is made of, what was decided about the whole batch.

Notation: N rollouts, T loss-token positions after padding.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from covey.aggregation import Reduction
from covey.corrections import Criterion, WeightOptions
from covey.kl import KLOptions
from covey.loss_events import Events
from covey.losses import LossInputs, at_least_float32
from covey.ratio import RatioOptions, select


@dataclass(frozen=True, slots=True)
class ObjectiveInputs:
    """Rollouts with everything the objective may read, tensors (N, T); None where `needs_...` says it does not.

    Outside the mask anything may stand, NaN included. Before the first update on a batch `old_log_probs_NT` is
    `log_probs_NT.detach()`.
    """

    log_probs_NT: Tensor
    """Of the sampled tokens under the policy, with gradient."""
    old_log_probs_NT: Tensor
    """Under the trainer's weights before the first update on this batch."""
    sampler_log_probs_NT: Tensor
    """As the engine recorded them."""
    advantages: Tensor
    """(N,) or (N, T)."""
    mask_NT: Tensor
    """bool: the loss tokens."""
    ref_log_probs_NT: Tensor | None = None
    entropy_NT: Tensor | None = None
    """Of the policy at each position, nats; with gradient where `needs_entropy_gradient`."""
    full_kl_NT: Tensor | None = None
    """Exact KL(policy || reference) at each position (`kl.full_kl`), with gradient."""

    def to(self, device: torch.device) -> "ObjectiveInputs":
        """Return the same rows on another device."""

        def moved(values_NT: Tensor | None) -> Tensor | None:
            return None if values_NT is None else values_NT.to(device)

        return ObjectiveInputs(
            log_probs_NT=self.log_probs_NT.to(device),
            old_log_probs_NT=self.old_log_probs_NT.to(device),
            sampler_log_probs_NT=self.sampler_log_probs_NT.to(device),
            advantages=self.advantages.to(device),
            mask_NT=self.mask_NT.to(device),
            ref_log_probs_NT=moved(self.ref_log_probs_NT),
            entropy_NT=moved(self.entropy_NT),
            full_kl_NT=moved(self.full_kl_NT),
        )


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """What rules over the whole batch decided, for its rows in batch order."""

    keep_NT: Tensor
    """bool: tokens that stay in the policy term."""
    selected_NT: Tensor
    """bool: tokens the loss treats apart (clip_cov, kl_cov)."""
    weight_mean: Tensor
    """Scalar by which importance weights are divided."""

    def rows(self, index_N: Tensor, num_columns: int) -> "BatchStatistics":
        """Those of one micro-batch: its rows of the batch, padded to `num_columns`."""
        return replace(
            self,
            keep_NT=self.keep_NT[index_N, :num_columns],
            selected_NT=self.selected_NT[index_N, :num_columns],
        )


@dataclass(frozen=True, slots=True)
class PolicyTerm:
    """The loss with its options bound, what it logs, and what it is taken against."""

    loss: Callable[[LossInputs], Tensor]
    events: Callable[[LossInputs], Events] | None
    selector: Callable[[LossInputs, int], Tensor] | None
    ratio: RatioOptions
    denominator: str
    """A key of DENOMINATORS."""
    proportional: bool
    """True for a loss that is a multiple of the advantage."""
    reads_old: bool
    """False for a loss that never forms a ratio."""
    reduction: Reduction
    high_entropy_fraction: float
    """Share of the tokens in the policy term, those of highest entropy."""


@dataclass(frozen=True, slots=True)
class OffPolicy:
    """How the policy term is corrected for the sampler; None or () is off."""

    weights: WeightOptions | None
    criteria: tuple[Criterion, ...]
    sequence_delta: float | None
    m2po_threshold: float | None


@dataclass(frozen=True, slots=True)
class KLTerms:
    """The penalties for leaving the reference and the sampler."""

    active: bool
    in_loss: bool
    full: bool
    """Exact over the vocabulary instead of `options`."""
    options: KLOptions
    sampler_coef: float
    sampler_options: KLOptions
    reduction: Reduction


def cleaned(inputs: ObjectiveInputs) -> ObjectiveInputs:
    """Select every tensor by the mask, in float32 at least, before anything is computed from it."""

    def clean(values_NT: Tensor | None) -> Tensor | None:
        return None if values_NT is None else select(at_least_float32(values_NT), inputs.mask_NT)

    return replace(
        inputs,
        log_probs_NT=select(at_least_float32(inputs.log_probs_NT), inputs.mask_NT),
        old_log_probs_NT=select(at_least_float32(inputs.old_log_probs_NT), inputs.mask_NT).detach(),
        sampler_log_probs_NT=select(at_least_float32(inputs.sampler_log_probs_NT), inputs.mask_NT).detach(),
        ref_log_probs_NT=clean(inputs.ref_log_probs_NT),
        entropy_NT=clean(inputs.entropy_NT),
        full_kl_NT=clean(inputs.full_kl_NT),
    )


DENOMINATORS: dict[str, Callable[[ObjectiveInputs], Tensor | None]] = {
    "old": lambda inputs: inputs.old_log_probs_NT,
    "behaviour": lambda inputs: inputs.sampler_log_probs_NT,
    "reference": lambda inputs: inputs.ref_log_probs_NT,
}
"""What the importance ratio is taken against."""
