"""Reward shaping by length, truncation and repetition: what is done to rewards before the baseline is taken.

Every entry of SHAPING is `shaping(rewards_N, info, *, options) -> rewards_N`, pure; a NaN reward (not scored) stays
NaN. Shapes: N rollouts of the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.algorithm.credit import penalties
from covey.algorithm.credit.scores import count_scored, over_group


@dataclass(frozen=True, slots=True)
class ShapingInputs:
    """What shaping may look at besides the rewards.

    >>> ShapingInputs(groups_N=torch.tensor([0, 0]), lengths_N=torch.tensor([3, 5]),
    ...     total_lengths_N=torch.tensor([9, 11]), turns_N=torch.tensor([1, 1]),
    ...     truncated_N=torch.tensor([False, True]), token_ids=((4, 5, 2), (4, 4, 4, 4, 4)))
    """

    groups_N: Tensor
    """int64, from 0."""
    lengths_N: Tensor
    """Tokens the policy wrote."""
    total_lengths_N: Tensor
    """All tokens: prompt, completions and the environment's replies."""
    turns_N: Tensor
    """Completions in each rollout."""
    truncated_N: Tensor
    """bool, True where the token limit ended the rollout."""
    token_ids: Sequence[Sequence[int]]
    """The tokens the policy wrote, for each rollout."""


def soft_overlong(
    rewards_N: Tensor, info: ShapingInputs, *, max_len: int, cache: int, factor: float = 1.0, floor: bool = True
) -> Tensor:
    """Take nothing off up to max_len - cache tokens, from there linearly up to `factor` at max_len (arXiv 2503.14476).

    With `floor` no more. ValueError unless 1 <= cache <= max_len.
    """
    penalties.check_soft_overlong(max_len, cache)
    penalty = [penalties.soft_overlong(length, max_len, cache, floor=floor) for length in info.lengths_N.tolist()]
    return rewards_N + factor * torch.tensor(penalty, dtype=torch.float64, device=info.lengths_N.device)


def stop_properly(rewards_N: Tensor, info: ShapingInputs, *, coef: float) -> Tensor:
    """Reward of a truncated rollout: multiplied by coef >= 0, or replaced by coef < 0 (ProRL, OpenRLHF)."""
    punished_N = rewards_N * coef if coef >= 0 else torch.where(rewards_N.isnan(), rewards_N, coef)
    return torch.where(info.truncated_N, punished_N, rewards_N)


def repetition(rewards_N: Tensor, info: ShapingInputs, *, ngram: int = 3, max_penalty: float = -1.0) -> Tensor:
    """Add max_penalty times the share of repeated n-grams, 0 for fewer than `ngram` tokens (arXiv 2502.03373).

    ValueError for ngram < 1 or max_penalty > 0.
    """
    penalties.check_repetition(ngram, max_penalty)
    shares = [penalties.repeated_share(ids, ngram) for ids in info.token_ids]
    return rewards_N + (max_penalty * torch.tensor(shares, dtype=torch.float64)).to(rewards_N.device)


def pass_rate_linear(
    rewards_N: Tensor, info: ShapingInputs, *, w_out: float = 0.25, w_in: float = 0.1, w_turns: float = 0.1
) -> Tensor:
    """Charge for length, relative to the longest of the group and in proportion to the group's mean reward.

    Hard prompts, where the mean is low, may be answered at length; follow with group_center (prime-rl). w_out weighs
    tokens the policy wrote, w_in all others, w_turns turns. Without replies of the environment the last two are the
    same for a whole group, which any baseline takes off again.
    """
    groups_N = info.groups_N
    count_N = count_scored(rewards_N, groups_N).clamp(min=1)
    mean_N = over_group(rewards_N.nan_to_num(nan=0.0), groups_N) / count_N
    cost_N = w_out * _share_of_longest(info.lengths_N, groups_N)
    cost_N = cost_N + w_in * _share_of_longest(info.total_lengths_N - info.lengths_N, groups_N)
    cost_N = cost_N + w_turns * _share_of_longest(info.turns_N, groups_N)
    return rewards_N - mean_N * cost_N


def _share_of_longest(counts_N: Tensor, groups_N: Tensor) -> Tensor:
    """Return each count over the largest of its group, 0 where that is 0."""
    counts_N = counts_N.to(torch.float64)
    return counts_N / over_group(counts_N, groups_N, "amax").clamp(min=1)


SHAPING: dict[str, Callable[..., Tensor]] = {
    "soft_overlong": soft_overlong,
    "stop_properly": stop_properly,
    "repetition": repetition,
    "pass_rate_linear": pass_rate_linear,
}
