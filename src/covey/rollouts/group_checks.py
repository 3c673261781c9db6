"""What is looked at in groups before they are trained: success, and whether anything was scored at all."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from covey.system import collectives
from covey.types import Group, RunStopped


@dataclass(frozen=True, slots=True)
class Outcome:
    """How well a prompt was solved. Small, so that ranks can exchange it.

    >>> Outcome("arithmetic", "train-17", success=0.375)
    """

    environment: str
    prompt_id: str
    success: float
    """Share of its scored completions that are correct."""


def outcomes_of(groups: Sequence[Group], correct_above: float) -> list[Outcome]:
    """Return how well each prompt was solved, of those that were scored at all."""
    scored = [group for group in groups if group.rollouts]
    shares = [fmean(reward >= correct_above for reward in group.rewards) for group in scored]
    return [Outcome(g.prompt.environment, g.prompt.id, share) for g, share in zip(scored, shares, strict=True)]


def stop_where_nothing_is_scored(groups: Sequence[Group]) -> None:
    """Raise RunStopped where no completion of any rank could be scored: the reward is broken, going on would hide it.

    Collective.

    Prompts that the judge has nothing to say about break nothing: the step then teaches nothing.
    """
    (num_scored,) = collectives.all_sum_ints(num_rollouts(groups))
    stop_where_only_failures(groups, num_scored)


def num_rollouts(groups: Sequence[Group]) -> int:
    return sum(len(group.rollouts) for group in groups)


def stop_where_only_failures(groups: Sequence[Group], num_scored: int) -> None:
    """Raise RunStopped where completions of these groups could not be scored, and none of any rank was."""
    failures = [failure for group in groups for failure in group.failures if failure.is_fault]
    if failures and not num_scored:
        raise RunStopped(f"none of {len(failures)} completions could be scored: {failures[0].reason}")
