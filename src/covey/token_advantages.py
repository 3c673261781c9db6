"""Estimators whose advantage differs from token to token, so they need more than the reward of a rollout.

Shapes: N rollouts of the global batch, T loss-token positions after padding. Masks are boolean; values outside them,
NaN included, reach nothing. All advantages are 0 outside the mask.
"""

import torch
from torch import Tensor

from covey.ratio import select
from covey.scores import Scores, count_groups, count_scored, divide
from covey.tables import one_of


def rewards_to_go(token_rewards_NT: Tensor, mask_NT: Tensor, gamma: float = 1.0) -> Tensor:
    """Discounted sum of the rewards from each loss token to the end, 0 outside the mask.

    Tokens outside the mask (tool output) pass the sum on without discounting it.
    """
    returns_NT = torch.zeros_like(token_rewards_NT)
    running_N = token_rewards_NT.new_zeros(len(token_rewards_NT))
    for t in range(token_rewards_NT.shape[1] - 1, -1, -1):
        running_N = torch.where(mask_NT[:, t], token_rewards_NT[:, t] + gamma * running_N, running_N)
        returns_NT[:, t] = running_N
    return select(returns_NT, mask_NT)


def rewards_at_end(rewards_N: Tensor, mask_NT: Tensor) -> Tensor:
    """(N, T) token rewards that pay each rollout's reward at its last loss token; 0 where not scored."""
    last_NT = mask_NT & (mask_NT.flip(1).cumsum(1).flip(1) == 1)
    return select(rewards_N.nan_to_num(nan=0.0)[:, None].expand(mask_NT.shape), last_NT)


def whiten(
    values_NT: Tensor, mask_NT: Tensor, *, ddof: int = 1, eps: float = 1e-8, eps_mode: str = "var_add"
) -> Tensor:
    """Mean 0 and variance 1 over the tokens of the mask.

    eps_mode: var_add divides by sqrt(var + eps), var_floor by sqrt(max(var, eps)).
    """
    one_of("eps_mode", eps_mode, ("var_add", "var_floor"))
    count = int(mask_NT.sum())
    if count <= ddof:
        return torch.zeros_like(values_NT)
    centered_NT = select(values_NT - select(values_NT, mask_NT).sum() / count, mask_NT)
    variance = (centered_NT**2).sum() / (count - ddof)
    floored = variance + eps if eps_mode == "var_add" else variance.clamp(min=eps)
    return divide(centered_NT, floored.sqrt(), 0.0)


def reinforce_plus_plus(
    token_rewards_NT: Tensor,
    mask_NT: Tensor,
    *,
    gamma: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-8,
    eps_mode: str = "var_add",
) -> Tensor:
    """Discounted rewards to go, whitened over tokens, without groups (REINFORCE++, arXiv 2501.03262)."""
    returns_NT = rewards_to_go(token_rewards_NT, mask_NT, gamma)
    return whiten(returns_NT, mask_NT, ddof=ddof, eps=eps, eps_mode=eps_mode)


def remax(token_rewards_NT: Tensor, mask_NT: Tensor, greedy_rewards_N: Tensor) -> Tensor:
    """Rewards to go minus the reward of the greedy completion of the same prompt (ReMax, arXiv 2310.10505)."""
    return select(rewards_to_go(token_rewards_NT, mask_NT) - greedy_rewards_N[:, None], mask_NT)


def optimal_token_baseline(
    scores: Scores,
    mask_NT: Tensor,
    old_log_probs_NT: Tensor,
    sum_pi_squared_NT: Tensor,
    *,
    zero_tail: bool = True,
    eps: float = 1e-8,
) -> Tensor:
    """Reward minus, at each position, the mean of the group weighted by gradient energy (arXiv 2602.07078).

    The weight of a rollout at t is the sum over its tokens up to t of 1 - 2 pi + sum_v pi_v^2. zero_tail drops the
    baseline where only one completion of the group is still alive. A group with one scored rollout gets 0.
    """
    rewards_NT = rewards_to_go(rewards_at_end(scores.rewards_N, mask_NT), mask_NT)
    energy_NT = select(1 - 2 * old_log_probs_NT.exp() + sum_pi_squared_NT, mask_NT).cumsum(1)
    alive_NT = mask_NT & scores.scored[:, None]
    energy_NT = select(energy_NT, alive_NT)
    weighted_NT = _over_group(energy_NT * rewards_NT, scores.groups_N)
    baseline_NT = weighted_NT / (_over_group(energy_NT, scores.groups_N) + eps)
    if zero_tail:
        several_NT = _over_group(alive_NT.to(rewards_NT.dtype), scores.groups_N) > 1
        baseline_NT = torch.where(several_NT, baseline_NT, 0.0)
    compared_N = count_scored(scores.rewards_N, scores.groups_N) > 1
    return select(rewards_NT - baseline_NT, alive_NT & compared_N[:, None])


def _over_group(values_NT: Tensor, groups_N: Tensor) -> Tensor:
    """The sum over each rollout's own group, position by position, given back to every member."""
    empty_GT = values_NT.new_zeros(count_groups(groups_N), values_NT.shape[1])
    return empty_GT.index_add(0, groups_N, values_NT)[groups_N]
