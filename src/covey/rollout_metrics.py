"""What the rollouts of a step were like, over all ranks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from covey.credit import Credit
from covey.policy import distribution
from covey.types import Group


@dataclass(frozen=True, slots=True)
class RolloutFact:
    """What the metrics need of one rollout; small, so that ranks can exchange it."""

    num_tokens: int
    truncated: bool
    policy_version: int
    parts: Mapping[str, float]


def rollout_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Lengths, truncation, parts of the reward and staleness of this rank's groups and those of all others."""
    facts = [fact for of_rank in distribution.all_gather(_facts(groups)) for fact in of_rank]
    (num_groups,) = distribution.all_sum_ints(len(groups))
    if not facts:
        return {}
    lengths = [fact.num_tokens for fact in facts]
    metrics = {
        "completion_length_mean": sum(lengths) / len(lengths),
        "completion_length_max": float(max(lengths)),
        "truncated_fraction": sum(fact.truncated for fact in facts) / len(facts),
        "staleness_max": float(max(version - fact.policy_version for fact in facts)),
        "num_groups": float(num_groups),
    }
    parts = means(fact.parts for fact in facts)
    return metrics | {f"reward/{name}": mean for name, mean in parts.items()}


def fill_metrics(groups: Sequence[Group], credit: Credit, row: Mapping[str, float]) -> dict[str, float]:
    """What the infill document logs, by its own names; `loss` is there already."""
    own = [sum(rollout.sampler_logprobs) for group in groups for rollout in group.rollouts]
    log_probs = [value for of_rank in distribution.all_gather(own) for value in of_rank]
    given = [value for group in credit.advantages for value in group]
    advantages = [value for of_rank in distribution.all_gather(given) for value in of_rank]
    rewards = [float(reward) for reward in credit.scores.rewards_N if reward == reward]
    found = {ours: row.get(name, 0.0) for ours, name in DOCUMENT_NAMES.items()}
    return found | {
        "std_reward": stdev(rewards) if len(rewards) > 1 else 0.0,
        "mean_advantage": fmean(advantages) if advantages else 0.0,
        "mean_log_prob": fmean(log_probs) if log_probs else 0.0,
    }


def means(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of each name over the rows that have it, in the order of their first appearance.

    >>> means([{"a": 1.0}, {"a": 2.0, "b": 5.0}])
    {'a': 1.5, 'b': 5.0}
    """
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def _facts(groups: Sequence[Group]) -> list[RolloutFact]:
    return [
        RolloutFact(r.num_loss_tokens, r.finish_reason == "length", r.policy_version, dict(r.reward.parts))
        for group in groups
        for r in group.rollouts
    ]


DOCUMENT_NAMES = {
    "pg_loss": "policy_loss",
    "kl_penalty": "kl_loss",
    "mean_reward": "reward_mean",
    "mean_kl": "kl_sequence_mean",
}
"""The infill document's name of a metric -> ours."""
