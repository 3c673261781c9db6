"""From groups to advantages, by columns of all ranks' rollouts. The arithmetic is in covey.algorithm.credit.assign."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covey.algorithm.credit.assign import CreditFunctions, assign
from covey.algorithm.credit.scores import Scores, Turns
from covey.system import collectives
from covey.types import Group, Reward, Rollout

Advantage = float | Sequence[float]
"""Advantage of a rollout: one for all its loss tokens, or one for each of its turns."""


@dataclass(frozen=True, slots=True)
class Credit:
    """The advantages of this rank's rollouts, group by group."""

    advantages: list[list[float]]
    """Advantage of each rollout; where turns have advantages of their own, their mean over its tokens."""
    keep: list[list[bool]]
    """False where selection took the rollout out of the loss and its denominators."""
    in_loss: list[list[bool]]
    """False for these, and for rollouts that settings mask or that have no loss token."""
    scores: Scores
    """Shaped rewards of the whole step, all ranks."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of a custom advantage, and of how turns compare; the same on every rank."""
    of_turns: list[list[tuple[float, ...]]] | None = None
    """Advantages of each rollout's turns; None where all tokens of a rollout have its advantage."""

    @property
    def row_advantages(self) -> Sequence[Sequence[Advantage]]:
        return self.advantages if self.of_turns is None else self.of_turns

    @property
    def group_advantages(self) -> list[list[float]]:
        """Return all advantages of each group, one after the other."""
        if self.of_turns is None:
            return self.advantages
        return [[value for of_rollout in of_group for value in of_rollout] for of_group in self.of_turns]


class CreditAssigner:
    """Turns groups into advantages; its only state is the roles' baselines."""

    def __init__(self, functions: CreditFunctions, part_weights: Mapping[str, float]) -> None:
        """Set the functions, and the weights of a reward's parts.

        Parts without a weight count 1. `functions` are `build_credit(algorithm)`.
        """
        self.baselines: Mapping[str, float] = {}
        self._functions = functions
        self._part_weights = part_weights

    def assign(
        self, groups: Sequence[Group], kl: Sequence[Sequence[float]] | None = None, *, alone: bool = False
    ) -> Credit:
        """Assign advantages within the groups of all ranks, or within these `alone`.

        Collective unless `alone`.
        `kl` is the penalty on the reward of each rollout, already weighted. None where it is in the loss or off.
        """
        own = self._scores(groups, kl)
        ranks: list[Scores] = [own] if alone else collectives.all_gather(own)
        found = assign(ranks, self._functions, self.baselines)
        self.baselines = found.baselines
        first = 0 if alone else sum(len(of_rank.rewards_N) for of_rank in ranks[: collectives.rank()])
        advantages = _regroup(found.selected.advantages_N.tolist(), first, groups)
        keep_N = found.selected.keep_N
        keep = _regroup(keep_N.tolist(), first, groups)
        in_loss = _regroup((keep_N & (found.scores.lengths_N > 0)).tolist(), first, groups)
        of_turns = None
        if found.of_turns_M is not None:
            values: list[list[float]] = [[] for _ in found.scores.rewards_N]
            pairs = zip(found.scores.turns.rollouts_M.tolist(), found.of_turns_M.tolist(), strict=True)
            for row, value in pairs:
                values[row].append(value)
            of_turns = _regroup(list(map(tuple, values)), first, groups)
        return Credit(advantages, keep, in_loss, found.scores, found.metrics, of_turns)

    def state_dict(self) -> dict[str, Any]:
        return {"baselines": dict(self.baselines)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.baselines = dict(state["baselines"])

    def _scores(self, groups: Sequence[Group], kl: Sequence[Sequence[float]] | None) -> Scores:
        """Put this rank's rollouts into columns, failures included. So a group keeps its size, which pass@k needs."""
        members = [(*group.rollouts, *(UNSCORED,) * len(group.failures)) for group in groups]
        places = [number for number, own in enumerate(members) for _ in own]
        prompts = tuple(groups[number].prompt for number in places)
        rollouts = [one for own in members for one in own]
        given = kl if kl is not None else [(0.0,) * len(group.rollouts) for group in groups]
        penalties = [
            value for group, own in zip(groups, given, strict=True) for value in (*own, *(0.0,) * len(group.failures))
        ]
        token_ids = tuple(tuple(compress(one.target_ids, one.loss_mask)) for one in rollouts)
        names = tuple(dict.fromkeys(name for one in rollouts for name in one.parts))
        parts = [[one.parts.get(name, math.nan) for name in names] for one in rollouts]
        written_N, functions = _float64([len(ids) for ids in token_ids]), self._functions
        is_masked_N = torch.tensor([functions.leaves_out(one) for one in rollouts], dtype=torch.bool)
        return Scores(
            rewards_N=_float64([one.reward.value for one in rollouts]),
            groups_N=torch.tensor(places, dtype=torch.int64),
            lengths_N=torch.where(is_masked_N, 0.0, written_N),
            written_N=written_N,
            total_lengths_N=_float64([len(one.input_ids) + max(1, len(one.branches)) for one in rollouts]),
            turns_N=_float64([_num_turns(one) for one in rollouts]),
            truncated_N=torch.tensor([one.finish_reason == "length" for one in rollouts], dtype=torch.bool),
            penalties_N=_float64(penalties),
            parts_NK=_float64(parts).view(len(rollouts), len(names)),
            weights_K=_float64([self._part_weights.get(name, 1.0) for name in names]),
            part_names=names,
            roles=tuple(prompt.environment for prompt in prompts),
            token_ids=token_ids,
            turns=_turns(rollouts if functions.turn_credit is not None else ()),
            prompts=prompts if functions.takes_answers else (),
            texts=tuple(one.text for one in rollouts) if functions.takes_answers else (),
        )


UNSCORED = Rollout((), (), (), (), Reward(math.nan), "", "stop", 0)
"""Row of a completion without a reward."""


def _turns(rollouts: Sequence[Rollout]) -> Turns:
    turns = [(row, turn) for row, one in enumerate(rollouts) if one is not UNSCORED for turn in one.policy_turns]
    return Turns(
        torch.tensor([row for row, _ in turns], dtype=torch.int64),
        _float64([turn.reward for _, turn in turns]),
        _float64([turn.end - turn.start for _, turn in turns]),
        tuple(turn.state for _, turn in turns),
    )


def _float64(values: Sequence[Any]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float64))


def _num_turns(rollout: Rollout) -> int:
    """Count a rollout's completions: stretches of loss tokens."""
    if rollout.turns:
        return len(rollout.turns)
    if rollout.input_length is not None:  # passes of one fill
        return 1
    return bytes((False, *rollout.loss_mask)).count(b"\0\1")


def _regroup(values: Sequence[Any], start: int, groups: Sequence[Group]) -> list[list[Any]]:
    """Return this rank's values by group, without failures'."""
    found: list[list[Any]] = []
    for group in groups:
        found.append(list(values[start : start + len(group.rollouts)]))
        start += len(group.rollouts) + len(group.failures)
    return found
