"""Metrics of a step's rollouts, over all ranks."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from math import isfinite, isnan
from statistics import correlation
from typing import NamedTuple, TypeVar, get_args

import numpy as np

from covey.algorithm.credit.groups import Credit
from covey.algorithm.metrics import MEASURED, group_metrics, value
from covey.rollouts.source import STALE, Dropped
from covey.run.build import Run
from covey.system import collectives
from covey.types import UNREWARDED, Group, Rollout, StopReason

T = TypeVar("T")
Row = dict[str, float | None]
"""Numbers to log; None where there was nothing to average."""


class StepResult(NamedTuple):
    """The groups of a step and its results."""

    groups: list[Group]
    dropped: list[Dropped]
    """Rollouts that this rank sampled and did not train."""
    credit: Credit
    metrics: dict[str, float]


MOST_TURNS = 8
"""Maximum turns of an episode that are logged one by one."""
TOP_SHARE = 0.01
"""Share of a step's rollouts whose part in all advantages is logged."""


def step_row(run: Run, step: int, stepped: StepResult, counted: Row) -> Row:
    """Return the metrics of a step with those `counted` besides. Collective."""
    groups, dropped, credit, metrics = stepped
    row: Row = {
        **rollout_metrics(groups, [one.group for one in dropped], credit, step),
        **{name: value(average) for name, average in group_metrics(credit.scores).items()},
        **dict.fromkeys(MEASURED),
        **metrics,
        **{f"advantage/{name}": number for name, number in credit.metrics.items()},
        **counted,
    }
    if row["truncated_fraction"] == 1 and not (run.policy.stop_ids or run.config.sampling.stop):
        row["truncated_fraction"] = None  # nothing could end a completion
    return row if run.policy.mask_id is None else row | fill_metrics(groups, credit, row)


def count_drops(run: Run, dropped: Sequence[Dropped]) -> Counter[str]:
    """Count what all ranks left out of a step, by reason. Collective."""
    own = Counter(run.source.take_drops())
    own[STALE] += sum(one.reason == STALE for one in dropped)
    drops: Counter[str] = Counter()
    for of_rank in collectives.all_gather(dict(own)):
        drops.update(of_rank)
    return drops


def rollout_metrics(groups: Sequence[Group], dropped: Sequence[Group], credit: Credit, version: int) -> Row:
    """Describe this step's rollouts on all ranks.

    `dropped` are sampled groups that are not trained; `version` counts finished training steps.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    facts = _of_all_ranks(
        [(one.num_loss_tokens, one.finish_reason == "length", one.policy_version, dict(one.parts)) for one in rollouts]
    )
    lengths, truncated, versions, earned = zip(*facts, strict=True) if facts else ((), (), (), ())
    sampled = _of_all_ranks([reward for group in (*groups, *dropped) for reward in group.earned])
    num_groups, num_dropped = collectives.all_sum_ints(len(groups), len(dropped))
    row: Row = {
        "completion_length_mean": _mean(lengths),
        "completion_length_max": float(max(lengths)) if lengths else None,
        "truncated_fraction": _mean(truncated),
        "staleness_max": float(version - min(versions)) if versions else None,
        "num_groups": float(num_groups),
        "num_groups_sampled": float(num_groups + num_dropped),
        "sampled_reward_mean": _mean(sampled),
    }
    # The part of turns is logged where a reward names it
    names = {*_of_all_ranks([*{name for one in rollouts for name in one.reward.parts}])} - {UNREWARDED}
    parts = {name: values for name, values in _columns(earned).items() if name in names}
    row |= {f"reward/{name}": _mean(values) for name, values in parts.items()}
    row |= {f"reward_std/{name}": _std(values) for name, values in parts.items()}
    row |= _episode_metrics(groups) | _repetition(groups) | _credit_metrics(credit)
    return row | {"advantage_agreement": _agreement(groups, credit)} | _turn_metrics(groups, credit)


def _agreement(groups: Sequence[Group], credit: Credit) -> float | None:
    """Return the mean correlation of advantages and rewards: 1 for GRPO."""
    pairs = [(group.rewards, own) for group, own in zip(groups, credit.advantages, strict=True)]
    differ = [pair for pair in pairs if all(len(set(values)) > 1 and all(map(isfinite, values)) for values in pair)]
    return _mean(_of_all_ranks([correlation(rewards, own) for rewards, own in differ]))


def _repetition(groups: Sequence[Group]) -> Row:
    """Return the shares of distinct answers, and of contradictory twins."""
    found = _of_all_ranks([_count_repeated(group) for group in groups if group.rollouts])
    size = sum(of_group[0] for of_group in found)
    return {
        "unique_fraction": _mean([different / number for number, different, _ in found]),
        "disagreement_fraction": sum(of_group[2] for of_group in found) / size if size else None,
    }


def _count_repeated(group: Group) -> tuple[int, int, int]:
    rewards: dict[str, list[float]] = {}
    for rollout in group.rollouts:
        said = f"{rollout.finish_reason} {rollout.text}" + (f" {rollout.messages}" if rollout.messages else "")
        rewards.setdefault(said, []).append(rollout.reward.value)
    judged_twice = sum(len(of_text) for of_text in rewards.values() if max(of_text) - min(of_text) > 0)
    return len(group.rollouts), len(rewards), judged_twice


def _credit_metrics(credit: Credit) -> Row:
    """Return the spread of trained rewards, and the advantages in the loss."""
    rewards = [reward for reward in credit.scores.earned.tolist() if not isnan(reward)]
    pairs = zip(credit.advantages, credit.keep, strict=True)
    advantages = _of_all_ranks([value for of_group, flags in pairs for value in compress(of_group, flags)])
    sizes = sorted(map(abs, advantages), reverse=True)
    largest, total = sum(sizes[: max(1, int(TOP_SHARE * len(sizes)))]), sum(sizes)
    return {
        "reward_std": _std(rewards),
        "advantage_mean": _mean(advantages),
        "advantage_std": _std(advantages),
        "advantage_top_share": largest / total if total else None,
    }


@dataclass(frozen=True, slots=True)
class EpisodeFact:
    """The facts of one episode that metrics need, exchanged by ranks."""

    stop_reason: StopReason
    num_turns: int
    num_given: int
    """Tokens that were said to the policy, the prompt's aside."""
    num_chosen: int
    num_branches: int
    num_re_encoded: int


def _episode_metrics(groups: Sequence[Group]) -> Row:
    own = [_fact(rollout, rollout.stop_reason) for group in groups for rollout in group.rollouts if rollout.stop_reason]
    facts = _of_all_ranks(own)
    if not facts:
        return {}
    given, chosen = sum(fact.num_given for fact in facts), sum(fact.num_chosen for fact in facts)
    row: Row = {
        "turns_mean": _mean([fact.num_turns for fact in facts]),
        "turns_max": float(max(fact.num_turns for fact in facts)),
        "environment_token_fraction": given / (given + chosen) if given + chosen else None,
        "branches_mean": _mean([fact.num_branches for fact in facts]),
        "re_encoded_tokens": float(sum(fact.num_re_encoded for fact in facts)),
        "prefix_breaks": float(sum(fact.num_branches - 1 for fact in facts)),
    }
    return row | {f"stop/{why}": _mean([fact.stop_reason == why for fact in facts]) for why in get_args(StopReason)}


def _fact(rollout: Rollout, reason: StopReason) -> EpisodeFact:
    branches = [rollout.loss_mask[start:end] for start, end in rollout.sequences]
    # All after the first token chosen in a branch is said to the policy or by it
    told = [branch[branch.index(True) :] for branch in branches if True in branch]
    return EpisodeFact(
        stop_reason=reason,
        num_turns=len(rollout.turns),
        num_given=sum(not chosen for branch in told for chosen in branch),
        num_chosen=rollout.num_loss_tokens,
        num_branches=len(branches),
        num_re_encoded=rollout.re_encoded_tokens,
    )


def _turn_metrics(groups: Sequence[Group], credit: Credit) -> Row:
    pairs = [
        (rollout, own if isinstance(own, Sequence) else (own,) * len(rollout.turns))
        for group, of_group in zip(groups, credit.row_advantages, strict=True)
        for rollout, own in zip(group.rollouts, of_group, strict=True)
        if rollout.turns
    ]
    facts = _of_all_ranks([(tuple(turn.reward for turn in rollout.turns), tuple(own)) for rollout, own in pairs])
    void = _of_all_ranks([any(turn.is_void for turn in rollout.turns) for rollout, _ in pairs])
    if not facts:
        return {}
    row: Row = {"void_fraction": _mean(void)}
    for place in range(min(MOST_TURNS, max(len(earned) for earned, _ in facts))):
        row[f"turn_reward/{place + 1}"] = _mean([earned[place] for earned, _ in facts if place < len(earned)])
        row[f"turn_advantage/{place + 1}"] = _mean([own[place] for _, own in facts if place < len(own)])
    return row


def fill_metrics(groups: Sequence[Group], credit: Credit, row: Mapping[str, float | None]) -> Row:
    """Name a masked policy's metrics as the infill document does."""
    own = [sum(rollout.sampler_logprobs) for group in groups for rollout in group.rollouts]
    advantages = _of_all_ranks([value for group in credit.advantages for value in group])
    found: Row = {ours: row.get(name, 0.0) for ours, name in DOCUMENT_NAMES.items()}
    return found | {
        "std_reward": row["reward_std"],
        "mean_advantage": _mean(advantages),
        "mean_log_prob": _mean(_of_all_ranks(own)),
    }


def count_tokens(groups: Iterable[Group]) -> int:
    """Count sampled tokens, those of unscored completions included."""
    counts = [[*(r.num_loss_tokens for r in g.rollouts), *(f.num_tokens for f in g.failures)] for g in groups]
    return sum(map(sum, counts))


def means(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Average each name over the rows that have it, in order.

    >>> means([{"a": 1.0}, {"a": 2.0, "b": 5.0}])
    {'a': 1.5, 'b': 5.0}
    """
    return {name: sum(values) / len(values) for name, values in _columns(rows).items()}


def _columns(rows: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, number in row.items():
            values.setdefault(name, []).append(number)
    return values


def _of_all_ranks(own: Sequence[T]) -> list[T]:
    return [value for of_rank in collectives.all_gather(own) for value in of_rank]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _std(values: Sequence[float]) -> float | None:
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


DOCUMENT_NAMES = {
    "pg_loss": "policy_loss",
    "kl_penalty": "kl_loss",
    "mean_reward": "reward_mean",
    "mean_kl": "kl_sequence_mean",
}
"""The infill document's name of a metric -> ours."""


def environment_metrics(run: Run) -> list[Mapping[str, float]]:
    """Return the metrics of each rank's or sampler's environment."""
    return [metrics for of_rank in collectives.all_gather(run.source.environment_metrics()) for metrics in of_rank]


def why_no_signal(row: Row, credit: Credit, dropped: Sequence[Dropped]) -> str:
    """Explain why nothing can be trained on."""
    if not row["num_groups"]:
        failures = [failure.reason for one in dropped for failure in one.group.failures if failure.is_fault]
        return ": ".join(["every group was dropped", *failures[-1:]])
    if any(collectives.all_gather(any(a != 0 for group in credit.group_advantages for a in group))):
        return "every completion that could teach something is masked or empty"
    return "the rewards of every group are equal"
