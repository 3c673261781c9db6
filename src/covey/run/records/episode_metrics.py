"""What the episodes of a step were like: turns, why they ended, how much of them the environment said."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from covey.system import collectives
from covey.types import Group, Rollout, StopReason


@dataclass(frozen=True, slots=True)
class EpisodeFact:
    """What the metrics need of one episode. Small, so that ranks can exchange it."""

    stop_reason: StopReason
    num_turns: int
    num_given: int
    """Tokens that were said to the policy, the prompt's aside."""
    num_chosen: int
    num_branches: int
    num_re_encoded: int


def episode_metrics(groups: Sequence[Group]) -> dict[str, float | None]:
    """Describe the episodes of all ranks. Nothing where there are none."""
    # Gather facts of the episodes of all ranks
    own = [_fact(rollout, rollout.stop_reason) for group in groups for rollout in group.rollouts if rollout.stop_reason]
    facts = [fact for of_rank in collectives.all_gather(own) for fact in of_rank]
    if not facts:
        return {}
    # Count tokens and ways of ending
    turns = sum(fact.num_turns for fact in facts)
    given, chosen = sum(fact.num_given for fact in facts), sum(fact.num_chosen for fact in facts)
    shares = {
        f"stop/{reason}": sum(fact.stop_reason == reason for fact in facts) / len(facts)
        for reason in get_args(StopReason)
    }
    return {
        "turns_mean": turns / len(facts),
        "turns_max": float(max(fact.num_turns for fact in facts)),
        "environment_token_fraction": given / (given + chosen) if given + chosen else None,
        "branches_mean": sum(fact.num_branches for fact in facts) / len(facts),
        "re_encoded_tokens": float(sum(fact.num_re_encoded for fact in facts)),
        "prefix_breaks": float(sum(fact.num_branches - 1 for fact in facts)),
        **shares,
    }


def _fact(rollout: Rollout, reason: StopReason) -> EpisodeFact:
    branches = [rollout.loss_mask[start:end] for start, end in rollout.sequences]
    # What follows the first token chosen in a branch is said to the policy or by it
    told = [branch[branch.index(True) :] for branch in branches if True in branch]
    return EpisodeFact(
        stop_reason=reason,
        num_turns=len(rollout.turns),
        num_given=sum(not chosen for branch in told for chosen in branch),
        num_chosen=rollout.num_loss_tokens,
        num_branches=len(branches),
        num_re_encoded=rollout.re_encoded_tokens,
    )
