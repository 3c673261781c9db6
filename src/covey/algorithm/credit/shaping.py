"""Reward shaping by length, truncation and repetition, before the baseline.

Every entry of SHAPING is `shaping(rewards_N, scores, *, options) -> rewards_N`, pure: `scores` has the columns
beside the rewards. A NaN reward (not scored) stays NaN. Shapes: N rollouts of the batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from covey.algorithm.credit import penalties
from covey.algorithm.credit.scores import Scores, count_scored, over_group


def soft_overlong(
    rewards_N: Tensor, scores: Scores, *, max_len: int, cache: int, factor: float = 1.0, floor: bool = True
) -> Tensor:
    """Subtract up to `factor` over the last `cache` tokens (arXiv 2503.14476).

    Nothing up to max_len - cache tokens, from there linearly, `factor` at max_len; with `floor` no more beyond it.
    ValueError unless 1 <= cache <= max_len.
    """
    penalties.check_soft_overlong(max_len, cache)
    penalty = [penalties.soft_overlong(length, max_len, cache, floor=floor) for length in scores.written_N.tolist()]
    return rewards_N + factor * torch.tensor(penalty, dtype=torch.float64, device=scores.written_N.device)


def stop_properly(rewards_N: Tensor, scores: Scores, *, coef: float) -> Tensor:
    """Reward of a truncated rollout: multiplied by coef >= 0, or replaced by coef < 0 (ProRL, OpenRLHF)."""
    punished_N = rewards_N * coef if coef >= 0 else torch.where(rewards_N.isnan(), rewards_N, coef)
    return torch.where(scores.truncated_N, punished_N, rewards_N)


def repetition(rewards_N: Tensor, scores: Scores, *, ngram: int = 3, max_penalty: float = -1.0) -> Tensor:
    """Add max_penalty times the share of repeated n-grams, 0 for fewer than `ngram` tokens (arXiv 2502.03373).

    ValueError for ngram < 1 or max_penalty > 0.
    """
    penalties.check_repetition(ngram, max_penalty)
    shares = [penalties.repeated_share(ids, ngram) for ids in scores.token_ids]
    return rewards_N + (max_penalty * torch.tensor(shares, dtype=torch.float64)).to(rewards_N.device)


def pass_rate_linear(
    rewards_N: Tensor, scores: Scores, *, w_out: float = 0.25, w_in: float = 0.1, w_turns: float = 0.1
) -> Tensor:
    """Charge for length relative to the group's longest, times its mean reward.

    Hard prompts, where the mean is low, may be answered at length; follow with group_center (prime-rl). w_out weighs
    tokens the policy wrote, w_in all others, w_turns turns. Without replies of the environment the last two are the
    same for a whole group, which any baseline takes off again.
    """
    groups_N = scores.groups_N
    count_N = count_scored(rewards_N, groups_N).clamp(min=1)
    mean_N = over_group(rewards_N.nan_to_num(nan=0.0), groups_N) / count_N
    cost_N = w_out * _share_of_longest(scores.written_N, groups_N)
    cost_N = cost_N + w_in * _share_of_longest(scores.total_lengths_N - scores.written_N, groups_N)
    cost_N = cost_N + w_turns * _share_of_longest(scores.turns_N, groups_N)
    return rewards_N - mean_N * cost_N


def _share_of_longest(counts_N: Tensor, groups_N: Tensor) -> Tensor:
    counts_N = counts_N.to(torch.float64)
    return counts_N / over_group(counts_N, groups_N, "amax").clamp(min=1)


SHAPING: dict[str, Callable[..., Tensor]] = {
    "soft_overlong": soft_overlong,
    "stop_properly": stop_properly,
    "repetition": repetition,
    "pass_rate_linear": pass_rate_linear,
}
