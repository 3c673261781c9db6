"""Advantage estimators: pure functions from rewards to advantages.

Every estimator is `estimator(scores, *, options) -> advantages_N`, float, 0 where a rollout was not scored (NaN
reward). Those for the best of k attempts are in `passk`.
Options every estimator shares the meaning of: `ddof` (1: sample, 0: population), `eps` and `eps_mode` (`add`:
std + eps, `floor`: max(std, eps)), `singleton` (what the only scored rollout of a group gets: `zero`, `raw` or
`error`). Shapes: N rollouts of the global batch, K reward functions.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from covey.algorithm.credit.passk import best_minus_second, passk, pkpo
from covey.algorithm.credit.scores import (
    Scores,
    apply_singleton,
    batch_std,
    batch_zscore,
    center,
    count_scored,
    divide,
    group_std,
    over_group,
    scored_members,
    scores,
    whiten_tokens,
)
from covey.system.lookup import one_of

__all__ = ["ADVANTAGES", "Scores", "scores"]

Estimator = Callable[..., Tensor]
"""`estimator(scores, *, options) -> advantages_N`."""


def none(scores: Scores) -> Tensor:
    """Return the reward itself, without a baseline."""
    return scores.rewards_N.nan_to_num(nan=0.0)


def group_zscore(
    scores: Scores, *, ddof: int = 1, eps: float = 1e-6, eps_mode: str = "add", singleton: str = "zero"
) -> Tensor:
    """Reward in standard deviations of its group above the group's mean (GRPO, arXiv 2402.03300).

    Adding a constant to the rewards of a group, or scaling them, changes nothing (up to eps). With two rollouts the
    size of the gap is lost: the advantages are always +-0.7071 (ddof 1) or +-1 (ddof 0).
    """
    center_N = center(scores.rewards_N, scores.groups_N)
    zscore_N = divide(center_N, group_std(scores.rewards_N, scores.groups_N, ddof), eps, eps_mode)
    raw_N = divide(scores.rewards_N, torch.ones_like(center_N), eps, eps_mode)
    return apply_singleton(zscore_N, raw_N, scores, singleton)


def group_center(scores: Scores, *, singleton: str = "zero") -> Tensor:
    """Reward minus the group's mean: no bias towards easy or hard prompts (Dr. GRPO, arXiv 2503.20783)."""
    center_N = center(scores.rewards_N, scores.groups_N)
    return apply_singleton(center_N, scores.rewards_N, scores, singleton)


def leave_one_out(
    scores: Scores, *, singleton: str = "zero", post_normalize: str = "none", ddof: int = 1, eps: float = 1e-4
) -> Tensor:
    """Subtract the mean reward of the *other* rollouts, an unbiased baseline (RLOO, arXiv 2402.14740).

    post_normalize: batch_zscore standardises over the batch afterwards, with ddof and eps; none does not.
    """
    one_of("post_normalize", post_normalize, ("none", "batch_zscore"))
    count_N = count_scored(scores.rewards_N, scores.groups_N)
    loo_N = center(scores.rewards_N, scores.groups_N) * count_N / (count_N - 1).clamp(min=1)
    loo_N = apply_singleton(loo_N, scores.rewards_N, scores, singleton)
    return loo_N if post_normalize == "none" else batch_zscore(loo_N, scores.scored, ddof, eps)


def group_center_batch_std(
    scores: Scores,
    *,
    std_of: str = "rewards",
    ddof: int = 1,
    eps: float = 1e-4,
    eps_mode: str = "add",
    recenter: bool = False,
) -> Tensor:
    """Reward minus the group's mean, over one standard deviation for the whole batch (Lite PPO, arXiv 2508.08221).

    std_of: rewards, which includes the spread between prompts, or centered, which does not. recenter takes off the
    batch mean as well, which is 0 already.
    """
    one_of("std_of", std_of, ("rewards", "centered"))
    center_N = center(scores.rewards_N, scores.groups_N)
    of_N = scores.rewards_N if std_of == "rewards" else torch.where(scores.scored, center_N, torch.nan)
    if recenter and bool(scores.scored.any()):
        center_N = torch.where(scores.scored, center_N - center_N[scores.scored].mean(), 0.0)
    return divide(center_N, batch_std(of_N, ddof), eps, eps_mode)


def group_center_token_whiten(
    scores: Scores, *, ddof: int = 1, eps: float = 1e-8, eps_mode: str = "var_add", singleton: str = "zero"
) -> Tensor:
    """Centre rewards by group, then whiten over loss tokens (REINFORCE++-baseline, arXiv 2501.03262).

    Long completions weigh more, and a group no longer sums to 0. eps_mode: var_add or var_floor.
    """
    center_N = group_center(scores, singleton=singleton)
    return whiten_tokens(center_N, scores.scored, scores.lengths_N, ddof=ddof, eps=eps, eps_mode=eps_mode)


def opo(scores: Scores, *, singleton: str = "zero") -> Tensor:
    """Reward minus the length-weighted mean of the group, the baseline of least variance (arXiv 2505.23585).

    A group without any loss token takes the plain mean.
    """
    tokens_N = torch.where(scores.scored, scores.lengths_N, 0.0)
    total_N = over_group(tokens_N, scores.groups_N)
    # Weigh the centred rewards: equal ones give exactly 0, and without any token the plain mean is what is left.
    center_N = center(scores.rewards_N, scores.groups_N)
    shift_N = divide(over_group(tokens_N * center_N, scores.groups_N), total_N, 0.0)
    advantages_N = torch.where(scores.scored, center_N - shift_N, 0.0)
    return apply_singleton(advantages_N, scores.rewards_N, scores, singleton)


def gpg(
    scores: Scores, *, alpha: str = "informative_groups", f_norm: float | str = 1.0, singleton: str = "zero"
) -> Tensor:
    """Centre rewards by group, scaled up for rollouts without gradient (GPG, arXiv 2504.02546).

    alpha: informative_groups, the number of rollouts over those in groups of unequal rewards; nonzero_rewards, over
    those with a reward other than 0 (verl). f_norm: a number, or group_std. Use with the plain policy gradient.
    """
    one_of("alpha", alpha, ("informative_groups", "nonzero_rewards"))
    advantages_N = group_center(scores, singleton=singleton)
    if alpha == "informative_groups":
        informative_N = group_std(scores.rewards_N, scores.groups_N) > 0
        counted = int((informative_N & scores.scored).sum())
    else:
        counted = int((scores.rewards_N.nan_to_num(nan=0.0) != 0).sum())
    scale = int(scores.scored.sum()) / counted if counted else 1.0
    if isinstance(f_norm, str):
        one_of("f_norm", f_norm, ("group_std",))
        return divide(scale * advantages_N, group_std(scores.rewards_N, scores.groups_N), 0.0)
    return scale * advantages_N / f_norm


def pairwise_scores(scores: Scores, *, form: str = "win_rate", temperature: float = 1.0) -> Tensor:
    """Return each rollout's mean outcome against its scored siblings, (N,).

    1/2 for one that has none (difference: 0).

    form: win_rate (1, 1/2 for a tie, 0), bradley_terry (sigmoid of the difference over the temperature), difference,
    or matrix (the judge's `preferences_NN`). ValueError where the matrix is missing or P_ij + P_ji is not 1.
    """
    one_of("form", form, ("win_rate", "bradley_terry", "difference", "matrix"))
    w_N = torch.full_like(scores.rewards_N, 0.0 if form == "difference" else 0.5)
    for members_M in scored_members(scores):
        if len(members_M) > 1:
            outcome_MM = _outcomes(scores, members_M, form, temperature)
            w_N[members_M] = outcome_MM.fill_diagonal_(0.0).sum(dim=1) / (len(members_M) - 1)
    return w_N


def pairwise(
    scores: Scores,
    *,
    form: str = "win_rate",
    temperature: float = 1.0,
    post: str = "none",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Score each rollout by its wins over siblings, free of scale.

    For rewards that rank better than they measure (Pref-GRPO, arXiv 2508.20751). post: none gives the score of
    `pairwise_scores` minus 1/2 (the form difference as it is, which equals leave_one_out); group_zscore standardises
    the scores within the group, with ddof and eps.
    """
    one_of("post", post, ("none", "group_zscore"))
    w_N = torch.where(scores.scored, pairwise_scores(scores, form=form, temperature=temperature), torch.nan)
    if post == "none":
        return (w_N if form == "difference" else w_N - 0.5).nan_to_num(nan=0.0)
    return divide(center(w_N, scores.groups_N), group_std(w_N, scores.groups_N, ddof), eps)


def gdpo(
    scores: Scores, *, ddof: int = 1, eps: float = 1e-4, eps_mode: str = "add", post: str = "batch_zscore"
) -> Tensor:
    """Standardise each reward function on its own before adding them up, so that none drowns another.

    (GDPO, arXiv 2601.05242.) post: batch_zscore over rollouts (ddof, eps), or token_whiten over loss tokens (ddof,
    variance + 1e-8). A part that does not apply (NaN) contributes 0. ValueError without parts.
    """
    one_of("post", post, ("batch_zscore", "token_whiten"))
    parts_NK, groups_N = scores.parts_NK, scores.groups_N
    if len(parts_NK) and not parts_NK.shape[1]:
        raise ValueError("advantage=gdpo needs rewards with parts, got none; return named parts or take group_zscore")
    sum_N = torch.zeros_like(scores.rewards_N)
    for part_N, weight in zip(parts_NK.unbind(1), scores.weights_K, strict=True):
        sum_N = sum_N + weight * divide(center(part_N, groups_N), group_std(part_N, groups_N, ddof), eps, eps_mode)
    scored_N = (~parts_NK.isnan()).any(dim=1)
    if post == "batch_zscore":
        return batch_zscore(sum_N, scored_N, ddof, eps)
    return whiten_tokens(sum_N, scored_N, scores.lengths_N, ddof=ddof)


def maxrl(scores: Scores) -> Tensor:
    """Return (reward - mean) / mean of the group, so that rare successes weigh most (MaxRL, arXiv 2602.02710).

    The estimator is meant for rewards of at least 0. A group whose mean is not positive gets 0, as in prime-rl.
    """
    total_N = over_group(scores.rewards_N.nan_to_num(nan=0.0), scores.groups_N)
    mean_N = total_N / count_scored(scores.rewards_N, scores.groups_N).clamp(min=1)
    return divide(center(scores.rewards_N, scores.groups_N), mean_N, 0.0)


def role_ema(scores: Scores, *, decay: float = 0.95) -> Tensor:
    """Reward minus a running mean of the role's earlier rewards (SPIRAL, arXiv 2506.24119). Needs no siblings.

    Starts from `scores.baselines`. The state to keep for the next batch, and in the checkpoint, is the second value of
    `role_ema_step`.
    """
    return role_ema_step(scores, decay=decay)[0]


def role_ema_step(scores: Scores, *, decay: float = 0.95) -> tuple[Tensor, dict[str, float]]:
    """Return (advantages, baselines after the batch).

    Rollouts are taken in order. Each meets the baseline, then moves it.
    """
    if not 0 <= decay <= 1:
        raise ValueError(f"decay must be in [0, 1], got {decay}")
    baselines = dict(scores.baselines)
    advantages_N = torch.zeros_like(scores.rewards_N)
    for index, (role, reward) in enumerate(zip(scores.roles, scores.rewards_N.tolist(), strict=True)):
        if reward != reward:  # NaN: not scored
            continue
        baseline = baselines.get(role, 0.0)
        advantages_N[index] = reward - baseline
        baselines[role] = decay * baseline + (1 - decay) * reward
    return advantages_N, baselines


def role_baselines(scores: Scores, *, decay: float = 0.95) -> dict[str, float]:
    """Return the running baselines after the batch."""
    return role_ema_step(scores, decay=decay)[1]


def reinforce_plus_plus(scores: Scores, *, ddof: int = 1, eps: float = 1e-8) -> Tensor:
    """Whiten rewards over the batch's loss tokens, without groups (REINFORCE++, arXiv 2501.03262, gamma 1)."""
    return whiten_tokens(scores.rewards_N, scores.scored, scores.lengths_N, ddof=ddof, eps=eps)


def _outcomes(scores: Scores, members_M: Tensor, form: str, temperature: float) -> Tensor:
    if form == "matrix":
        return _preferences(scores, members_M)
    rewards_M = scores.rewards_N[members_M]
    gap_MM = rewards_M[:, None] - rewards_M[None, :]
    if form == "difference":
        return gap_MM
    return gap_MM.sign() / 2 + 0.5 if form == "win_rate" else (gap_MM / temperature).sigmoid()


def _preferences(scores: Scores, members_M: Tensor) -> Tensor:
    size, expected = tuple(scores.preferences_NN.shape), (len(scores.rewards_N),) * 2
    if size != expected:
        raise ValueError(f"form=matrix needs preferences of shape {expected}, got {size}")
    # Win minus loss: antisymmetric, with 0 on the diagonal
    outcome_MM = scores.preferences_NN[members_M][:, members_M].to(scores.rewards_N.dtype)
    beats_MM = (outcome_MM + outcome_MM.T - 1).fill_diagonal_(0.0)
    if bool((beats_MM.abs() > 1e-4).any()):
        raise ValueError(
            f"preferences must satisfy P_ij + P_ji = 1, got a sum off by {float(beats_MM.abs().max()):.4g}"
        )
    return outcome_MM


ADVANTAGES: dict[str, Estimator] = {
    "none": none,
    "group_zscore": group_zscore,
    "group_center": group_center,
    "leave_one_out": leave_one_out,
    "group_center_batch_std": group_center_batch_std,
    "group_center_token_whiten": group_center_token_whiten,
    "opo": opo,
    "gpg": gpg,
    "passk": passk,
    "pkpo": pkpo,
    "best_minus_second": best_minus_second,
    "pairwise": pairwise,
    "gdpo": gdpo,
    "maxrl": maxrl,
    "role_ema": role_ema,
    "reinforce_plus_plus": reinforce_plus_plus,
}
