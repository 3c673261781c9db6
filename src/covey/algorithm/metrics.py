"""Metrics: pure functions of log-probs, rewards and lengths.

Metrics that are averaged over micro-batches and ranks are `Average`s, (numerator, denominator) pairs: add them up with
`merge`, divide once with `value`. A mean of means would weigh a short micro-batch like a long one. Masks are boolean,
True where the policy chose the token. Shapes: N rollouts, T loss-token positions after padding.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from covey.algorithm.corrections import row_mean
from covey.algorithm.credit.scores import Scores, center, count_scored, group_std, over_group
from covey.algorithm.kl import k3_forward
from covey.algorithm.loss_inputs import LossInputs, select
from covey.algorithm.losses import Events

LOG_RATIO_CLAMP = 20.0
"""Log ratios are clamped to +- this before exp, so that no metric overflows."""


class Average(NamedTuple):
    """A mean that is not divided yet. Both scalars, without gradient.

    >>> value(Average(torch.tensor(3.0), torch.tensor(4.0)))
    0.75
    """

    numerator: Tensor
    denominator: Tensor


Sums = dict[str, Average]
LOSS_TERMS = (
    *("loss", "policy_loss", "kl_loss", "sampler_kl_loss", "entropy_loss", "router_loss"),
    *("teacher_loss", "supervised_loss"),
)
"""Terms that the objective adds up."""
MEASURED = (*LOSS_TERMS[:2], "ratio", "approx_kl", "mismatch", "mismatch_kl", "entropy", "ess_fraction")
"""Metrics logged at every step: null where no token was scored."""
MAXIMA = ("ratio_max", "mismatch_max")
WEIGHT, SQUARE = "current_weight", "current_weight_square"
"""Sums that `ess_fraction` is made of, and that are not logged themselves."""
PER_UPDATE = ("loss", "entropy", "ratio", "ratio_max", "approx_kl", "clip_fraction", "ess_fraction", "grad_norm")
"""Metrics logged of the first and of the last update too, where a batch has several."""


def value(average: Average) -> float | None:
    """Divide numerator by denominator, None where there was nothing to average."""
    return float(average.numerator / average.denominator) if float(average.denominator) > 0 else None


def merge(parts: Iterable[Mapping[str, Average]]) -> dict[str, Average]:
    """Merge averages of micro-batches or ranks, summing numerators and denominators."""
    merged: dict[str, Average] = {}
    for part in parts:
        for name, average in part.items():
            seen = merged.get(name)
            merged[name] = average if seen is None else Average(seen[0] + average[0], seen[1] + average[1])
    return merged


def mean_over(values: Tensor, mask: Tensor) -> Average:
    """Average `values` where the mask is True, ignoring NaN elsewhere."""
    kept = select(values.detach(), mask)
    return Average(kept.sum(), mask.sum().to(kept.dtype))


def off_policy(log_probs_NT: Tensor, behaviour_NT: Tensor, mask_NT: Tensor) -> dict[str, Average]:
    """Return distances of the policy from the sampler, in nats.

    kl_k1 and kl_k3 estimate KL(behaviour || policy) over tokens; chi2_token and chi2_sequence are the mean squared
    ratio minus 1; weight_mean is the mean ratio; ppl and behaviour_ppl are means over sequences, log_ppl_abs_diff the
    mean absolute gap of their logarithms. Sequences without loss tokens are left out.
    """
    delta_NT = select(log_probs_NT.detach() - behaviour_NT, mask_NT)
    clamped_NT = delta_NT.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    sequence_N = delta_NT.sum(1).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    count_N = mask_NT.sum(1)
    present_N = count_N > 0
    policy_N = select(log_probs_NT.detach(), mask_NT).sum(1) / count_N.clamp(min=1)
    sampler_N = select(behaviour_NT, mask_NT).sum(1) / count_N.clamp(min=1)
    return {
        "kl_k1": mean_over(-delta_NT, mask_NT),
        "kl_k3": mean_over(clamped_NT.expm1() - clamped_NT, mask_NT),
        "weight_mean": mean_over(clamped_NT.exp(), mask_NT),
        "chi2_token": mean_over((2 * clamped_NT).expm1(), mask_NT),
        "chi2_sequence": mean_over((2 * sequence_N).expm1(), present_N),
        "ppl": mean_over(_perplexity(policy_N), present_N),
        "behaviour_ppl": mean_over(_perplexity(sampler_N), present_N),
        "log_ppl_abs_diff": mean_over((policy_N - sampler_N).abs(), present_N),
    }


def largest_gap(log_probs: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    """Return the largest |log-prob difference| in nats, 0 without tokens.

    Micro-batches and ranks combine by maximum.
    """
    gap = select(log_probs.detach() - behaviour, mask).abs()
    return gap.max() if gap.numel() else gap.new_zeros(())


def largest_weight(log_weights: Tensor, mask: Tensor) -> Tensor:
    """Return the largest importance weight, 0 without tokens; combine by maximum."""
    weights = torch.where(mask, log_weights.detach().clamp(max=LOG_RATIO_CLAMP).exp(), 0.0)
    return weights.max() if weights.numel() else weights.new_zeros(())


def group_metrics(
    scores: Scores, *, correct_from: float = 1.0, wrong_to: float = 0.0, atol: float = 1e-6
) -> dict[str, Average]:
    """Return the batch's learning signal.

    reward_mean over scored rollouts; mean_group_std (ddof 1) over groups with two scored; zero_std_fraction,
    all_correct_fraction (every reward >= correct_from) and all_wrong_fraction (<= wrong_to) over groups with any
    scored; unscored_fraction over rollouts. A group with one scored rollout counts as zero_std.
    """
    rewards_N, groups_N = scores.earned, scores.groups_N
    scored_N = ~rewards_N.isnan()
    count_N = count_scored(rewards_N, groups_N)
    # Each scored rollout speaks for 1 / count of its group, so that every group counts once.
    share_N = torch.where(scored_N, 1 / count_N.clamp(min=1), 0.0)
    center_N = center(rewards_N, groups_N)
    spread_N = over_group(center_N, groups_N, "amax") - over_group(center_N, groups_N, "amin")
    return {
        "reward_mean": mean_over(rewards_N, scored_N),
        "mean_group_std": _average(group_std(rewards_N, groups_N), torch.where(count_N > 1, share_N, 0.0)),
        "zero_std_fraction": _average(spread_N <= atol, share_N),
        "all_correct_fraction": _average(_whole_group(~scored_N | (rewards_N >= correct_from), groups_N), share_N),
        "all_wrong_fraction": _average(_whole_group(~scored_N | (rewards_N <= wrong_to), groups_N), share_N),
        "unscored_fraction": mean_over(1.0 - scores.scored.to(rewards_N.dtype), torch.ones_like(scored_N)),
    }


def sequence_mean(values_NT: Tensor, mask_NT: Tensor) -> Average:
    """Return the mean over non-empty sequences of their token means."""
    return mean_over(row_mean(values_NT.detach(), mask_NT), mask_NT.any(1))


def loss_terms(pieces: Mapping[str, Tensor], mask_NT: Tensor) -> Sums:
    """Return terms that global totals have already divided, as sums, not averages.

    The denominator only tells whether any token is in them. It must divide nothing, since rollouts without gradient may
    have been left out of it.
    """
    return {name: Average(piece.detach(), mask_NT.sum().to(piece.dtype)) for name, piece in pieces.items()}


def ratio_sums(inputs: LossInputs) -> Sums:
    """Return the mean importance ratio, and two estimates of KL(old || policy)."""
    delta_NT = inputs.delta.detach()
    return {
        "ratio": mean_over(inputs.ratio, inputs.mask_NT),
        "approx_kl": mean_over(k3_forward(delta_NT, LOG_RATIO_CLAMP), inputs.mask_NT),
        "approx_kl_k1": mean_over(-delta_NT, inputs.mask_NT),
    }


def mismatch_sums(old_NT: Tensor, sampler_NT: Tensor, mask_NT: Tensor) -> Sums:
    """Compare trainer and sampler: gap, `mismatch_kl`, weights, perplexity."""
    measures = off_policy(old_NT, sampler_NT, mask_NT)
    return {
        "mismatch": mean_over((old_NT - sampler_NT).abs(), mask_NT),
        "mismatch_kl": measures.pop("kl_k3"),
        **{f"sampler_{name}": average for name, average in measures.items()},
    }


def weight_sums(log_probs_NT: Tensor, sampler_NT: Tensor, mask_NT: Tensor) -> Sums:
    """Return importance weights of the sampler's tokens, and their squares."""
    delta_NT = select(log_probs_NT.detach() - sampler_NT, mask_NT).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return {WEIGHT: mean_over(delta_NT.exp(), mask_NT), SQUARE: mean_over((2 * delta_NT).exp(), mask_NT)}


def event_sums(events: Events, inputs: LossInputs) -> Sums:
    """Return the share of tokens, or sequences, with each event."""
    pair = mean_over if inputs.ratio_options.level == "token" else sequence_mean
    return {name: pair(event_NT, inputs.mask_NT) for name, event_NT in events.items()}


def combine(parts: Iterable[Mapping[str, tuple[Tensor, Tensor]]]) -> Sums:
    """Add the sums of several micro-batches or ranks. Plain pairs, as they come back from a reduction, will do."""
    return merge({name: Average(*pair) for name, pair in part.items()} for part in parts)


def largest(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest value of each name over several micro-batches."""
    found: dict[str, float] = {}
    for part in parts:
        found |= {name: max(value, found.get(name, value)) for name, value in part.items()}
    return found


def summarise(sums: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return the numbers to log from complete sums, leaving out empty ones.

    `ess_fraction` is the effective sample size of the sampler's tokens over their number (Kong, 1992), weighed by the
    policy as it is in each update: 1 on-policy.
    """
    values = {name: float(n if name in LOSS_TERMS else n / d) for name, (n, d) in sums.items() if float(d) > 0}
    weight, square = values.pop(WEIGHT, 0.0), values.pop(SQUARE, 0.0)
    if square > 0:
        values["ess_fraction"] = min(1.0, weight**2 / square)
    return values


class Update(NamedTuple):
    """Measurements of one optimiser step."""

    sums: Sums
    """Sums over all micro-batches and ranks, not divided yet."""
    metrics: Mapping[str, float]
    """All that is logged of it, those sums divided."""


def over_updates(updates: Sequence[Update]) -> dict[str, float]:
    """Combine a batch's updates: means, largest maximum, number skipped.

    Means are over tokens, those of losses over updates.
    With several updates `first_update/NAME` and `last_update/NAME` tell how far they went.
    """
    found = [update.metrics for update in updates]
    names = dict.fromkeys(name for metrics in found for name in metrics)
    columns = {name: [metrics[name] for metrics in found if name in metrics] for name in names}
    combined = {name: sum(values) / len(values) for name, values in columns.items()}
    of_tokens = summarise(merge(update.sums for update in updates))
    combined |= {name: value for name, value in of_tokens.items() if name not in LOSS_TERMS}
    combined |= {name: max(columns[name]) for name in MAXIMA if name in columns}
    combined["skipped"] = sum(columns["skipped"])
    if len(updates) > 1:
        for place, metrics in (("first_update", found[0]), ("last_update", found[-1])):
            combined |= {f"{place}/{name}": metrics[name] for name in PER_UPDATE if name in metrics}
    return combined


def _perplexity(log_prob: Tensor) -> Tensor:
    """Return the perplexity of a mean log-prob, cut at e^20.

    That is beyond any vocabulary, so one absurd sequence leaves the mean finite.
    """
    return (-log_prob).clamp(max=LOG_RATIO_CLAMP).exp()


def _whole_group(flag_N: Tensor, groups_N: Tensor) -> Tensor:
    return over_group(flag_N.to(torch.float64), groups_N, "amin") > 0


def _average(values_N: Tensor, weights_N: Tensor) -> Average:
    return Average((values_N * weights_N).sum(), weights_N.sum())
