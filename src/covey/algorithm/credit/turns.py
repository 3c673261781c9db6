"""Turn credit: rewards of turns in, an advantage per turn out.

An episode's reward is what `episode` trains on and what is logged: its outcome plus the rewards r_1 ... r_K of its
turns. So the outcome is reward - sum of r_k, and shaping or a KL penalty on the reward belongs to it. Every entry of
TURN_CREDIT is `credit(scores, turns, estimate, *, options) -> advantages_M`, where `estimate(scores) -> advantages` is
the estimator of `algorithm.advantage`.

An episode that was not scored (NaN) enters no statistic and its turns get 0. Values of turns that differ by rounding
alone are equal: they have no spread. Shapes: N episodes of the batch, M turns of all of them.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from covey.algorithm.credit.scores import (
    ROUNDING,
    Scores,
    Turns,
    as_turns,
    center,
    divide,
    group_std,
    number_labels,
    over_group,
    scores,
)
from covey.system.lookup import check_options, one_of

Estimate = Callable[[Scores], Tensor]


def episode(scores: Scores, turns: Turns, estimate: Estimate) -> Tensor:
    """Give every turn the advantage of its episode's whole reward, outcome + sum of r_k."""
    return estimate(scores)[turns.rollouts_M]


def discounted(scores: Scores, turns: Turns, estimate: Estimate, *, gamma: float = 0.4) -> Tensor:
    """Estimate advantages of discounted returns over all turns of a group together (Kevin, arXiv 2507.11948).

    R_k = sum over j >= k of gamma^(j-k) r_j, the outcome being part of r_K. Each turn is a row of the estimator, in the
    group of its prompt: episodes may have unequal numbers of turns, and each turn counts once in mean and std. If
    every episode has one turn this is `episode`. ValueError unless 0 <= gamma <= 1.
    """
    return estimate(_rows_of_turns(scores, turns, returns(scores, turns, gamma)))


def turn_mixed(
    scores: Scores,
    turns: Turns,
    estimate: Estimate,
    *,
    weight: float = 1.0,
    scale: str = "std",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Add `weight` times a turn's own z-score to the advantage of the outcome (after MT-GRPO, arXiv 2505.11821).

    A_k = A_outcome + weight * (r_k - mean) / (std + eps), with mean and std over the group's scored attempts that have
    a turn k. A turn k that only one attempt has, or whose rewards are all equal there, adds 0. A_outcome is the
    estimator's on reward - sum of r_k. scale: std, or none, which leaves r_k - mean. ValueError for weight < 0.
    """
    _require_weight(weight)
    outcome_N = _snap_ties(outcomes(scores, turns), scores.groups_N, _sizes(scores, turns))
    outcome_M = estimate(replace(scores, rewards_N=outcome_N))[turns.rollouts_M]
    rewards_M = torch.where(outcome_N.isnan()[turns.rollouts_M], torch.nan, turns.rewards_M)
    groups = scores.groups_N[turns.rollouts_M].tolist()
    alike_M = number_labels(zip(groups, turns.places, strict=True))
    return outcome_M + weight * _standardise(rewards_M, alike_M, scale, ddof, eps)


def anchor_state(
    scores: Scores,
    turns: Turns,
    estimate: Estimate,
    *,
    weight: float = 1.0,
    gamma: float = 0.95,
    scale: str = "std",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Compare turns of a group that began in the same state, besides whole episodes (GiGPO, arXiv 2505.10978).

    A_k = A_episode + weight * (R_k - mean) / (std + eps), with R_k as in `discounted`, and mean and std over all scored
    turns of the group that began in a state of the same name, several of one episode included. A state of one turn
    alone, a turn whose state has no name, and equal returns add 0. A_episode is the estimator's on the whole reward.
    scale: std, or none, which leaves R_k - mean. ValueError for weight < 0, or unless 0 <= gamma <= 1.
    """
    _require_weight(weight)
    groups = scores.groups_N[turns.rollouts_M].tolist()
    alike_M = number_labels(_anchors(groups, turns))
    return_M = _snap_ties(returns(scores, turns, gamma), alike_M, _sizes(scores, turns)[turns.rollouts_M])
    step_M = _standardise(return_M, alike_M, scale, ddof, eps)
    return episode(scores, turns, estimate) + weight * step_M


def outcomes(scores: Scores, turns: Turns) -> Tensor:
    """Return each episode's reward minus its turns' rewards, (N,), NaN if unscored."""
    of_turns_N = torch.zeros_like(scores.rewards_N).index_add(0, turns.rollouts_M, turns.rewards_M)
    return scores.rewards_N - of_turns_N


def returns(scores: Scores, turns: Turns, gamma: float) -> Tensor:
    """Return the discounted return R_k of each turn, (M,).

    R_k = sum over j >= k of gamma^(j-k) r_j, the outcome being part of the last turn's reward.
    NaN where the episode was not scored. ValueError unless 0 <= gamma <= 1.
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be in [0, 1], got {gamma}")
    outcome_N = outcomes(scores, turns).tolist()
    found: list[float] = []
    later: dict[int, float] = {}
    for rollout, reward in zip(reversed(turns.rollouts_M.tolist()), reversed(turns.rewards_M.tolist()), strict=True):
        is_last = rollout not in later
        later[rollout] = reward + (outcome_N[rollout] if is_last else gamma * later[rollout])
        found.append(later[rollout])
    return torch.tensor(found[::-1], dtype=scores.rewards_N.dtype)


def shares_anchor(scores: Scores, turns: Turns) -> Tensor:
    """Return True for turns that share a state in their group, bool (M,)."""
    alike_M = number_labels(_anchors(scores.groups_N[turns.rollouts_M].tolist(), turns))
    return over_group(torch.ones_like(turns.rewards_M), alike_M) > 1


def anchored_fraction(scores: Scores) -> dict[str, float]:
    """Measure the share of turns that share a state; {} without turns."""
    found_M = shares_anchor(scores, scores.turns)
    return {"anchored_fraction": float(found_M.double().mean())} if len(found_M) > 0 else {}


def _anchors(groups: Sequence[int], turns: Turns) -> list[Hashable]:
    """Name each turn's group of comparison; a nameless state stands alone."""
    pairs = enumerate(zip(groups, turns.states, strict=True))
    return [(group, state) if state else index for index, (group, state) in pairs]


def _rows_of_turns(scores: Scores, turns: Turns, values_M: Tensor) -> Scores:
    """Make a row per turn, without loss tokens for masked rollouts."""
    rows = scores.rows(turns.rollouts_M)
    return replace(
        rows,
        rewards_N=_snap_ties(values_M, rows.groups_N, _sizes(scores, turns)[turns.rollouts_M]),
        lengths_N=torch.where(rows.lengths_N > 0, turns.lengths_M, 0.0),
        written_N=turns.lengths_M,
        parts_NK=rows.parts_NK[:, :0],
        weights_K=rows.weights_K[:0],
        part_names=(),
        turns=as_turns([], []),
    )


def _standardise(values_M: Tensor, alike_M: Tensor, scale: str, ddof: int, eps: float) -> Tensor:
    """Standardise values over alike turns, 0 for one alone or equal ones."""
    one_of("scale", scale, ("std", "none"))
    center_M = center(values_M, alike_M)
    return center_M if scale == "none" else divide(center_M, group_std(values_M, alike_M, ddof), eps)


def _snap_ties(values: Tensor, groups: Tensor, sizes: Tensor) -> Tensor:
    """Make values of a group equal where they differ by rounding alone."""
    known = ~values.isnan()
    low = over_group(torch.where(known, values, torch.inf), groups, "amin")
    high = over_group(torch.where(known, values, -torch.inf), groups, "amax")
    is_equal = known & (high - low <= ROUNDING * over_group(sizes, groups, "amax"))
    return torch.where(is_equal, low, values)


def _sizes(scores: Scores, turns: Turns) -> Tensor:
    """Return the magnitude of each episode's outcome and returns, (N,)."""
    of_turns_N = torch.zeros_like(scores.rewards_N).index_add(0, turns.rollouts_M, turns.rewards_M.abs())
    return scores.rewards_N.nan_to_num(nan=0.0).abs() + of_turns_N


def _require_weight(weight: float) -> None:
    if weight < 0:
        raise ValueError(f"weight must be >= 0, got {weight}")


TURN_CREDIT: dict[str, Callable[..., Tensor]] = {
    "episode": episode,
    "discounted": discounted,
    "turn_mixed": turn_mixed,
    "anchor_state": anchor_state,
}
"""Estimators by the name that `algorithm.turn_credit` takes."""


def chosen_turn_credit(name: str, options: Mapping[str, Any]) -> Callable[..., Tensor]:
    """Return an entry of TURN_CREDIT with its options bound.

    ValueError for a name, an option or a number that it does not take.
    """
    setting = "algorithm.turn_credit_options"
    function = TURN_CREDIT[one_of("algorithm.turn_credit", name, TURN_CREDIT)]
    check_options(function, options, setting=setting)
    credit = partial(function, **options)
    try:  # a number out of range is refused without any turn, too
        credit(scores([], []), as_turns([], []), lambda given: given.rewards_N)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{setting} of {name}: {error}") from error
    return credit
