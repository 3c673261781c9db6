"""Turn rewards into advantages: shaping, KL penalty, baseline, scale, selection, clip.

The formulas are in advantages.py, shaping.py, selection.py and turns.py; here they are put in that order. All pure.
Shapes: N rollouts of the batch, M turns of all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from covey.algorithm.credit.scores import ROUNDING, Scores, join
from covey.algorithm.credit.selection import Selected, weigh_and_clip
from covey.system import custom
from covey.types import Rollout


@dataclass(frozen=True, slots=True)
class CreditFunctions:
    """The functions from rewards to advantages, with options bound."""

    estimate: Callable[..., Any]
    """An entry of ADVANTAGES, or a custom one."""
    takes_answers: bool
    """Whether `estimate` reads the answers, besides the scores."""
    shaping: tuple[Callable[..., Any], ...]
    """Shaping functions in their order of application."""
    turn_credit: Callable[..., Tensor] | None
    """None where all tokens of a rollout have one advantage."""
    select: Callable[..., Selected] | None
    """None where every rollout trains."""
    leaves_out: Callable[[Rollout], bool]
    """Returns True for a rollout that a setting masks."""
    length_alpha: float | None = None
    """Exponent of `length_normalizer`; None does not weigh by length."""
    clip: float | None = None
    """Bound of `clamp_symmetric`, after which a group no longer sums to 0."""
    next_baselines: Callable[[Scores], Mapping[str, float]] | None = None
    """Moves the running baselines of roles; None for advantages without them."""
    turn_metrics: Callable[[Scores], dict[str, float]] | None = None
    """Metrics of how turns compare; None where they do not."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """The advantages of a whole batch."""

    scores: Scores
    """Scores with shaped rewards."""
    selected: Selected
    metrics: dict[str, float]
    """Logged by a custom advantage, and how turns compare."""
    baselines: Mapping[str, float]
    """Running baseline of each role after the batch."""
    of_turns_M: Tensor | None = None
    """Advantages of turns, in the order of `scores.turns`; None where those of a rollout share one."""


def assign(ranks: Sequence[Scores], functions: CreditFunctions, baselines: Mapping[str, float]) -> Assigned:
    """Compute the advantages of the rollouts of all ranks."""
    given = join(ranks)
    rewards_N = given.rewards_N
    for shape in functions.shaping:
        rewards_N = shape_rewards(shape, rewards_N, given)
    rewards_N = snap_ties(rewards_N - given.penalties_N, given.groups_N)
    given = replace(given, rewards_N=rewards_N, baselines=dict(baselines))
    logged: dict[str, float] = {}

    def estimate(on: Scores) -> Tensor:
        advantages, metrics = estimate_advantages(functions.estimate, on)
        logged.update(metrics)
        return advantages

    if functions.turn_credit is not None:
        return _assign_to_turns(given, functions, estimate, logged)
    keep_N = torch.ones_like(given.scored)
    select = functions.select
    selected = Selected(keep_N, estimate(given)) if select is None else selected_by(select, given, estimate)
    lengths_N = given.lengths_N * selected.keep_N  # weights are relative within what is trained
    advantages_N = weigh_and_clip(selected.advantages_N, lengths_N, functions.length_alpha, functions.clip)
    selected = Selected(selected.keep_N, advantages_N)
    # Baselines by role follow the selection
    if functions.next_baselines is not None:
        baselines = functions.next_baselines(given)
    return Assigned(given, selected, logged, baselines)


def _assign_to_turns(
    given: Scores, functions: CreditFunctions, estimate: Callable[[Scores], Tensor], logged: dict[str, float]
) -> Assigned:
    """Give each turn an advantage, each rollout their mean over tokens.

    The turns of a rollout without tokens count alike.
    """
    assert functions.turn_credit is not None, "asked for by a setting"
    turns, of_M = given.turns, given.turns.rollouts_M
    # Length weights are of whole episodes, the clip is of each turn
    advantages_M = functions.turn_credit(given, turns, estimate)
    weights_N = weigh_and_clip(torch.ones_like(given.rewards_N), given.lengths_N, functions.length_alpha, None)
    advantages_M = weigh_and_clip(advantages_M * weights_N[of_M], turns.lengths_M, None, functions.clip)
    if functions.turn_metrics is not None:
        logged |= functions.turn_metrics(given)
    zeros_N = torch.zeros_like(given.rewards_N)
    has_tokens_M = (zeros_N.index_add(0, of_M, turns.lengths_M) > 0)[of_M]
    weights_M = torch.where(has_tokens_M, turns.lengths_M, 1.0)
    sums_N = zeros_N.index_add(0, of_M, weights_M * advantages_M)
    means_N = sums_N / zeros_N.index_add(0, of_M, weights_M).clamp(min=1)
    return Assigned(given, Selected(torch.ones_like(given.scored), means_N), logged, given.baselines, advantages_M)


def snap_ties(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """Make rewards of a group equal where they differ by rounding alone.

    0.1 + 0.7 counts as 0.8: an estimator with eps 0, a comparison of pairs and a count of informative groups would
    otherwise see a difference.
    """
    rewards, groups = rewards_N.tolist(), groups_N.tolist()
    scored = [index for index, reward in enumerate(rewards) if reward == reward]
    least, group = 0.0, -1
    for index in sorted(scored, key=lambda index: (groups[index], rewards[index])):
        if groups[index] == group and rewards[index] - least <= ROUNDING * abs(rewards[index]):
            rewards[index] = least
        least, group = rewards[index], groups[index]
    return torch.tensor(rewards, dtype=rewards_N.dtype)


def estimate_advantages(estimator: Callable[..., Any], given: Scores) -> tuple[Tensor, dict[str, float]]:
    """Return advantages, 0 for unscored rollouts, and a custom estimator's logs.

    ValueError where a custom one returns anything but a finite number for each rollout.
    """
    if not isinstance(estimator, custom.Custom):
        return estimator(given), {}
    found = estimator(given, given.answers) if estimator.num_inputs == 2 else estimator(given)
    values, metrics = custom.split_metrics(found)
    found_N = estimator.check_tensor(values, tuple(given.rewards_N.shape), "rollout")
    advantages_N = torch.where(given.scored, found_N.to(given.rewards_N), 0.0)
    estimator.check_finite(advantages_N, given.scored, given.rewards_N, "reward")
    return advantages_N, {name: float(value) for name, value in metrics.items()}


def shape_rewards(shape: Callable[..., Any], rewards_N: Tensor, given: Scores) -> Tensor:
    """Return the rewards after one shaping; unscored ones stay NaN.

    ValueError where a custom one returns anything but a finite number for each rollout.
    """
    found_N = shape(rewards_N, given)
    if isinstance(shape, custom.Custom):
        found_N = shape.check_tensor(found_N, tuple(rewards_N.shape), "rollout").to(rewards_N)
        shape.check_finite(found_N, ~rewards_N.isnan(), rewards_N, "reward")
    return torch.where(rewards_N.isnan(), torch.nan, found_N)


def selected_by(select: Callable[..., Any], given: Scores, estimate: Callable[[Scores], Tensor]) -> Selected:
    """Return a selection with its advantages. ValueError for a wrong custom result."""
    selected = select(given, estimate)
    if isinstance(select, custom.Custom):
        shape = tuple(given.rewards_N.shape)
        if not isinstance(selected, Selected) or selected.keep_N.dtype != torch.bool or selected.keep_N.shape != shape:
            due = f"return covey.algorithm.credit.selection.Selected, keep_N one bool for each rollout, shape {shape}"
            raise select.error(due, f"{selected!r:.80}")
        select.check_tensor(selected.advantages_N, shape, "rollout")
        select.check_finite(selected.advantages_N, selected.keep_N, given.rewards_N, "reward")
    return selected
