"""The whole objective of an optimiser step: policy term, KL to the reference, KL to the sampler, entropy bonus.

    objective = build_objective(config.algorithm, norm_length=config.sampling.max_tokens)
    statistics = objective.batch_statistics(whole_batch, seed) if objective.needs_batch_selection else None
    loss, sums = objective(inputs, totals, kl_coef, entropy_coef, statistics)

Notation: N rollouts, T loss-token positions after padding.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from covey import custom
from covey import objective_metrics as metrics
from covey.aggregation import AGGREGATIONS, Reduction, Totals, aggregate
from covey.algorithm_config import AlgorithmConfig
from covey.batch_rules import SELECTORS
from covey.corrections import (
    WeightOptions,
    importance_weights,
    m2po_keep,
    mean_weight,
    off_policy_keep,
    parse_rejection,
    rejection_keep,
)
from covey.diagnostics import largest_gap, largest_weight, mean_over
from covey.kl import ESTIMATORS, GRADIENTS, SAMPLER_ESTIMATORS, KLOptions, kl_penalty
from covey.loss_events import EVENTS
from covey.losses import (
    LOSSES,
    PROPORTIONAL_LOSSES,
    RATIO_FREE_LOSSES,
    RATIO_LEVEL_LOSSES,
    LossInputs,
    at_least_float32,
    loss_inputs,
)
from covey.masks import high_entropy_mask, high_entropy_threshold
from covey.objective_terms import (
    DENOMINATORS,
    BatchStatistics,
    KLTerms,
    ObjectiveInputs,
    OffPolicy,
    PolicyTerm,
    cleaned,
)
from covey.ratio import LEVELS, RatioOptions, select
from covey.tables import check_options, one_of, resolve

TOKEN_MEAN = Reduction("token_mean")


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss of everything an algorithm preset names, the same for every split of the batch. See `build_objective`."""

    policy: PolicyTerm
    off_policy: OffPolicy
    kl: KLTerms
    entropy_bonus: bool

    @property
    def needs_reference(self) -> bool:
        """`ref_log_probs_NT` (with `needs_full_kl`: reference logits) must be given."""
        return self.kl.active or self.policy.denominator == "reference"

    @property
    def needs_old(self) -> bool:
        """Several updates on one batch need the log-probs from before the first."""
        reads_ratio = self.policy.reads_old and self.policy.denominator == "old"
        reads_weights = self.off_policy.weights is not None or bool(self.off_policy.criteria)
        is_weighted = self.kl.active and self.kl.in_loss and self.kl.options.gradient == "is_weighted"
        return reads_ratio or reads_weights or is_weighted or self.off_policy.m2po_threshold is not None

    @property
    def zero_advantage_is_free(self) -> bool:
        """A rollout of advantage 0 has no gradient and decides nothing for others: the work on it can be saved."""
        # A KL in the reward has no gradient here, but what is measured of it steers its coefficient.
        others = self.kl.active or self.kl.sampler_coef != 0 or self.entropy_bonus
        return self.policy.proportional and not others and not self.needs_batch_selection

    @property
    def needs_entropy(self) -> bool:
        """`entropy_NT` must be given."""
        return self.entropy_bonus or self.policy.high_entropy_fraction < 1

    @property
    def needs_entropy_gradient(self) -> bool:
        """`entropy_NT` must carry a gradient."""
        return self.entropy_bonus

    @property
    def needs_full_kl(self) -> bool:
        """`full_kl_NT` must be given."""
        return self.kl.active and self.kl.full

    @property
    def needs_batch_selection(self) -> bool:
        """A rule looks at the whole batch: call `batch_statistics` before each update."""
        normalizes = self.off_policy.weights is not None and self.off_policy.weights.self_normalize
        drops = self.off_policy.m2po_threshold is not None or self.policy.high_entropy_fraction < 1
        return normalizes or drops or self.policy.selector is not None

    def knows_gradient(self, *, is_current: bool, old_is_given: bool) -> bool:
        """d loss / d log-prob of each token follows before the policy's pass, from anything in the log-probs' place.

        `is_current`: the policy is still the old policy, so every ratio of the two is 1; `old_is_given`: with its
        log-probs, the policy's own are known as well. A loss of one's own may read more; what comes of this is checked.
        """
        if self.needs_entropy_gradient or self.needs_full_kl:
            return False
        if is_current and old_is_given:
            return True
        penalised = (self.kl.active and self.kl.in_loss) or self.kl.sampler_coef != 0
        corrected = self.off_policy.weights is not None or self.off_policy.sequence_delta is not None
        if penalised or corrected or self.off_policy.criteria:
            return False
        return not self.policy.reads_old or (is_current and self.policy.denominator == "old")

    @torch.no_grad()
    def batch_statistics(self, inputs: ObjectiveInputs, seed: int) -> BatchStatistics:
        """Apply the rules over the whole batch: rows of all micro-batches and ranks, in batch order, values detached.

        `seed` decides draws (clip_cov); pass another one at every step.
        """
        inputs = cleaned(inputs)
        keep_NT, weight_mean = inputs.mask_NT, inputs.log_probs_NT.new_ones(())
        if self.off_policy.m2po_threshold is not None:
            old_NT, sampler_NT = inputs.old_log_probs_NT, inputs.sampler_log_probs_NT
            keep_NT = m2po_keep(old_NT, sampler_NT, inputs.mask_NT, self.off_policy.m2po_threshold)
        if self.policy.high_entropy_fraction < 1:
            assert inputs.entropy_NT is not None, "high_entropy_fraction needs entropy_NT"
            valid_L = inputs.entropy_NT[inputs.mask_NT]
            threshold = high_entropy_threshold(valid_L, self.policy.high_entropy_fraction)
            keep_NT = keep_NT & high_entropy_mask(inputs.entropy_NT, inputs.mask_NT, threshold)
        if self.off_policy.weights is not None and self.off_policy.weights.self_normalize:
            weights_NT = self._raw_weights(inputs, self.off_policy.weights)
            weight_mean = mean_weight(weights_NT, inputs.mask_NT, self.off_policy.weights.level)
        selected_NT = torch.zeros_like(inputs.mask_NT)
        if self.policy.selector is not None:
            selected_NT = self.policy.selector(self._loss_inputs(inputs, None), seed)
        return BatchStatistics(keep_NT, selected_NT, weight_mean)

    def kl_values(self, inputs: ObjectiveInputs) -> Tensor:
        """KL to the reference at every loss token, (N, T), nats, with its gradient: what a reward penalty subtracts."""
        if self.kl.full:
            assert inputs.full_kl_NT is not None, "kl_estimator=full needs full_kl_NT"
            return select(at_least_float32(inputs.full_kl_NT), inputs.mask_NT)
        assert inputs.ref_log_probs_NT is not None, "a KL to the reference needs ref_log_probs_NT"
        log_probs_NT, ref_NT = at_least_float32(inputs.log_probs_NT), at_least_float32(inputs.ref_log_probs_NT)
        return kl_penalty(log_probs_NT, ref_NT, inputs.mask_NT, self.kl.options, inputs.old_log_probs_NT)

    def __call__(
        self,
        inputs: ObjectiveInputs,
        totals: Totals,
        kl_coef: float = 0.0,
        entropy_coef: float = 0.0,
        statistics: BatchStatistics | None = None,
    ) -> tuple[Tensor, metrics.Sums]:
        """This micro-batch's share of the loss, and (numerator, denominator) pairs to log.

        Add both up over micro-batches and ranks (`metrics.combine`, `metrics.summarise`). `totals` are global and count
        tokens before any rejection, so that rejecting does not raise the step size.
        """
        assert statistics is not None or not self.needs_batch_selection, "this objective needs batch_statistics"
        inputs = cleaned(inputs)
        loss_in = self._loss_inputs(inputs, statistics)
        keep_NT, weights_NT = self._keep_and_weights(inputs, statistics)
        loss_NT, own = evaluate_loss(self.policy.loss, loss_in)
        term_NT = torch.where(keep_NT, loss_NT * weights_NT, 0.0)
        pieces = {"policy_loss": aggregate(term_NT, inputs.mask_NT, totals, self.policy.reduction)}
        pieces |= self._penalties(inputs, totals, kl_coef, entropy_coef)
        loss = torch.stack(list(pieces.values())).sum()
        with torch.no_grad():
            sums = metrics.loss_terms(pieces | {"loss": loss}, inputs.mask_NT)
            sums |= self._log(inputs, loss_in, keep_NT, weights_NT)
            sums |= {f"loss/{name}": mean_over(values_NT, inputs.mask_NT) for name, values_NT in own.items()}
        return loss, sums

    def maxima(self, inputs: ObjectiveInputs) -> dict[str, Tensor]:
        """The largest ratio and sampler mismatch: combine over micro-batches and ranks with max, not with a sum."""
        with torch.no_grad():
            loss_in = self._loss_inputs(cleaned(inputs), None)
            return {
                "ratio_max": largest_weight(loss_in.log_ratio, inputs.mask_NT),
                "mismatch_max": largest_gap(inputs.old_log_probs_NT, inputs.sampler_log_probs_NT, inputs.mask_NT),
            }

    def _penalties(
        self, inputs: ObjectiveInputs, totals: Totals, kl_coef: float, entropy_coef: float
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
            pieces["entropy_loss"] = -entropy_coef * aggregate(inputs.entropy_NT, inputs.mask_NT, totals, TOKEN_MEAN)
        return pieces

    def _keep_and_weights(self, inputs: ObjectiveInputs, statistics: BatchStatistics | None) -> tuple[Tensor, Tensor]:
        old_NT, sampler_NT, mask_NT = inputs.old_log_probs_NT, inputs.sampler_log_probs_NT, inputs.mask_NT
        keep_NT = mask_NT if statistics is None else mask_NT & statistics.keep_NT
        if self.off_policy.criteria:
            keep_NT = keep_NT & rejection_keep(old_NT, sampler_NT, mask_NT, self.off_policy.criteria)
        if self.off_policy.sequence_delta is not None:
            advantages_NT = self._loss_inputs(inputs, None).advantages_NT
            delta = self.off_policy.sequence_delta
            keep_N = off_policy_keep(advantages_NT, inputs.log_probs_NT, sampler_NT, mask_NT, delta)
            keep_NT = keep_NT & keep_N[:, None]
        if self.off_policy.weights is None:
            return keep_NT, torch.ones_like(old_NT)
        weights_NT = self._raw_weights(inputs, self.off_policy.weights)
        weights_NT = weights_NT if statistics is None else weights_NT / statistics.weight_mean
        return keep_NT & (weights_NT > 0), weights_NT

    def _raw_weights(self, inputs: ObjectiveInputs, options: WeightOptions) -> Tensor:
        return importance_weights(inputs.old_log_probs_NT, inputs.sampler_log_probs_NT, inputs.mask_NT, options)

    def _loss_inputs(self, inputs: ObjectiveInputs, statistics: BatchStatistics | None) -> LossInputs:
        base_NT = DENOMINATORS[self.policy.denominator](inputs)
        assert base_NT is not None, "ratio_denominator=reference needs ref_log_probs_NT"
        selected_NT = None if statistics is None else statistics.selected_NT
        return loss_inputs(
            inputs.log_probs_NT, base_NT, inputs.advantages, inputs.mask_NT, selected_NT, self.policy.ratio
        )

    def _log(self, inputs: ObjectiveInputs, loss_in: LossInputs, keep_NT: Tensor, weights_NT: Tensor) -> metrics.Sums:
        mask_NT = inputs.mask_NT
        sums = metrics.ratio_sums(loss_in)
        sums |= metrics.mismatch_sums(inputs.old_log_probs_NT, inputs.sampler_log_probs_NT, mask_NT)
        sums["policy_token_fraction"] = mean_over(keep_NT, mask_NT)
        if self.policy.events is not None:
            sums |= metrics.event_sums(self.policy.events(loss_in), loss_in)
        if self.off_policy.weights is not None:
            sums["correction_weight"] = mean_over(weights_NT, mask_NT)
        if inputs.entropy_NT is not None:
            sums["entropy"] = mean_over(inputs.entropy_NT, mask_NT)
        if self.kl.active:
            kl_NT = self.kl_values(inputs)
            sums["kl"] = mean_over(kl_NT, mask_NT)
            sums["kl_sequence_mean"] = metrics.sequence_mean(kl_NT, mask_NT)
        return sums


def evaluate_loss(loss: Callable[[LossInputs], Any], inputs: LossInputs) -> tuple[Tensor, custom.Metrics]:
    """Return the loss of each token, and what a custom loss logs: a tensor (N, T) by name.

    ValueError where a custom one returns anything but a number for each token.
    """
    found = loss(inputs)
    if not isinstance(loss, custom.Custom):
        return found, {}
    loss_NT, own = custom.split_metrics(found)
    shape = tuple(inputs.mask_NT.shape)
    own = {name: loss.check_tensor(values_NT, shape, "token") for name, values_NT in own.items()}
    return loss.check_tensor(loss_NT, shape, "token"), own


def build_objective(algorithm: AlgorithmConfig, norm_length: int) -> Objective:
    """Resolve every name of a preset and check its options now, not at the first step.

    `norm_length` is the constant length of the *_norm aggregations where the preset sets none. ValueError names the
    setting to mend.
    """
    _positive("norm_length", algorithm.norm_length)
    length = norm_length if algorithm.norm_length is None else algorithm.norm_length
    return Objective(
        policy=_policy_term(algorithm, length),
        off_policy=_off_policy(algorithm),
        kl=_kl_terms(algorithm, length),
        entropy_bonus=algorithm.entropy_coef != 0 or algorithm.target_entropy is not None,
    )


def _policy_term(algorithm: AlgorithmConfig, norm_length: int) -> PolicyTerm:
    name = algorithm.loss
    one_of("ratio", algorithm.ratio, LEVELS)
    one_of("ratio_denominator", algorithm.ratio_denominator, DENOMINATORS)
    if name in LOSSES and name not in RATIO_LEVEL_LOSSES and algorithm.ratio != "token":
        raise ValueError(
            f"ratio={algorithm.ratio} needs loss={' or '.join(sorted(RATIO_LEVEL_LOSSES))}, got loss={name}"
        )
    if not 0 < algorithm.high_entropy_fraction <= 1:
        raise ValueError(f"high_entropy_fraction must be in (0, 1], got {algorithm.high_entropy_fraction}")
    selector, events = SELECTORS.get(name), EVENTS.get(name)
    one_of_or_custom("loss", name, LOSSES)
    loss_options, selector_options = _split_options(dict(algorithm.loss_options), resolve(name, LOSSES), selector)
    return PolicyTerm(
        loss=custom.lookup(custom.LOSS, name, LOSSES, loss_options),
        events=None if events is None else partial(events, **loss_options),
        selector=None if selector is None else partial(selector, **selector_options),
        ratio=RatioOptions(algorithm.ratio, _positive("log_ratio_clamp", algorithm.log_ratio_clamp)),
        denominator=algorithm.ratio_denominator,
        proportional=name in PROPORTIONAL_LOSSES,
        reads_old=name not in RATIO_FREE_LOSSES,
        reduction=Reduction(
            one_of_or_custom("aggregation", algorithm.aggregation, AGGREGATIONS), norm_length, algorithm.count_empty
        ),
        high_entropy_fraction=algorithm.high_entropy_fraction,
    )


def _split_options(
    options: dict[str, Any], loss: Callable[..., Any], selector: Callable[..., Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of the loss and those of its whole-batch selector, which may share some; unknown ones are refused."""
    known = set() if selector is None else {p.name for p in _keywords(selector)}
    own = {p.name for p in _keywords(loss)}
    loss_options = {key: value for key, value in options.items() if key in own or key not in known}
    check_options(loss, loss_options, setting="loss_options")
    return loss_options, {key: value for key, value in options.items() if key in known}


def _keywords(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]


def _off_policy(algorithm: AlgorithmConfig) -> OffPolicy:
    weights = None
    if algorithm.correction != "none":
        if algorithm.ratio_denominator == "behaviour":
            raise ValueError(f"correction={algorithm.correction} needs ratio_denominator=old, got behaviour")
        weights = WeightOptions(
            level=algorithm.correction_level,
            mode=algorithm.correction,
            min=algorithm.correction_min,
            max=algorithm.correction_max,
            self_normalize=algorithm.correction_self_normalize,
            log_ratio_clamp=algorithm.log_ratio_clamp,
        )
    return OffPolicy(
        weights=weights,
        criteria=parse_rejection(algorithm.rejection, algorithm.rejection_thresholds),
        sequence_delta=algorithm.off_policy_mask_delta,
        m2po_threshold=_positive("m2po_threshold", algorithm.m2po_threshold),
    )


def _kl_terms(algorithm: AlgorithmConfig, norm_length: int) -> KLTerms:
    full = algorithm.kl_estimator == "full"
    one_of("kl_in", algorithm.kl_in, ("loss", "reward"))
    one_of("kl_gradient", algorithm.kl_gradient, (*GRADIENTS, "is_weighted"))
    one_of("sampler_kl_estimator", algorithm.sampler_kl_estimator, SAMPLER_ESTIMATORS)
    if not full:
        one_of_or_custom("kl_estimator", algorithm.kl_estimator, ESTIMATORS)
    if full and algorithm.kl_gradient == "is_weighted":
        raise ValueError("kl_gradient=is_weighted needs a sampled kl_estimator such as k3, got kl_estimator=full")
    if algorithm.kl_in == "reward" and algorithm.kl_aggregation is not None and algorithm.sampler_kl_coef == 0:
        raise ValueError(f"kl_aggregation={algorithm.kl_aggregation} needs kl_in=loss, got kl_in=reward")
    mode = one_of_or_custom("kl_aggregation", algorithm.kl_aggregation or algorithm.aggregation, AGGREGATIONS)
    return KLTerms(
        active=algorithm.kl_coef != 0 or algorithm.target_kl is not None,
        in_loss=algorithm.kl_in == "loss",
        full=full,
        options=KLOptions(
            estimator="k3" if full else algorithm.kl_estimator,
            gradient=algorithm.kl_gradient,
            clamp_log_ratio=_positive("kl_clamp", algorithm.kl_clamp),
        ),
        sampler_coef=algorithm.sampler_kl_coef,
        sampler_options=KLOptions(SAMPLER_ESTIMATORS[algorithm.sampler_kl_estimator], "naive", algorithm.kl_clamp),
        reduction=Reduction(mode, norm_length, algorithm.count_empty),
    )


def one_of_or_custom(setting: str, name: str, table: Mapping[str, Callable[..., Any]]) -> str:
    """Return `name`, or raise ValueError where it is neither an entry of `table` nor a function that is there."""
    if ":" not in name:
        return one_of(setting, name, (*table, "module:function"))
    resolve(name, table)
    return name


def _positive(name: str, value: float | None) -> float | None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be > 0, got {value}")
    return value
