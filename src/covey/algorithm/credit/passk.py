"""Advantages for the best of k attempts: Pass@k training, PKPO, best-minus-second.

The reward of a k-subset of the group is the largest reward of its members. Sorting the rewards once turns every sum
over C(n, k) subsets into a weighted sum over ranks, with weights from products of ratios, so a group of n costs
O(n log n). Shapes: N rollouts of the batch, M scored members of one group in ascending order of reward.

A group planned smaller than the estimator can take is an error. A group that lost members to failed scoring (NaN)
and is now too small has advantage 0, since nothing can be estimated from it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from covey.algorithm.credit.scores import Scores, divide, group_std, scored_members
from covey.system.lookup import one_of


def passk(scores: Scores, *, k: int, eps: float = 1e-6) -> Tensor:
    """Score rollouts by the k-subsets that contain them against the average one (Chen et al., arXiv 2508.10751).

    Each subset's reward is z-scored over all C(n, k) subsets; a rollout receives the mean of its subsets. With k = 1
    this is group_zscore with ddof 0; with k = n there is one subset and every advantage is 0.
    ValueError unless 1 <= k <= the size of every group.
    """
    _check_k(scores, k, smallest=1, spare=0)

    def advantages(rewards_M: Tensor) -> Tensor:
        # From the largest: where every subset has the same best, all terms are exactly 0.
        shifted_M = rewards_M - rewards_M[-1]
        best = expected_best(shifted_M, k)
        variance = subset_weights(len(rewards_M), k, rewards_M) @ (shifted_M - best) ** 2
        return divide(best_with(shifted_M, k) - best, variance.sqrt(), eps)

    return _each_group(scores, k, advantages)


def pkpo(
    scores: Scores, *, k: int, variant: str = "loo_minus_one", scale: str = "mean", loo_scale: str = "matched"
) -> Tensor:
    """Return rewards whose policy gradient is that of the expected best of k, unbiased (PKPO, arXiv 2505.15201).

    variant: none; loo (baseline: the expected best of k without the rollout); loo_minus_one (best of k - 1 without
    it; k = 1 is leave-one-out). scale: sum where the loss sums over rollouts, mean where it averages. loo_scale:
    published, which leaves -k c / (n (n - 1)) on a group of constant reward c, or matched, which leaves 0.
    ValueError unless 1 <= k <= the size n of every group; for loo k <= n - 1.
    """
    one_of("variant", variant, ("none", "loo", "loo_minus_one"))
    one_of("scale", scale, ("sum", "mean"))
    one_of("loo_scale", loo_scale, ("matched", "published"))
    _check_k(scores, k, smallest=1, spare=1 if variant == "loo" else 0)
    if variant == "loo_minus_one" and k == 1:
        variant, loo_scale = "loo", "matched"

    def transformed(rewards_M: Tensor) -> Tensor:
        n = len(rewards_M)
        if variant == "loo_minus_one" or (variant == "loo" and loo_scale == "matched"):
            # A common offset cancels in these: taken off first, it costs no precision.
            rewards_M = rewards_M - rewards_M[0]
        gain_M = k / n * best_with(rewards_M, k)
        if variant == "none":
            s_M = gain_M
        elif variant == "loo_minus_one":
            s_M = gain_M - k / n * best_without(rewards_M, k - 1)
        else:
            s_M = gain_M - k / (n - 1 if loo_scale == "published" else n) * best_without(rewards_M, k)
        return s_M * n if scale == "mean" else s_M

    return _each_group(scores, k + 1 if variant == "loo" else k, transformed)


def best_minus_second(scores: Scores, *, scale: str = "group_std", ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """Give the single best rollout of a group its lead over the second best, all others 0 (arXiv 2503.19595).

    scale: group_std divides by the group's standard deviation + eps; none does not. A tie for the best gives 0.
    ValueError where a group has one rollout.
    """
    one_of("scale", scale, ("group_std", "none"))
    sizes_G = _group_sizes(scores)
    if bool((sizes_G == 1).any()):
        raise ValueError("group_size must be >= 2 for best_minus_second, got 1")

    # Only the best rollout of a group has an advantage: its lead over the second
    def lead(rewards_M: Tensor) -> Tensor:
        lead_M = torch.zeros_like(rewards_M)
        lead_M[-1] = rewards_M[-1] - rewards_M[-2]
        return lead_M

    lead_N = _each_group(scores, 2, lead)
    if scale == "none":
        return lead_N
    return divide(lead_N, group_std(scores.rewards_N, scores.groups_N, ddof), eps)


def subset_weights(n: int, k: int, like: Tensor) -> Tensor:
    """Return the share of k-subsets whose best member has each rank.

    C(j-1, k-1) / C(n, k) for j = 1..n, built downwards from k/n, each rank from the next: no binomial is formed, so
    nothing overflows.
    """
    rank_M = torch.arange(n, 1, -1, dtype=like.dtype, device=like.device)
    steps_M = ((rank_M - k) / (rank_M - 1)).clamp(min=0)
    first = like.new_full((1,), k / n)
    return torch.cat([first, k / n * steps_M.cumprod(0)]).flip(0)


def expected_best(rewards_M: Tensor, k: int) -> Tensor:
    """Return the mean largest reward of all k-subsets (ascending rewards)."""
    return subset_weights(len(rewards_M), k, rewards_M) @ rewards_M


def best_with(rewards_M: Tensor, k: int) -> Tensor:
    """Return the mean largest reward of the k-subsets that contain each member."""
    n = len(rewards_M)
    own_M = subset_weights(n, k, rewards_M) * n / k
    rank_M = torch.arange(1, n + 1, dtype=rewards_M.dtype, device=rewards_M.device)
    above_M = own_M * (k - 1) / (rank_M - 1).clamp(min=1) * rewards_M
    return own_M * rewards_M + _sum_above(above_M)


def best_without(rewards_M: Tensor, k: int) -> Tensor:
    """Return the mean largest reward of the k-subsets without each member. Rewards ascend; k <= n - 1."""
    weights = subset_weights(len(rewards_M) - 1, k, rewards_M)
    zero = rewards_M.new_zeros(1)
    below_M = torch.cat([zero, (weights * rewards_M[:-1]).cumsum(0)])
    above_M = torch.cat([zero, weights * rewards_M[1:]])
    return below_M + _sum_above(above_M)


def _sum_above(values_M: Tensor) -> Tensor:
    """Return for each member the sum over those of higher rank."""
    return torch.cat([values_M[1:].flip(0).cumsum(0).flip(0), values_M.new_zeros(1)])


def _each_group(scores: Scores, min_scored: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `function` to each group's ascending rewards.

    0 where a rollout is unscored, or fewer than `min_scored` of its group are scored.
    """
    out_N = torch.zeros_like(scores.rewards_N)
    for members_M in scored_members(scores):
        if len(members_M) >= min_scored:
            rewards_M, order_M = scores.rewards_N[members_M].sort(stable=True)
            out_N[members_M[order_M]] = function(rewards_M)
    return out_N


def _group_sizes(scores: Scores) -> Tensor:
    sizes_G = scores.groups_N.bincount()
    return sizes_G[sizes_G > 0]


def _check_k(scores: Scores, k: int, *, smallest: int, spare: int) -> None:
    if k < smallest:
        raise ValueError(f"k must be >= {smallest}, got {k}")
    sizes_G = _group_sizes(scores)
    if len(sizes_G) and k > int(sizes_G.min()) - spare:
        bound = f"group_size - {spare}" if spare else "group_size"
        raise ValueError(f"k must be <= {bound} = {int(sizes_G.min()) - spare}, got {k}")
