"""From the rewards of a step to advantages: shaping, KL in the reward, baseline and scale, clip, selection.

The formulas are in advantages.py, shaping.py and selection.py; here they are put in that order. Statistics are over
the groups of all ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from covey.advantages import ADVANTAGES, role_ema_step
from covey.config import AlgorithmConfig
from covey.policy import distribution
from covey.scores import Scores, scores
from covey.selection import SELECTION, Selected, clip_advantages
from covey.shaping import SHAPING, ShapingInputs, length_normalizer
from covey.tables import check_options, resolve
from covey.types import Group, Rollout


@dataclass(frozen=True, slots=True)
class Credit:
    """What each rollout of this rank's groups is trained with, group by group in the order given."""

    advantages: list[list[float]]
    keep: list[list[bool]]
    """False where selection took the rollout out of the loss and its denominators."""
    scores: Scores
    """Shaped rewards of the whole step, all ranks."""


@dataclass(frozen=True, slots=True)
class _Fact:
    """What the statistics need of one rollout; small, so that ranks can exchange it."""

    group: tuple[int, int]
    reward: float
    parts: Mapping[str, float]
    num_tokens: int
    num_all_tokens: int
    truncated: bool
    token_ids: tuple[int, ...]
    role: str
    kl: float


class CreditAssigner:
    """Turns groups into advantages by the algorithm's settings. Its only state are the running baselines of roles."""

    def __init__(self, algorithm: AlgorithmConfig, part_weights: Mapping[str, float]) -> None:
        """`part_weights` weigh the parts of a reward where an estimator takes them one by one; others weigh 1."""
        self.baselines: dict[str, float] = {}
        self._algorithm = algorithm
        self._part_weights = part_weights
        self._estimator = bind(algorithm.advantage, algorithm.advantage_options, ADVANTAGES, "advantage_options")
        self._shaping = [bind(name, options, SHAPING, "shaping") for name, options in algorithm.shaping.items()]
        self._select: Callable[..., Selected] | None = None
        if algorithm.selection is not None:
            self._select = bind(algorithm.selection, algorithm.selection_options, SELECTION, "selection_options")

    def assign(self, groups: Sequence[Group], kl: Sequence[Sequence[float]] | None = None) -> Credit:
        """`kl` is the penalty on the reward of each rollout, already weighted; None where it is in the loss or off."""
        local = _facts(groups, kl)
        of_ranks: list[list[_Fact]] = distribution.all_gather(local)
        facts = [fact for of_rank in of_ranks for fact in of_rank]
        given = self._shape(facts)
        advantages_N, keep_N = self._advantages(given)
        start = sum(len(of_rank) for of_rank in of_ranks[: distribution.rank()])
        return Credit(_regroup(advantages_N, start, groups), _regroup(keep_N, start, groups), given)

    def state_dict(self) -> dict[str, Any]:
        return {"baselines": self.baselines}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.baselines = dict(state["baselines"])

    def _shape(self, facts: Sequence[_Fact]) -> Scores:
        names = list(dict.fromkeys(name for fact in facts for name in fact.parts))
        given = scores(
            [fact.reward for fact in facts],
            [fact.group for fact in facts],
            lengths=[fact.num_tokens for fact in facts],
            parts=[[fact.parts.get(name, float("nan")) for name in names] for fact in facts] if names else None,
            weights=[self._part_weights.get(name, 1.0) for name in names] if names else None,
            roles=[fact.role for fact in facts],
        )
        rewards_N, info = given.rewards_N, _shaping_inputs(facts, given.groups_N)
        for shape in self._shaping:
            rewards_N = shape(rewards_N, info)
        rewards_N = rewards_N - torch.tensor([fact.kl for fact in facts], dtype=torch.float64)
        return replace(given, rewards_N=rewards_N, baselines=dict(self.baselines))

    def _advantages(self, given: Scores) -> tuple[Tensor, Tensor]:
        def estimate(on: Scores) -> Tensor:
            advantages_N = self._estimator(on)
            alpha = self._algorithm.length_normalizer
            if alpha is not None:
                advantages_N = length_normalizer(advantages_N, on.lengths_N, alpha=alpha)
            return clip_advantages(advantages_N, self._algorithm.advantage_clip)

        if self._select is None:
            selected = Selected(torch.ones_like(given.rewards_N, dtype=torch.bool), estimate(given))
        else:
            selected = self._select(given, estimate)
        if self._algorithm.advantage == "role_ema":
            _, self.baselines = role_ema_step(given, **self._algorithm.advantage_options)
        return selected.advantages_N, selected.keep_N


def bind(
    name: str, options: Mapping[str, Any], table: Mapping[str, Callable[..., Any]], setting: str
) -> Callable[..., Any]:
    """The function a setting names with its options bound; ValueError for a name or an option that does not exist."""
    function = resolve(name, table)
    check_options(function, options, setting=f"algorithm.{setting}")
    return partial(function, **options)


def _facts(groups: Sequence[Group], kl: Sequence[Sequence[float]] | None) -> list[_Fact]:
    """One fact a rollout, and one without a reward for each completion that could not be scored, so that a group
    keeps its size (pass@k needs it)."""
    facts: list[_Fact] = []
    for index, group in enumerate(groups):
        label = (distribution.rank(), index)
        penalties = [0.0] * len(group.rollouts) if kl is None else kl[index]
        facts.extend(_fact(label, group, r, k) for r, k in zip(group.rollouts, penalties, strict=True))
        facts.extend(_Fact(label, float("nan"), {}, 0, 0, False, (), "", 0.0) for _ in group.failures)
    return facts


def _fact(label: tuple[int, int], group: Group, rollout: Rollout, kl: float) -> _Fact:
    chosen = tuple(t for t, trained in zip(rollout.target_ids, rollout.loss_mask, strict=True) if trained)
    return _Fact(
        group=label,
        reward=rollout.reward.value,
        parts=rollout.reward.parts,
        num_tokens=len(chosen),
        num_all_tokens=len(rollout.input_ids) + 1,
        truncated=rollout.finish_reason == "length",
        token_ids=chosen,
        role=group.prompt.environment,
        kl=kl,
    )


def _shaping_inputs(facts: Sequence[_Fact], groups_N: Tensor) -> ShapingInputs:
    return ShapingInputs(
        groups_N=groups_N,
        lengths_N=torch.tensor([fact.num_tokens for fact in facts], dtype=torch.float64),
        total_lengths_N=torch.tensor([fact.num_all_tokens for fact in facts], dtype=torch.float64),
        turns_N=torch.ones(len(facts), dtype=torch.float64),
        truncated_N=torch.tensor([fact.truncated for fact in facts], dtype=torch.bool),
        token_ids=[fact.token_ids for fact in facts],
    )


def _regroup(values_N: Tensor, start: int, groups: Sequence[Group]) -> list[list[Any]]:
    """The values of this rank's rollouts, group by group; those of failures are left out."""
    values: list[list[Any]] = []
    for group in groups:
        values.append(values_N[start : start + len(group.rollouts)].tolist())
        start += len(group.rollouts) + len(group.failures)
    return values
