"""The objective of a step: policy term, KL penalties, entropy bonus.

    objective = build_objective(config.algorithm, norm_length=config.sampling.max_tokens)
    statistics = objective.batch_statistics(whole_batch, seed) if objective.needs_batch_selection else None
    loss, sums = objective(inputs, totals, kl_coef, entropy_coef, statistics)

Notation: N rollouts, T loss-token positions after padding.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from covey.algorithm import metrics
from covey.algorithm.aggregation import Reduction, StepCounts, aggregate, divisor
from covey.algorithm.corrections import (
    Criterion,
    WeightOptions,
    importance_weights,
    m2po_keep,
    mean_weight,
    off_policy_keep,
    rejection_keep,
)
from covey.algorithm.kl import KLOptions, kl_penalty
from covey.algorithm.loss_inputs import (
    LossInputs,
    ObjectiveInputs,
    RatioOptions,
    apply_mask,
    at_least_float32,
    loss_inputs,
    select,
)
from covey.algorithm.losses import Loss
from covey.algorithm.metrics import largest_gap, largest_weight, mean_over
from covey.algorithm.teacher.terms import TeacherTerm, stale_weight, taught_of, teacher_sums
from covey.algorithm.token_selection import high_entropy_mask, high_entropy_threshold
from covey.system import custom


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """The decisions of rules over the whole batch, in batch order."""

    keep_NT: Tensor
    """bool: tokens that stay in the policy term."""
    selected_NT: Tensor
    """bool: tokens the loss treats apart (clip_cov, kl_cov)."""
    weight_mean: Tensor
    """Scalar by which importance weights are divided."""

    def rows(self, index_N: Tensor, num_columns: int) -> "BatchStatistics":
        """Return one micro-batch's rows, padded to `num_columns`."""
        return replace(
            self, keep_NT=self.keep_NT[index_N, :num_columns], selected_NT=self.selected_NT[index_N, :num_columns]
        )


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


@dataclass(frozen=True, slots=True)
class Objective:
    """A preset's complete loss, equal for every split; see `build_objective`."""

    loss: Loss
    """Loss function with its options bound."""
    ratio: RatioOptions
    denominator: str
    """Denominator of the importance ratio: a key of DENOMINATORS."""
    reduction: Reduction
    high_entropy_fraction: float
    """Share of the tokens in the policy term, those of highest entropy."""
    weights: WeightOptions | None
    """Weights that correct for the sampler; None does not correct."""
    criteria: tuple[Criterion, ...]
    sequence_delta: float | None
    m2po_threshold: float | None
    kl: KLTerms
    entropy_bonus: Reduction | None
    """Reduction of the tokens' entropies to one number; None without a bonus."""
    teacher: TeacherTerm | None = None
    reward_weight: float = 1.0
    """Factor of the advantages that rewards give."""
    supervised_coef: float = 0.0
    """Weight of the supervised term."""

    @property
    def needs_reference(self) -> bool:
        """Return True if `ref_log_probs_NT` (or reference logits) must be given."""
        return self.kl.active or self.denominator == "reference"

    @property
    def needs_old(self) -> bool:
        """Return True if log-probs before the first update are needed."""
        reads_ratio = self.loss.reads_old and self.denominator == "old"
        reads_weights = self.weights is not None or bool(self.criteria)
        is_weighted = self.kl.active and self.kl.in_loss and self.kl.options.gradient == "is_weighted"
        is_taught = self.teacher is not None and self.teacher.needs_old
        return reads_ratio or reads_weights or is_weighted or is_taught or self.m2po_threshold is not None

    @property
    def zero_advantage_is_free(self) -> bool:
        """Return True if rollouts of advantage 0 can be skipped."""
        # A KL in the reward has no gradient here, but what is measured of it steers its coefficient.
        others = self.kl.active or self.kl.sampler_coef != 0 or self.needs_entropy_gradient or self.teacher is not None
        return self.loss.proportional and not others and not self.needs_batch_selection

    @property
    def needs_entropy_gradient(self) -> bool:
        """Return True if `entropy_NT` must be given, with a gradient."""
        return self.entropy_bonus is not None

    @property
    def needs_full_kl(self) -> bool:
        """Return True if `full_kl_NT` must be given."""
        return self.kl.active and self.kl.full

    @property
    def needs_divergence(self) -> bool:
        """Return True if `divergence_NT` must be given."""
        return self.teacher is not None and self.teacher.kind == "divergence"

    @property
    def needs_batch_selection(self) -> bool:
        """Return True if `batch_statistics` is needed before each update."""
        normalizes = self.weights is not None and self.weights.self_normalize
        drops = self.m2po_threshold is not None or self.high_entropy_fraction < 1
        return normalizes or drops or self.loss.selector is not None

    @property
    def divisors(self) -> frozenset[str]:
        """Return the divisors of the loss terms (`aggregation.divisor`).

        With a single one, gradients may be accumulated before the counts are known.
        """
        penalised = (self.kl.active and self.kl.in_loss) or self.kl.sampler_coef != 0
        of_others = ([self.kl.reduction] if penalised else []) + ([self.entropy_bonus] if self.entropy_bonus else [])
        apart = {"taught": self.teacher is not None and self.teacher.own_totals, "supervised": self.supervised_coef > 0}
        return frozenset(
            (*map(divisor, (self.reduction, *of_others)), *(name for name, is_on in apart.items() if is_on))
        )

    def grad_is_known_before_forward(self, *, is_current: bool, old_is_given: bool) -> bool:
        """Return True if d loss / d log-prob is known before the forward pass.

        `is_current`: the policy is still the old policy, so their ratios are 1; `old_is_given`: the policy's log-probs
        are known with the old ones. A custom loss may read more; the result is checked.
        """
        if self.needs_entropy_gradient or self.needs_full_kl or self.needs_divergence:
            return False
        if is_current and old_is_given:
            return True
        if self.teacher is not None and (self.teacher.is_loss or self.teacher.base != "behaviour"):
            return False
        penalised = (self.kl.active and self.kl.in_loss) or self.kl.sampler_coef != 0
        corrected = self.weights is not None or self.sequence_delta is not None
        if penalised or corrected or self.criteria:
            return False
        return not self.loss.reads_old or (is_current and self.denominator == "old")

    @torch.no_grad()
    def batch_statistics(self, inputs: ObjectiveInputs, seed: int) -> BatchStatistics:
        """Apply the rules over the whole batch, rows in order, values detached.

        `inputs` holds the rows of all micro-batches and ranks.
        `seed` decides draws (clip_cov); pass another one at every step.
        """
        inputs = self._ready(inputs)
        keep_NT, weight_mean = inputs.mask_NT, inputs.log_probs_NT.new_ones(())
        # Drop the tokens farthest from the sampler (M2PO, arXiv 2510.01161)
        if self.m2po_threshold is not None:
            old_NT, sampler_NT = inputs.old_log_probs_NT, inputs.sampler_log_probs_NT
            keep_NT = m2po_keep(old_NT, sampler_NT, inputs.mask_NT, self.m2po_threshold)
        # Drop tokens of low entropy (arXiv 2506.01939)
        if self.high_entropy_fraction < 1:
            assert inputs.entropy_NT is not None, "high_entropy_fraction needs entropy_NT"
            valid_L = inputs.entropy_NT[inputs.mask_NT]
            threshold = high_entropy_threshold(valid_L, self.high_entropy_fraction)
            keep_NT = keep_NT & high_entropy_mask(inputs.entropy_NT, inputs.mask_NT, threshold)
        if self.weights is not None and self.weights.self_normalize:
            weights_NT = self._raw_weights(inputs, self.weights)
            weight_mean = mean_weight(weights_NT, inputs.mask_NT, self.weights.level)
        selected_NT = torch.zeros_like(inputs.mask_NT)
        if self.loss.selector is not None:
            selected_NT = self.loss.selector(self._loss_inputs(inputs, None), seed)
        return BatchStatistics(keep_NT, selected_NT, weight_mean)

    def kl_values(self, inputs: ObjectiveInputs) -> Tensor:
        """Return the KL to the reference, (N, T), nats, with its gradient. A reward penalty subtracts it."""
        if self.kl.full:
            assert inputs.full_kl_NT is not None, "kl_estimator=full needs full_kl_NT"
            return select(at_least_float32(inputs.full_kl_NT), inputs.mask_NT)
        assert inputs.ref_log_probs_NT is not None, "a KL to the reference needs ref_log_probs_NT"
        log_probs_NT, ref_NT = at_least_float32(inputs.log_probs_NT), at_least_float32(inputs.ref_log_probs_NT)
        return kl_penalty(log_probs_NT, ref_NT, inputs.mask_NT, self.kl.options, inputs.old_log_probs_NT)

    def __call__(
        self,
        inputs: ObjectiveInputs,
        totals: StepCounts,
        kl_coef: float = 0.0,
        entropy_coef: float = 0.0,
        statistics: BatchStatistics | None = None,
    ) -> tuple[Tensor, metrics.Sums]:
        """Return this micro-batch's share of the loss, and sums to log.

        Add both up over micro-batches and ranks (`metrics.combine`, `metrics.summarise`). `totals` are global and count
        tokens before any rejection, so that rejecting does not raise the step size.
        """
        assert statistics is not None or not self.needs_batch_selection, "this objective needs batch_statistics"
        inputs = self._ready(inputs)
        loss_in = self._loss_inputs(inputs, statistics)
        keep_NT, weights_NT = self._keep_and_weights(inputs, statistics)
        loss_NT, own = evaluate_loss(self.loss.function, loss_in)
        term_NT = torch.where(keep_NT, loss_NT * weights_NT, 0.0)
        pieces = self._policy_and_teacher(term_NT, inputs, weights_NT, totals)
        pieces |= self._penalties(inputs, totals, kl_coef, entropy_coef)
        if inputs.supervised_NT is not None:
            term = aggregate(-inputs.log_probs_NT, inputs.supervised_NT, totals.of("supervised"), self.reduction)
            pieces["supervised_loss"] = self.supervised_coef * term
        if inputs.balance_NT is not None:
            pieces["router_loss"] = aggregate(inputs.balance_NT, inputs.mask_NT, totals, self.reduction)
        loss = torch.stack(list(pieces.values())).sum()
        with torch.no_grad():
            sums = metrics.loss_terms(pieces | {"loss": loss}, inputs.mask_NT)
            sums |= self._log(inputs, loss_in, keep_NT, weights_NT)
            sums |= {f"loss/{name}": mean_over(values_NT, inputs.mask_NT) for name, values_NT in own.items()}
        return loss, sums

    def maxima(self, inputs: ObjectiveInputs) -> dict[str, Tensor]:
        """Return the largest ratio and sampler mismatch, to combine by max."""
        with torch.no_grad():
            loss_in = self._loss_inputs(self._ready(inputs), None)
            return {
                "ratio_max": largest_weight(loss_in.log_ratio, inputs.mask_NT),
                "mismatch_max": largest_gap(inputs.old_log_probs_NT, inputs.sampler_log_probs_NT, inputs.mask_NT),
            }

    def _ready(self, inputs: ObjectiveInputs) -> ObjectiveInputs:
        """Apply the mask, and add the teacher's advantages to those of rewards."""
        inputs = apply_mask(inputs)
        if self.reward_weight != 1:
            inputs = replace(inputs, advantages=self.reward_weight * inputs.advantages)
        if self.teacher is None or self.teacher.is_loss:
            return inputs
        given = inputs.advantages if inputs.advantages.ndim == 2 else inputs.advantages[:, None]
        added_NT = self.teacher.coef * self.teacher.function(taught_of(inputs))
        return replace(inputs, advantages=select(given.expand_as(added_NT), inputs.mask_NT) + added_NT)

    def _policy_and_teacher(
        self, term_NT: Tensor, inputs: ObjectiveInputs, weights_NT: Tensor, totals: StepCounts
    ) -> dict[str, Tensor]:
        """Return the losses of policy and teacher, both with the sampler's weights."""
        teacher, policys = self.teacher, (inputs.mask_NT, totals)
        if teacher is None:
            return {"policy_loss": aggregate(term_NT, *policys, self.reduction)}
        taught = taught_of(inputs)
        teachers = (taught.mask_NT, totals.of("taught")) if teacher.own_totals else policys
        if not teacher.is_loss:
            return {"policy_loss": aggregate(term_NT, *teachers, self.reduction)}
        values_NT = inputs.divergence_NT if teacher.kind == "divergence" else teacher.function(taught)
        assert values_NT is not None, "teacher_term=divergence needs divergence_NT"
        values_NT = select(values_NT * stale_weight(taught, teacher.largest_weight) * weights_NT, taught.mask_NT)
        rest = 1 - teacher.coef if teacher.is_convex else 1.0
        return {
            "policy_loss": rest * aggregate(term_NT, *policys, self.reduction),
            "teacher_loss": teacher.coef * aggregate(values_NT, *teachers, self.reduction),
        }

    def _penalties(
        self, inputs: ObjectiveInputs, totals: StepCounts, kl_coef: float, entropy_coef: float
    ) -> dict[str, Tensor]:
        pieces: dict[str, Tensor] = {}
        if self.kl.active and self.kl.in_loss and kl_coef != 0:
            kl_NT = self.kl_values(inputs)
            pieces["kl_loss"] = kl_coef * aggregate(kl_NT, inputs.mask_NT, totals, self.kl.reduction)
        if self.kl.sampler_coef != 0:
            sampler_NT = inputs.sampler_log_probs_NT
            kl_NT = kl_penalty(inputs.log_probs_NT, sampler_NT, inputs.mask_NT, self.kl.sampler_options)
            term = aggregate(kl_NT, inputs.mask_NT, totals, self.kl.reduction)
            pieces["sampler_kl_loss"] = self.kl.sampler_coef * term
        if entropy_coef != 0:
            assert inputs.entropy_NT is not None, "entropy_coef needs entropy_NT"
            assert self.entropy_bonus is not None, "entropy_coef needs a reduction"
            bonus = aggregate(inputs.entropy_NT, inputs.mask_NT, totals, self.entropy_bonus)
            pieces["entropy_loss"] = -entropy_coef * bonus
        return pieces

    def _keep_and_weights(self, inputs: ObjectiveInputs, statistics: BatchStatistics | None) -> tuple[Tensor, Tensor]:
        old_NT, sampler_NT, mask_NT = inputs.old_log_probs_NT, inputs.sampler_log_probs_NT, inputs.mask_NT
        keep_NT = mask_NT if statistics is None else mask_NT & statistics.keep_NT
        if self.criteria:
            keep_NT = keep_NT & rejection_keep(old_NT, sampler_NT, mask_NT, self.criteria)
        # Drop sequences of negative advantage far from the sampler (DeepSeek-V3.2, arXiv 2512.02556)
        if self.sequence_delta is not None:
            advantages_NT = self._loss_inputs(inputs, None).advantages_NT
            delta = self.sequence_delta
            keep_N = off_policy_keep(advantages_NT, inputs.log_probs_NT, sampler_NT, mask_NT, delta)
            keep_NT = keep_NT & keep_N[:, None]
        if self.weights is None:
            return keep_NT, torch.ones_like(old_NT)
        weights_NT = self._raw_weights(inputs, self.weights)
        weights_NT = weights_NT if statistics is None else weights_NT / statistics.weight_mean
        return keep_NT & (weights_NT > 0), weights_NT

    def _raw_weights(self, inputs: ObjectiveInputs, options: WeightOptions) -> Tensor:
        return importance_weights(inputs.old_log_probs_NT, inputs.sampler_log_probs_NT, inputs.mask_NT, options)

    def _loss_inputs(self, inputs: ObjectiveInputs, statistics: BatchStatistics | None) -> LossInputs:
        base_NT = DENOMINATORS[self.denominator](inputs)
        assert base_NT is not None, "ratio_denominator=reference needs ref_log_probs_NT"
        selected_NT = None if statistics is None else statistics.selected_NT
        return loss_inputs(inputs.log_probs_NT, base_NT, inputs.advantages, inputs.mask_NT, selected_NT, self.ratio)

    def _log(self, inputs: ObjectiveInputs, loss_in: LossInputs, keep_NT: Tensor, weights_NT: Tensor) -> metrics.Sums:
        mask_NT = inputs.mask_NT
        sums = metrics.ratio_sums(loss_in)
        sums |= metrics.mismatch_sums(inputs.old_log_probs_NT, inputs.sampler_log_probs_NT, mask_NT)
        sums |= metrics.weight_sums(inputs.log_probs_NT, inputs.sampler_log_probs_NT, mask_NT)
        sums["policy_token_fraction"] = mean_over(keep_NT, mask_NT)
        if self.loss.events is not None:
            sums |= metrics.event_sums(self.loss.events(loss_in), loss_in)
        if self.weights is not None:
            sums["correction_weight"] = mean_over(weights_NT, mask_NT)
        if inputs.entropy_NT is not None:
            sums["entropy"] = mean_over(inputs.entropy_NT, mask_NT)
        if self.teacher is not None:
            sums |= teacher_sums(inputs, self.teacher)
        if self.kl.active:
            kl_NT = self.kl_values(inputs)
            sums["kl"] = mean_over(kl_NT, mask_NT)
            sums["kl_sequence_mean"] = metrics.sequence_mean(kl_NT, mask_NT)
        return sums


def evaluate_loss(loss: Callable[[LossInputs], Any], inputs: LossInputs) -> tuple[Tensor, custom.Metrics]:
    """Return each token's loss, and a custom loss's metrics by name.

    Both are tensors (N, T).
    ValueError where a custom one returns anything but a number for each token, or one without the gradient of the
    log-probs where those have one.
    """
    found = loss(inputs)
    if not isinstance(loss, custom.Custom):
        return found, {}
    loss_NT, own = custom.split_metrics(found)
    shape = tuple(inputs.mask_NT.shape)
    own = {name: loss.check_tensor(values_NT, shape, "token") for name, values_NT in own.items()}
    loss_NT = loss.check_tensor(loss_NT, shape, "token")
    trains = torch.is_grad_enabled() and inputs.log_probs_NT.requires_grad
    if trains and not loss_NT.requires_grad:
        raise no_gradient(loss)
    return loss_NT, own


def no_gradient(loss: custom.Custom) -> ValueError:
    """Return the error for a custom loss without gradient."""
    return loss.error("depend on inputs.log_probs_NT, whose gradient trains", "a tensor without that gradient")


DENOMINATORS: dict[str, Callable[[ObjectiveInputs], Tensor | None]] = {
    "old": lambda inputs: inputs.old_log_probs_NT,
    "behaviour": lambda inputs: inputs.sampler_log_probs_NT,
    "reference": lambda inputs: inputs.ref_log_probs_NT,
}
"""Denominators of the importance ratio."""
