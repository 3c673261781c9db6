"""What the advantage estimators are given, and the group and batch statistics they share.

Shapes: N rollouts of the batch, K reward functions. Group statistics need complete groups: gather the rewards of all
ranks first. A NaN reward means "not scored": it enters no statistic and its advantage is 0.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from covey.system.lookup import one_of
from covey.types import Prompt

SINGLETON = ("zero", "raw", "error")
ROUNDING = 1e-12
"""Spread of values that are equal, as a share of what was added up to them."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one row of `Scores` is about, for a custom advantage that looks at what was written.

    >>> Answer(prompt, text="48", token_ids=(8, 12, 2), truncated=False)
    """

    prompt: Prompt
    text: str
    """The completion, decoded; "" where it could not be scored."""
    token_ids: tuple[int, ...]
    """The tokens the policy wrote."""
    truncated: bool
    """Whether the token limit ended it."""


@dataclass(frozen=True, slots=True)
class Scores:
    """The rewards of one batch and what else an estimator may look at.

    >>> scores([1.0, 0.0, 0.5], ["a", "a", "b"]).groups_N
    tensor([0, 0, 1])
    """

    rewards_N: Tensor
    """Float; NaN where the rollout was not scored."""
    groups_N: Tensor
    """int64, from 0. Groups may interleave and differ in size."""
    lengths_N: Tensor
    """Loss tokens of each rollout, same dtype as the rewards; 0 where it is masked for being truncated."""
    written_N: Tensor
    """Tokens the policy wrote in each rollout, in the loss or not."""
    parts_NK: Tensor
    """Rewards of the single reward functions, NaN where one does not apply; (N, 0) where there are none."""
    weights_K: Tensor
    """Weight of each part."""
    roles: tuple[str, ...]
    """Whom the policy played in each rollout (self-play); all "" in ordinary training."""
    preferences_NN: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    """Probability that rollout i beats rollout j, from a judge; (0, 0) where there is none."""
    baselines: Mapping[str, float] = field(default_factory=dict)
    """Running baseline of each role at the start of the batch; a role that is not there starts at 0."""

    def __post_init__(self) -> None:
        n = len(self.rewards_N)
        lengths = [len(x) for x in (self.groups_N, self.lengths_N, self.written_N, self.parts_NK, self.roles)]
        assert set(lengths) == {n}, f"groups, lengths, written, parts, roles have lengths {lengths} for {n} rewards"
        assert self.parts_NK.shape[1] == len(self.weights_K), f"{self.parts_NK.shape}, {len(self.weights_K)} weights"

    @property
    def scored(self) -> Tensor:
        """Return (N,), True where there is a reward."""
        return ~self.rewards_N.isnan()

    @property
    def num_groups(self) -> int:
        return count_groups(self.groups_N)


def scores(
    rewards: Any,
    groups: Sequence[Hashable],
    *,
    lengths: Any = None,
    parts: Any = None,
    weights: Any = None,
    roles: Sequence[str] = (),
) -> Scores:
    """Make Scores from lists or tensors, in float64. Group labels may be anything hashable.

    Without lengths every rollout counts one token; without weights every part counts 1. All that was written counts as
    loss tokens.
    """
    rewards_N = _float64(rewards)
    n = len(rewards_N)
    labels: dict[Hashable, int] = {}
    groups_N = torch.tensor([labels.setdefault(label, len(labels)) for label in _listed(groups)], dtype=torch.int64)
    lengths_N = torch.ones_like(rewards_N) if lengths is None else _float64(lengths)
    parts_NK = rewards_N.new_zeros(n, 0) if parts is None else _float64(parts)
    return Scores(
        rewards_N=rewards_N,
        groups_N=groups_N,
        lengths_N=lengths_N,
        written_N=lengths_N,
        parts_NK=parts_NK,
        weights_K=rewards_N.new_ones(parts_NK.shape[1]) if weights is None else _float64(weights),
        roles=tuple(roles) or ("",) * n,
    )


def count_groups(groups_N: Tensor) -> int:
    return int(groups_N.max()) + 1 if len(groups_N) else 0


def scored_members(given: Scores) -> list[Tensor]:
    """Return indices of the scored rollouts of each group that has any."""
    grouped = [((given.groups_N == group) & given.scored).nonzero()[:, 0] for group in range(given.num_groups)]
    return [members_M for members_M in grouped if len(members_M)]


def over_group(values_N: Tensor, groups_N: Tensor, reduce: str = "sum") -> Tensor:
    """Return the sum (or amin, amax) over each rollout's own group, given back to every member: (N,)."""
    empty_G = values_N.new_zeros(count_groups(groups_N))
    return empty_G.scatter_reduce(0, groups_N, values_N, reduce, include_self=False)[groups_N]


def count_scored(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Count the scored members of each rollout's group, (N,) in the dtype of the rewards."""
    return over_group((~rewards_N.isnan()).to(rewards_N.dtype), groups_N)


def settled(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Make rewards of a group equal where they differ by rounding alone: 0.1 + 0.7 is no worse than 0.8.

    An estimator with eps 0, a comparison of pairs and a count of informative groups would take that for a difference.
    """
    rewards, groups = rewards_N.tolist(), groups_N.tolist()
    scored = [index for index, reward in enumerate(rewards) if reward == reward]
    least, group = 0.0, -1
    for index in sorted(scored, key=lambda index: (groups[index], rewards[index])):
        if groups[index] == group and rewards[index] - least <= ROUNDING * abs(rewards[index]):
            rewards[index] = least
        least, group = rewards[index], groups[index]
    return torch.tensor(rewards, dtype=rewards_N.dtype)


def center(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Reward minus group mean, 0 where not scored.

    The smallest reward of the group is taken off first: equal rewards then give exactly 0, and a large common
    offset costs no precision.
    """
    scored_N = ~rewards_N.isnan()
    low_N = over_group(torch.where(scored_N, rewards_N, torch.inf), groups_N, "amin")
    shifted_N = torch.where(scored_N, rewards_N - low_N, 0.0)
    mean_N = over_group(shifted_N, groups_N) / count_scored(rewards_N, groups_N).clamp(min=1)
    return torch.where(scored_N, shifted_N - mean_N, 0.0)


def group_std(rewards_N: Tensor, groups_N: Tensor, ddof: int = 1) -> Tensor:
    """Return each group's standard deviation (two passes), 0 where fewer than ddof + 1 members are scored."""
    squares_N = over_group(center(rewards_N, groups_N) ** 2, groups_N)
    freedom_N = count_scored(rewards_N, groups_N) - ddof
    return torch.where(freedom_N > 0, squares_N / freedom_N.clamp(min=1), 0.0).sqrt()


def divide(values_N: Tensor, scale: Tensor, eps: float, eps_mode: str = "add") -> Tensor:
    """Return values / (scale + eps), or / max(scale, eps) for eps_mode "floor", 0 where that divisor is 0."""
    one_of("eps_mode", eps_mode, ("add", "floor"))
    divisor = scale + eps if eps_mode == "add" else scale.clamp(min=eps)
    return torch.where(divisor > 0, values_N / torch.where(divisor > 0, divisor, 1.0), 0.0)


def apply_singleton(advantages_N: Tensor, raw_N: Tensor, given: Scores, singleton: str) -> Tensor:
    """Return what a group with one scored rollout gets, which has nothing to be compared with.

    zero: 0. raw: `raw_N`, as in verl. error: ValueError.
    """
    one_of("singleton", singleton, SINGLETON)
    count_N = count_scored(given.rewards_N, given.groups_N)
    if singleton == "error" and bool((count_N < 2).any()):
        raise ValueError(f"singleton=error needs 2 scored rollouts in every group, got {int(count_N.min())}")
    alone_N = (count_N < 2) & given.scored
    return torch.where(alone_N, raw_N if singleton == "raw" else 0.0, advantages_N)


def batch_std(values_N: Tensor, ddof: int = 1) -> Tensor:
    """Return the standard deviation of values that are not NaN, 0 where fewer than ddof + 1 are left."""
    kept = values_N[~values_N.isnan()]
    if len(kept) <= ddof:
        return values_N.new_zeros(())
    return (((kept - kept.mean()) ** 2).sum() / (len(kept) - ddof)).sqrt()


def batch_zscore(values_N: Tensor, scored_N: Tensor, ddof: int = 1, eps: float = 1e-4) -> Tensor:
    """Return (value - mean) / (std + eps) over the scored rollouts of the batch, 0 for the others."""
    if not bool(scored_N.any()):
        return torch.zeros_like(values_N)
    known_N = torch.where(scored_N, values_N, torch.nan)
    shifted_N = torch.where(scored_N, values_N - values_N[scored_N].mean(), 0.0)
    return divide(shifted_N, batch_std(known_N, ddof), eps)


def whiten_tokens(
    values_N: Tensor,
    scored_N: Tensor,
    lengths_N: Tensor,
    *,
    ddof: int = 1,
    eps: float = 1e-8,
    eps_mode: str = "var_add",
) -> Tensor:
    """Whiten over the loss tokens of the scored rollouts, whose value each token repeats: (N,).

    Long completions weigh more. var_add divides by sqrt(var + eps), var_floor by sqrt(max(var, eps)).
    """
    one_of("eps_mode", eps_mode, ("var_add", "var_floor"))
    weights_N = torch.where(scored_N, lengths_N, 0.0)
    total = weights_N.sum()
    if total <= ddof:
        return torch.zeros_like(values_N)
    # From the smallest, as in `center`: equal values give exactly 0, whatever their size.
    above_N = values_N - values_N[weights_N > 0].min()
    shifted_N = torch.where(scored_N, above_N - (weights_N * above_N).nansum() / total, 0.0)
    variance = (weights_N * shifted_N**2).sum() / (total - ddof)
    floored = variance + eps if eps_mode == "var_add" else variance.clamp(min=eps)
    return divide(shifted_N, floored.sqrt(), 0.0)


def _float64(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def _listed(groups: Any) -> list[Hashable]:
    return groups.tolist() if isinstance(groups, Tensor) else list(groups)
