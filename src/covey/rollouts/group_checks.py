"""Checks of groups before training: success, and missing scores."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from covey.system import collectives
from covey.types import Group, RunStopped

LOGGER = logging.getLogger(__name__)

FEW_FAILURES = 20
"""Failures that may be chance where nothing else is known, as in an evaluation of a prompt or two."""
GroupFilter = Callable[[Tensor], bool]
"""True where a group with these rewards, (M,), is worth training on; before shaping and a KL penalty."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The success on a prompt, exchanged by ranks.

    >>> Outcome("arithmetic", "train-17", success=0.375)
    """

    environment: str
    prompt_id: str
    success: float
    """Share of its scored completions that are correct."""


def outcomes_of(groups: Sequence[Group], correct_above: float) -> list[Outcome]:
    """Return the success on each scored prompt."""
    scored = [group for group in groups if group.rollouts]
    shares = [fmean(reward >= correct_above for reward in group.rewards) for group in scored]
    return [Outcome(g.prompt.environment, g.prompt.id, share) for g, share in zip(scored, shares, strict=True)]


def stop_where_nothing_is_scored(groups: Sequence[Group]) -> None:
    """Raise RunStopped where no completion of any rank could be scored. Collective.

    Prompts without applicable verdicts are fine: the step then teaches nothing.
    """
    (num_scored,) = collectives.all_sum_ints(sum(len(group.rollouts) for group in groups))
    if not num_scored:
        stop_where_only_failures(groups)


def stop_where_only_failures(groups: Sequence[Group], least: int = 1) -> None:
    """Raise RunStopped where no completion of these groups could be scored.

    Fewer failures than `least` are told.
    """
    failures = [failure for group in groups for failure in group.failures if failure.is_fault]
    if not failures or any(group.rollouts for group in groups):
        return
    said = f"none of {len(failures)} completions could be scored: {failures[0].reason}"
    if len(failures) >= least:
        raise RunStopped(said)
    LOGGER.warning("%s", said)


def reason_to_drop(group: Group, size: int, keep: GroupFilter | None) -> str | None:
    """Return why a group of `size` completions is dropped, else None."""
    if len(group.rollouts) < min(2, size):
        return "unscored_groups"
    if keep is not None and not keep(torch.tensor(group.rewards, dtype=torch.float64)):
        return f"filtered_{_uniform_kind(group.rewards)}"
    return None


def _uniform_kind(rewards: Sequence[float]) -> str:
    if min(rewards) >= 1:
        return "all_right"
    return "all_wrong" if max(rewards) <= 0 else "mixed"
