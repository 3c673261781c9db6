"""From the rewards of a step to advantages: shaping, KL in the reward, baseline and scale, clip, selection.

The formulas are in advantages.py, shaping.py and selection.py; here they are put in that order. Statistics are over
the groups of all ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from covey.algorithm.build import CreditFunctions
from covey.algorithm.credit.advantages import role_ema_step
from covey.algorithm.credit.scores import Answer, Scores, scores, settled
from covey.algorithm.credit.selection import Selected, clip_advantages, length_normalizer
from covey.algorithm.credit.shaping import ShapingInputs
from covey.algorithm.credit.turns import Turns, anchored, as_turns
from covey.algorithm.settings import AlgorithmConfig
from covey.system import collectives, custom
from covey.trainer.batch import Advantage, is_left_out, turns_of
from covey.types import Group, Rollout, Turn


@dataclass(frozen=True, slots=True)
class Credit:
    """What each rollout of this rank's groups is trained with, group by group in the order given."""

    advantages: list[list[float]]
    """Of each rollout; where turns have advantages of their own, their mean over its tokens."""
    keep: list[list[bool]]
    """False where selection took the rollout out of the loss and its denominators."""
    scores: Scores
    """Shaped rewards of the whole step, all ranks."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What a custom advantage logs, and how turns compare; the same on every rank."""
    of_turns: list[list[tuple[float, ...]]] | None = None
    """Of each turn of each rollout; None where all tokens of a rollout have its advantage."""

    @property
    def trained_with(self) -> Sequence[Sequence[Advantage]]:
        """Return what `make_rows` takes."""
        return self.advantages if self.of_turns is None else self.of_turns

    @property
    def numbers(self) -> list[list[float]]:
        """Return all advantages of each group, one after the other."""
        if self.of_turns is None:
            return self.advantages
        return [[value for of_rollout in of_group for value in of_rollout] for of_group in self.of_turns]

    def of_each_turn(self, groups: Sequence[Group]) -> Sequence[Sequence[Sequence[float]]]:
        """Return the advantage of each turn of the groups' rollouts, an episode's where its turns share one."""
        if self.of_turns is not None:
            return self.of_turns
        pairs = [zip(g.rollouts, own, strict=True) for g, own in zip(groups, self.advantages, strict=True)]
        return [[(value,) * len(turns_of(rollout)) for rollout, value in of_group] for of_group in pairs]


@dataclass(frozen=True, slots=True)
class _Fact:
    """What the statistics need of one rollout. Small, so that ranks can exchange it."""

    group: tuple[int, int]
    reward: float
    parts: Mapping[str, float]
    num_tokens: int
    num_all_tokens: int
    num_turns: int
    truncated: bool
    is_left_out: bool
    turns: tuple[Turn, ...]
    """Only where they have advantages of their own."""
    token_ids: tuple[int, ...]
    role: str
    kl: float
    answer: Answer | None
    """Only where the advantage asks for it: prompts may be large."""


class CreditAssigner:
    """Turns groups into advantages by the algorithm's settings. Its only state are the running baselines of roles."""

    def __init__(
        self, functions: CreditFunctions, algorithm: AlgorithmConfig, part_weights: Mapping[str, float]
    ) -> None:
        """Keep the weights of a reward's parts, for estimators that take them one by one.

        Parts without a weight count 1. `functions` are `build_credit(algorithm)`.
        """
        self.baselines: dict[str, float] = {}
        self._functions = functions
        self._algorithm = algorithm
        self._part_weights = part_weights

    def assign(self, groups: Sequence[Group], kl: Sequence[Sequence[float]] | None = None) -> Credit:
        """`kl` is the penalty on the reward of each rollout, already weighted. None where it is in the loss or off."""
        of_ranks: list[list[_Fact]] = collectives.all_gather(self._facts(groups, kl))
        return self._assign(groups, of_ranks, collectives.rank())

    def assign_alone(self, groups: Sequence[Group], kl: Sequence[Sequence[float]] | None = None) -> Credit:
        """Assign within these groups of this rank alone, where no other group has a part in their advantages."""
        return self._assign(groups, [self._facts(groups, kl)], 0)

    def _assign(self, groups: Sequence[Group], of_ranks: Sequence[Sequence[_Fact]], rank: int) -> Credit:
        facts = [fact for of_rank in of_ranks for fact in of_rank]
        given = self._shape(facts)
        start = sum(len(of_rank) for of_rank in of_ranks[:rank])
        if self._functions.turn_credit is not None:
            return self._assign_to_turns(groups, facts, given, start)
        selected, metrics = self._select_rollouts(given, facts)
        advantages, keep = (
            _regroup(values_N.tolist(), start, groups) for values_N in (selected.advantages_N, selected.keep_N)
        )
        return Credit(advantages, keep, given, metrics)

    def _assign_to_turns(self, groups: Sequence[Group], facts: Sequence[_Fact], given: Scores, start: int) -> Credit:
        """Assign where turns have advantages of their own. `start` is the place of this rank's first fact."""
        assert self._functions.turn_credit is not None, "asked for by a setting"
        turns = _turns(facts)
        # Which episode each row of the estimator is of
        rows = turns.rollouts_M.tolist() if self._algorithm.turn_credit == "discounted" else range(len(facts))
        estimate, logged = self._estimator([facts[row] for row in rows])
        # Length weights are of whole episodes, the clip is of each turn
        advantages_M = self._functions.turn_credit(given, turns, estimate)
        alpha = self._algorithm.length_normalizer
        if alpha is not None:
            weights_N = length_normalizer(torch.ones_like(given.rewards_N), given.lengths_N, alpha=alpha)
            advantages_M = advantages_M * weights_N[turns.rollouts_M]
        advantages_M = clip_advantages(advantages_M, self._algorithm.advantage_clip)
        if self._algorithm.turn_credit == "anchor_state" and len(advantages_M) > 0:
            logged["anchored_fraction"] = float(anchored(given, turns).double().mean())
        of_facts = _split_by_rollout(turns, advantages_M, len(facts))
        of_turns = _regroup(of_facts, start, groups)
        pairs = [zip(group.rollouts, own, strict=True) for group, own in zip(groups, of_turns, strict=True)]
        means = [[_token_mean(rollout, values) for rollout, values in of_group] for of_group in pairs]
        return Credit(means, [[True] * len(group.rollouts) for group in groups], given, logged, of_turns)

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
        # Shape rewards, then subtract the KL penalty
        rewards_N, info = given.rewards_N, _shaping_inputs(facts, given.groups_N)
        left_out_N = torch.tensor([fact.is_left_out for fact in facts], dtype=torch.bool)
        given = replace(given, lengths_N=torch.where(left_out_N, 0.0, given.lengths_N))
        for shape in self._functions.shaping:
            rewards_N = shaped(shape, rewards_N, info)
        rewards_N = rewards_N - torch.tensor([fact.kl for fact in facts], dtype=torch.float64)
        return replace(given, rewards_N=settled(rewards_N, given.groups_N), baselines=dict(self.baselines))

    def _estimator(self, facts: Sequence[_Fact]) -> tuple[Callable[[Scores], Tensor], dict[str, float]]:
        """Return what makes advantages of scores, a row for each fact, and what a custom one logs when it is called."""
        answers = [fact.answer for fact in facts if fact.answer is not None]
        logged: dict[str, float] = {}

        def estimate(on: Scores) -> Tensor:
            advantages, metrics = estimated(
                self._functions.estimate, on, answers if self._functions.takes_answers else None
            )
            logged.update(metrics)
            return advantages

        return estimate, logged

    def _select_rollouts(self, given: Scores, facts: Sequence[_Fact]) -> tuple[Selected, dict[str, float]]:
        """Return what trains, with its advantages, and what a custom advantage logs."""
        estimate, logged = self._estimator(facts)
        if self._functions.select is None:
            selected = Selected(torch.ones_like(given.rewards_N, dtype=torch.bool), estimate(given))
        else:
            selected = selected_by(self._functions.select, given, estimate)
        # Weigh by length within what is trained, then clip
        advantages_N, alpha = selected.advantages_N, self._algorithm.length_normalizer
        if alpha is not None:
            advantages_N = length_normalizer(advantages_N, given.lengths_N * selected.keep_N, alpha=alpha)
        selected = replace(selected, advantages_N=clip_advantages(advantages_N, self._algorithm.advantage_clip))
        # Baselines by role follow the selection
        if self._algorithm.advantage == "role_ema":
            _, self.baselines = role_ema_step(given, **self._algorithm.advantage_options)
        return selected, logged

    def _facts(self, groups: Sequence[Group], kl: Sequence[Sequence[float]] | None) -> list[_Fact]:
        """Return a fact for each rollout, and one without a reward for each completion that could not be scored.

        A group so keeps its size, which pass@k needs.
        """
        facts: list[_Fact] = []
        for index, group in enumerate(groups):
            label = (collectives.rank(), index)
            penalties = [0.0] * len(group.rollouts) if kl is None else kl[index]
            facts.extend(self._fact(label, group, r, k) for r, k in zip(group.rollouts, penalties, strict=True))
            unscored = Answer(group.prompt, "", (), truncated=False)
            lost = _Fact(label, float("nan"), {}, 0, 0, 0, False, False, (), (), "", 0.0, unscored)
            facts.extend(lost for _ in group.failures)
        return facts if self._functions.takes_answers else [replace(fact, answer=None) for fact in facts]

    def _fact(self, label: tuple[int, int], group: Group, rollout: Rollout, kl: float) -> _Fact:
        chosen = tuple(t for t, trained in zip(rollout.target_ids, rollout.loss_mask, strict=True) if trained)
        truncated = rollout.finish_reason == "length"
        return _Fact(
            group=label,
            reward=rollout.reward.value,
            parts=rollout.parts,
            num_tokens=len(chosen),
            num_all_tokens=len(rollout.input_ids) + max(1, len(rollout.branches)),
            num_turns=_num_turns(rollout),
            truncated=truncated,
            is_left_out=is_left_out(rollout, self._algorithm),
            turns=() if self._functions.turn_credit is None else turns_of(rollout),
            token_ids=chosen,
            role=group.prompt.environment,
            kl=kl,
            answer=Answer(group.prompt, rollout.text, chosen, truncated),
        )


def estimated(
    estimator: Callable[..., Any], given: Scores, answers: Sequence[Answer] | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Return the advantages, and what a custom estimator logs. What was not scored gets 0, whatever it says.

    ValueError where a custom one returns anything but a finite number for each rollout.
    """
    found = estimator(given) if answers is None else estimator(given, answers)
    if not isinstance(estimator, custom.Custom):
        return found, {}
    values, metrics = custom.split_metrics(found)
    found_N = estimator.check_tensor(values, tuple(given.rewards_N.shape), "rollout")
    advantages_N = torch.where(given.scored, found_N.to(given.rewards_N), 0.0)
    estimator.check_finite(advantages_N, given.scored, given.rewards_N, "reward")
    return advantages_N, {name: float(value) for name, value in metrics.items()}


def shaped(shape: Callable[..., Any], rewards_N: Tensor, info: ShapingInputs) -> Tensor:
    """Return the rewards as one shaping leaves them. What was not scored stays so.

    ValueError where a custom one returns anything but a finite number for each rollout.
    """
    found_N = shape(rewards_N, info)
    if isinstance(shape, custom.Custom):
        found_N = shape.check_tensor(found_N, tuple(rewards_N.shape), "rollout").to(rewards_N)
        shape.check_finite(found_N, ~rewards_N.isnan(), rewards_N, "reward")
    return torch.where(rewards_N.isnan(), torch.nan, found_N)


def selected_by(select: Callable[..., Any], given: Scores, estimate: Callable[[Scores], Tensor]) -> Selected:
    """Return what a selection keeps, with its advantages. ValueError where a custom one returns anything else."""
    selected = select(given, estimate)
    if isinstance(select, custom.Custom):
        shape = tuple(given.rewards_N.shape)
        if not isinstance(selected, Selected) or selected.keep_N.dtype != torch.bool or selected.keep_N.shape != shape:
            requirement = (
                f"return covey.algorithm.credit.selection.Selected, keep_N one bool for each rollout, shape {shape}"
            )
            raise select.error(requirement, f"{selected!r:.80}")
        select.check_tensor(selected.advantages_N, shape, "rollout")
        select.check_finite(selected.advantages_N, selected.keep_N, given.rewards_N, "reward")
    return selected


def _num_turns(rollout: Rollout) -> int:
    """Return how many completions a rollout holds: stretches of loss tokens with an environment's reply between."""
    if rollout.turns:
        return len(rollout.turns)
    if rollout.input_length is not None:  # passes of one fill
        return 1
    mask = rollout.loss_mask
    return sum(chosen and not before for before, chosen in pairwise((False, *mask)))


def _shaping_inputs(facts: Sequence[_Fact], groups_N: Tensor) -> ShapingInputs:
    return ShapingInputs(
        groups_N=groups_N,
        lengths_N=torch.tensor([fact.num_tokens for fact in facts], dtype=torch.float64),
        total_lengths_N=torch.tensor([fact.num_all_tokens for fact in facts], dtype=torch.float64),
        turns_N=torch.tensor([fact.num_turns for fact in facts], dtype=torch.float64),
        truncated_N=torch.tensor([fact.truncated for fact in facts], dtype=torch.bool),
        token_ids=[fact.token_ids for fact in facts],
    )


def _turns(facts: Sequence[_Fact]) -> Turns:
    """Return the turns of all facts. What could not be scored has none."""
    rows = [(index, turn) for index, fact in enumerate(facts) for turn in fact.turns]
    return as_turns(
        [index for index, _ in rows],
        [turn.reward for _, turn in rows],
        [turn.end - turn.start for _, turn in rows],
        [turn.state for _, turn in rows],
    )


def _split_by_rollout(turns: Turns, values_M: Tensor, num_rollouts: int) -> list[tuple[float, ...]]:
    """Return the values of each rollout's turns."""
    found: list[list[float]] = [[] for _ in range(num_rollouts)]
    for index, value in zip(turns.rollouts_M.tolist(), values_M.tolist(), strict=True):
        found[index].append(value)
    return [tuple(values) for values in found]


def _token_mean(rollout: Rollout, of_turns: Sequence[float]) -> float:
    """Return the mean of a rollout's advantages over its tokens, of its turns where it has no token."""
    lengths = [turn.end - turn.start for turn in turns_of(rollout)]
    weights = lengths if any(lengths) else [1] * len(lengths)
    return sum(w * a for w, a in zip(weights, of_turns, strict=True)) / sum(weights)


def _regroup(values: Sequence[Any], start: int, groups: Sequence[Group]) -> list[list[Any]]:
    """Return the values of this rank's rollouts, group by group, without those of failures."""
    found: list[list[Any]] = []
    for group in groups:
        found.append(list(values[start : start + len(group.rollouts)]))
        start += len(group.rollouts) + len(group.failures)
    return found
