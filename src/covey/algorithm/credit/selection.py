"""Selection of rollouts and groups, and length weights and clips of advantages.

Every entry of SELECTION is `select(scores, estimator, *, options) -> Selected`, every entry of GROUP_FILTERS is
`keep(rewards_M, *, options) -> bool` for one group. Rollouts and groups that are not kept leave the loss *and* its
denominators. Shapes: N rollouts of the batch, M rewards of one group (NaN: not scored).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb

import torch
from torch import Tensor

from covey.algorithm.credit.scores import Scores, scored_members
from covey.algorithm.loss_inputs import clamp_symmetric
from covey.system.lookup import one_of

Estimator = Callable[[Scores], Tensor]
MAX_SUBSETS = 200_000
"""Maximum subsets that `balanced_indices` looks at."""


@dataclass(frozen=True, slots=True)
class Selected:
    """Rollouts that train, and their advantages.

    >>> Selected(keep_N=torch.tensor([True, False]), advantages_N=torch.tensor([0.5, 0.0]))
    """

    keep_N: Tensor
    """bool."""
    advantages_N: Tensor
    """0 where not kept."""


def top_k(
    scores: Scores, estimator: Estimator, *, k: int, baseline_over: str = "group", rank_by: str = "reward"
) -> Selected:
    """Keep the k best of each group, ties to the lower index.

    baseline_over: group takes the advantages from the whole group, then drops; selected computes them on the kept
    rows alone. rank_by: reward; length (the k shortest) or reward_per_token, which with baseline_over=selected make
    GFPO (arXiv 2508.09726). A group with fewer scored rollouts keeps all of them. ValueError for k < 1.
    """
    one_of("rank_by", rank_by, ("reward", "length", "reward_per_token"))
    if rank_by == "reward":
        ranking_N = scores.rewards_N
    elif rank_by == "length":
        ranking_N = -scores.written_N
    else:
        ranking_N = scores.rewards_N / scores.written_N.clamp(min=1)
    return apply_selection(scores, estimator, keep_top_k(scores, ranking_N, k), baseline_over)


def keep_top_k(scores: Scores, ranking_N: Tensor, k: int) -> Tensor:
    """Return True for each group's k scored rollouts of largest `ranking_N`."""
    if k < 1:
        raise ValueError(f"k must be >= 1, got {k}")
    return _chosen(scores, lambda members_M: ranking_N[members_M].argsort(descending=True, stable=True)[:k])


def max_variance(scores: Scores, estimator: Estimator, *, m: int, baseline_over: str = "selected") -> Selected:
    """Keep the m rollouts of each group whose rewards spread most (PODS, arXiv 2504.13818).

    That subset always is the a smallest and the m - a largest; with equal spread the smallest a wins. A group with
    fewer scored rollouts keeps all of them. ValueError for m < 2.
    """
    if m < 2:
        raise ValueError(f"m must be >= 2, got {m}")
    keep_N = _chosen(scores, lambda members_M: max_variance_indices(scores.rewards_N[members_M], m))
    return apply_selection(scores, estimator, keep_N, baseline_over)


def max_variance_indices(rewards_M: Tensor, m: int) -> Tensor:
    """Return the indices of the m rewards of largest variance, or all."""
    order_M = rewards_M.argsort(stable=True)
    n = len(order_M)
    if n <= m:
        return order_M
    candidates = [torch.cat([order_M[:a], order_M[n - (m - a) :]]) for a in range(m + 1)]
    variances = torch.stack([rewards_M[chosen].var(correction=0) for chosen in candidates])
    # Up to rounding, so that it does not decide between equal spreads.
    widest = variances >= variances.max() * (1 - 1e-12)
    return candidates[int(widest.nonzero()[0])]


def balanced_subset(
    scores: Scores,
    estimator: Estimator,
    *,
    group_size: int,
    low: float = 0.0,
    high: float = 1.0,
    baseline_over: str = "selected",
) -> Selected:
    """Keep the `balanced_indices` of each group sampled larger than needed (TorchRL)."""

    def balanced(members_M: Tensor) -> list[int]:
        return list(balanced_indices(scores.rewards_N[members_M], group_size=group_size, low=low, high=high))

    return apply_selection(scores, estimator, _chosen(scores, balanced), baseline_over)


def balanced_indices(rewards_M: Tensor, *, group_size: int, low: float = 0.0, high: float = 1.0) -> tuple[int, ...]:
    """Choose `group_size` rewards by mean nearest the middle, then widest spread.

    The middle is that of (low, high); of equal subsets the first is taken. All indices where there are no more rewards.
    ValueError where there are too many subsets to try.
    """
    if group_size < 1:
        raise ValueError(f"group_size must be >= 1, got {group_size}")
    size = min(group_size, len(rewards_M))
    if comb(len(rewards_M), size) > MAX_SUBSETS:
        raise ValueError(f"balanced_subset tries at most {MAX_SUBSETS} subsets, got {len(rewards_M)} choose {size}")
    subsets = torch.tensor(list(combinations(range(len(rewards_M)), size)), dtype=torch.int64)
    chosen = rewards_M[subsets]
    # Rounded, so that rounding errors of equal means do not decide.
    distance = (chosen.mean(dim=1) - (low + high) / 2).abs().round(decimals=9)
    nearest = distance == distance.min()
    spread = torch.where(nearest, chosen.var(dim=1, correction=0).round(decimals=9), -1.0)
    return tuple(subsets[int((spread == spread.max()).nonzero()[0])].tolist())


def apply_selection(scores: Scores, estimator: Estimator, keep_N: Tensor, baseline_over: str) -> Selected:
    """Return kept rollouts' advantages, with baseline over `group` or `selected`."""
    one_of("baseline_over", baseline_over, ("group", "selected"))
    advantages_N = estimator(scores if baseline_over == "group" else forget(scores, ~keep_N))
    return Selected(keep_N, torch.where(keep_N, advantages_N, 0.0))


def forget(scores: Scores, drop_N: Tensor) -> Scores:
    """Return the batch with some rollouts marked as not scored."""
    return replace(
        scores,
        rewards_N=torch.where(drop_N, torch.nan, scores.rewards_N),
        parts_NK=torch.where(drop_N[:, None], torch.nan, scores.parts_NK),
    )


def length_normalizer(advantages_N: Tensor, lengths_N: Tensor, *, alpha: float = 1.0) -> Tensor:
    """Weight *advantages* by length^-alpha over its mean: least variance under constant-length aggregation.

    (VL-Norm, arXiv 2509.07558; alpha 1 or 0.75.) The mean is over the rollouts given, those without tokens left out;
    they get 0.
    """
    lengths_N = lengths_N.to(advantages_N.dtype)
    present_N = lengths_N > 0
    weights_N = torch.where(present_N, torch.where(present_N, lengths_N, 1.0) ** -alpha, 0.0)
    mean = weights_N.sum() / present_N.sum().clamp(min=1)
    return torch.where(present_N, advantages_N * weights_N / mean, 0.0)


def weigh_and_clip(advantages_N: Tensor, lengths_N: Tensor, alpha: float | None, bound: float | None) -> Tensor:
    """Apply `length_normalizer` unless alpha is None, then `clamp_symmetric`."""
    if alpha is not None:
        advantages_N = length_normalizer(advantages_N, lengths_N, alpha=alpha)
    return clamp_symmetric(advantages_N, bound)


def zero_std(rewards_M: Tensor, *, atol: float = 1e-6) -> bool:
    """Keep a group unless its rewards are all equal, which leaves nothing to learn (DAPO, arXiv 2503.14476).

    Equal means that largest and smallest differ by no more than atol; fewer than two scored rollouts are equal.
    """
    scored_M = rewards_M[~rewards_M.isnan()]
    return len(scored_M) > 1 and bool(scored_M.max() - scored_M.min() > atol)


def mean_bounds(rewards_M: Tensor, *, low: float = 0.0, high: float = 1.0) -> bool:
    """Keep mean rewards in (low, high). ValueError unless low < high."""
    if low >= high:
        raise ValueError(f"low must be < high={high}, got {low}")
    scored_M = rewards_M[~rewards_M.isnan()]
    return len(scored_M) > 0 and low < float(scored_M.mean()) < high


def _chosen(scores: Scores, choose: Callable[[Tensor], Tensor | list[int]]) -> Tensor:
    """Return True for the members that `choose` takes of each group.

    It is given the scored members, and returns places among them.
    """
    keep_N = torch.zeros_like(scores.scored)
    for members_M in scored_members(scores):
        keep_N[members_M[choose(members_M)]] = True
    return keep_N


SELECTION: dict[str, Callable[..., Selected]] = {
    "top_k": top_k,
    "max_variance": max_variance,
    "balanced_subset": balanced_subset,
}

GROUP_FILTERS: dict[str, Callable[..., bool]] = {"zero_std": zero_std, "mean_bounds": mean_bounds}
