"""The settings that say which prompts come next, and how often each is answered; part of the schema in config.py."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from covey.section import Section


@dataclass
class CurriculumConfig(Section):
    """Which prompts come next."""

    name: str = "none"
    """none (each prompt once a pass), success (near a success rate), difficulty (from easy to hard) or module:Class."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of a module:Class; unknown ones are refused."""
    window: list[float] = field(default_factory=lambda: [0.3, 0.5])
    """Success rates, from and to, that name=success keeps to: the share of a prompt's completions that is correct."""
    per: str = "prompt"
    """What a success rate is measured for: each prompt, or each difficulty that the environment declares."""
    decay: float = 0.5
    """How much an earlier success rate still counts when a prompt has been answered again."""
    explore: float = 0.25
    """Share of prompts taken in plain order, whatever their success rate: new ones are tried, old rates renewed."""
    promote_at: float = 0.8
    """Mean success at which name=difficulty goes on to the next level."""
    promotion_groups: int = 64
    """The mean is over this many groups of the present level, the last ones."""
    demote_below: float | None = None
    """Mean success below which it goes back to the level before; null never does."""
    earlier_share: float = 0.2
    """Share of prompts from levels that are done, so that they are not forgotten."""


@dataclass
class GroupSizeStep(Section):
    """One entry of group_size_schedule."""

    step: int
    """Finished steps from which it holds."""
    group_size: int
    """Completions of one prompt from then on."""


def group_sizes(first: int, schedule: Sequence[GroupSizeStep]) -> list[int]:
    """Every group size of a run, in the order they come.

    >>> group_sizes(8, [GroupSizeStep(step=100, group_size=4)])
    [8, 4]
    """
    return [first, *(entry.group_size for entry in schedule)]


def group_size_at(step: int, first: int, schedule: Sequence[GroupSizeStep]) -> int:
    """The group size after so many finished steps.

    >>> group_size_at(100, 8, [GroupSizeStep(step=100, group_size=4)])
    4
    """
    return group_sizes(first, [entry for entry in schedule if entry.step <= step])[-1]
