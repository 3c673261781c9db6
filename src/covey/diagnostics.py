"""Everything that is measured and logged: pure functions of log-probs, rewards and lengths.

Metrics that are averaged over micro-batches and ranks are `Average`s, (numerator, denominator) pairs: add them up with
`merge`, divide once with `value`. A mean of means would weigh a short micro-batch like a long one. Masks are boolean,
True where the policy chose the token. Shapes: N rollouts, T loss-token positions after padding.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import NamedTuple

import torch
from torch import Tensor

from covey.ratio import select
from covey.scores import Scores, center, count_scored, group_std, over_group

LOG_RATIO_CLAMP = 20.0
"""Log ratios are clamped to +- this before exp, so that no metric overflows."""
MAX_SUBSETS = 1_000_000
"""How many subsets `maj_at_k` will look at."""


class Average(NamedTuple):
    """A mean that is not divided yet; both scalars, without gradient.

    >>> value(Average(torch.tensor(3.0), torch.tensor(4.0)))
    0.75
    """

    numerator: Tensor
    denominator: Tensor


def value(average: Average) -> float | None:
    """Divide numerator by denominator; None where there was nothing to average."""
    return float(average.numerator / average.denominator) if float(average.denominator) > 0 else None


def merge(parts: Iterable[Mapping[str, Average]]) -> dict[str, Average]:
    """The averages of several micro-batches or ranks as one: numerators and denominators are summed."""
    merged: dict[str, Average] = {}
    for part in parts:
        for name, average in part.items():
            seen = merged.get(name)
            merged[name] = average if seen is None else Average(seen[0] + average[0], seen[1] + average[1])
    return merged


def mean_over(values: Tensor, mask: Tensor) -> Average:
    """Mean of `values` where the mask is True, of any shape; NaN elsewhere does not matter."""
    kept = select(values.detach(), mask)
    return Average(kept.sum(), mask.sum().to(kept.dtype))


def clip_fractions(
    ratio: Tensor, advantages: Tensor, mask: Tensor, *, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> dict[str, Average]:
    """Share of entries whose gradient the clip cuts off; tokens (N, T), or sequences (N,) for sequence ratios.

    clip_low: ratio below 1 - eps_low and advantage < 0; clip_high: above 1 + eps_high and advantage > 0;
    clip_fraction: either. out_of_range_fraction ignores the sign. dual_clip_fraction: advantage < 0 and ratio above
    dual_clip.
    """
    below, above = ratio < 1 - eps_low, ratio > 1 + eps_high
    low, high = below & (advantages < 0), above & (advantages > 0)
    events = {
        "clip_low": low,
        "clip_high": high,
        "clip_fraction": low | high,
        "out_of_range_fraction": below | above,
    }
    if dual_clip is not None:
        events["dual_clip_fraction"] = (advantages < 0) & (ratio > dual_clip)
    return {name: mean_over(event.to(ratio.dtype), mask) for name, event in events.items()}


def off_policy(log_probs_NT: Tensor, behaviour_NT: Tensor, mask_NT: Tensor) -> dict[str, Average]:
    """How far the policy is from the one that sampled, in nats.

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
    """Largest |log-prob difference| in nats, a scalar; 0 without tokens. Micro-batches and ranks combine by maximum."""
    gap = select(log_probs.detach() - behaviour, mask).abs()
    return gap.max() if gap.numel() else gap.new_zeros(())


def largest_weight(log_weights: Tensor, mask: Tensor) -> Tensor:
    """Largest importance weight, a scalar; 0 without tokens. Micro-batches and ranks combine by maximum."""
    weights = torch.where(mask, log_weights.detach().clamp(max=LOG_RATIO_CLAMP).exp(), 0.0)
    return weights.max() if weights.numel() else weights.new_zeros(())


class EssTerms(NamedTuple):
    """What an effective sample size needs from each micro-batch; scalars, sums of weights as logarithms."""

    log_sum: Tensor
    log_sum_of_squares: Tensor
    num_weights: Tensor


def ess_terms(log_weights: Tensor, mask: Tensor) -> EssTerms:
    """Terms of the weights under the mask: tokens (N, T), or one log weight for each sequence (N,)."""
    kept = log_weights.detach()[mask]
    return EssTerms(kept.logsumexp(0), (2 * kept).logsumexp(0), mask.sum())


def merge_ess(terms: Sequence[EssTerms]) -> EssTerms:
    """The terms of several micro-batches or ranks as one; of at least one."""
    return EssTerms(
        torch.stack([t.log_sum for t in terms]).logsumexp(0),
        torch.stack([t.log_sum_of_squares for t in terms]).logsumexp(0),
        torch.stack([t.num_weights for t in terms]).sum(),
    )


def effective_sample_size(terms: EssTerms) -> tuple[float, float]:
    """((sum w)^2 / sum w^2, the same over the count): how many equally weighted samples these are worth.

    (count, 1) on-policy, (0, 0) without any.
    """
    count = int(terms.num_weights)
    if not count:
        return 0.0, 0.0
    ess = float((2 * terms.log_sum - terms.log_sum_of_squares).exp())
    return ess, ess / count


def staleness(versions: Sequence[int], current_version: int) -> dict[str, float]:
    """Mean and largest number of optimiser steps between the weights that sampled and those being trained."""
    lags = [current_version - version for version in versions]
    return {"lag_mean": sum(lags) / len(lags) if lags else 0.0, "lag_max": float(max(lags, default=0))}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k attempts is correct, from c correct of n: unbiased (arXiv 2107.03374).

    ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"k must be in [1, num_samples={n}], got {k}")
    if not 0 <= c <= n:
        raise ValueError(f"num_correct must be in [0, num_samples={n}], got {c}")
    # 1 - C(n-c, k) / C(n, k); Python divides the two integers exactly, however long they are.
    return (comb(n, k) - comb(n - c, k)) / comb(n, k)


def avg_at_k(rewards: Sequence[Sequence[float]]) -> tuple[float, list[float]]:
    """(mean over prompts of the mean reward over attempts, those means); NaN rewards are left out.

    A prompt without any reward has mean NaN and is left out of the first.
    """
    per_prompt = [float(torch.tensor(list(row), dtype=torch.float64).nanmean()) for row in rewards]
    known = [mean for mean in per_prompt if mean == mean]
    return (sum(known) / len(known) if known else 0.0), per_prompt


def majority_vote(answers: Sequence[Hashable], correct: Sequence[float]) -> float:
    """Correctness of the most frequent answer, ties to the one seen first; 0 without answers."""
    if not answers:
        return 0.0
    votes: dict[Hashable, int] = {}
    for answer in answers:
        votes[answer] = votes.get(answer, 0) + 1
    winner = max(votes, key=lambda answer: votes[answer])  # the first of equals: dicts keep insertion order
    return float(correct[list(answers).index(winner)])


def maj_at_k(answers: Sequence[Hashable], correct: Sequence[float], k: int) -> float:
    """Mean of `majority_vote` over all k-subsets, each in sample order.

    ValueError unless 1 <= k <= n, or where there are too many subsets to look at.
    """
    n = len(answers)
    if not 1 <= k <= n:
        raise ValueError(f"k must be in [1, num_samples={n}], got {k}")
    if comb(n, k) > MAX_SUBSETS:
        raise ValueError(f"maj_at_k tries at most {MAX_SUBSETS} subsets, got {n} choose {k}")
    votes = [majority_vote([answers[i] for i in s], [correct[i] for i in s]) for s in combinations(range(n), k)]
    return sum(votes) / len(votes)


def group_metrics(
    scores: Scores, *, correct_from: float = 1.0, wrong_to: float = 0.0, atol: float = 1e-6
) -> dict[str, Average]:
    """How much there is to learn from this batch.

    reward_mean over scored rollouts; mean_group_std (ddof 1) over groups with two scored; zero_std_fraction,
    all_correct_fraction (every reward >= correct_from) and all_wrong_fraction (<= wrong_to) over groups with any
    scored; unscored_fraction over rollouts. A group with one scored rollout counts as zero_std.
    """
    rewards_N, groups_N, scored_N = scores.rewards_N, scores.groups_N, scores.scored
    count_N = count_scored(rewards_N, groups_N)
    # Each scored rollout speaks for 1 / count of its group, so that every group counts once.
    share_N = torch.where(scored_N, 1 / count_N.clamp(min=1), 0.0)
    center_N = center(rewards_N, groups_N)
    spread_N = over_group(center_N, groups_N, "amax") - over_group(center_N, groups_N, "amin")
    return {
        "reward_mean": mean_over(rewards_N, scored_N),
        "mean_group_std": _weighted(group_std(rewards_N, groups_N), torch.where(count_N > 1, share_N, 0.0)),
        "zero_std_fraction": _weighted(spread_N <= atol, share_N),
        "all_correct_fraction": _weighted(_whole_group(~scored_N | (rewards_N >= correct_from), groups_N), share_N),
        "all_wrong_fraction": _weighted(_whole_group(~scored_N | (rewards_N <= wrong_to), groups_N), share_N),
        "unscored_fraction": mean_over(1.0 - scored_N.to(rewards_N.dtype), torch.ones_like(scored_N)),
    }


def filter_metrics(*, drawn: int, dropped: int, all_correct: int, all_wrong: int) -> dict[str, Average]:
    """Shares of the groups drawn that a group filter dropped, and of those dropped with all right or all wrong."""
    counts = {"dropped_fraction": dropped, "dropped_all_correct": all_correct, "dropped_all_wrong": all_wrong}
    return {name: Average(torch.tensor(float(n)), torch.tensor(float(drawn))) for name, n in counts.items()}


def length_metrics(lengths_N: Tensor, truncated_N: Tensor) -> dict[str, Average]:
    """length_mean (tokens the policy wrote) and truncated_fraction, over rollouts; the longest is `lengths_N.max()`."""
    everyone_N = torch.ones_like(truncated_N)
    return {
        "length_mean": mean_over(lengths_N.to(torch.float64), everyone_N),
        "truncated_fraction": mean_over(truncated_N.to(torch.float64), everyone_N),
    }


def _perplexity(log_prob: Tensor) -> Tensor:
    """Of a mean log-prob; cut at e^20, beyond any vocabulary, so that one absurd sequence leaves the mean finite."""
    return (-log_prob).clamp(max=LOG_RATIO_CLAMP).exp()


def _whole_group(flag_N: Tensor, groups_N: Tensor) -> Tensor:
    """True for the members of groups all of whose flags are True."""
    return over_group(flag_N.to(torch.float64), groups_N, "amin") > 0


def _weighted(values_N: Tensor, weights_N: Tensor) -> Average:
    return Average((values_N * weights_N).sum(), weights_N.sum())
