"""What the rollouts of a step were like, over all ranks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
