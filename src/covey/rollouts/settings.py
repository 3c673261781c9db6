"""Settings of the prompt stream and group sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covey.system.section import Section
from covey.system.setting import Requires, setting

OF_CLASS = Requires("curriculum.name = module:Class", ("curriculum.name",), lambda name: ":" in name)
OF_SUCCESS = Requires("curriculum.name = success", ("curriculum.name",), lambda name: name == "success")
OF_DIFFICULTY = Requires("curriculum.name = difficulty", ("curriculum.name",), lambda name: name == "difficulty")


@dataclass
class CurriculumConfig(Section):
    """Choice of the next prompts."""

    name: str = "none"
    """none (each prompt once a pass), success (near a success rate), difficulty (from easy to hard) or module:Class."""
    options: dict[str, Any] = setting({}, needs=OF_CLASS)
    """Keyword arguments of a module:Class; unknown ones are refused."""
    window: list[float] = setting([0.3, 0.5], needs=OF_SUCCESS)
    """Success rates, from and to, that name=success keeps to: the share of a prompt's completions that is correct."""
    per: str = setting("prompt", choices=("prompt", "difficulty"), needs=OF_SUCCESS)
    """Unit of success rates: each prompt, or each difficulty that the environment declares."""
    decay: float = setting(0.5, ge=0, lt=1, needs=OF_SUCCESS)
    """Weight of an earlier success rate when a prompt has been answered again."""
    explore: float = setting(0.25, ge=0, lt=1, needs=OF_SUCCESS)
    """Share of prompts taken in plain order: new ones are tried, old rates renewed."""
    promote_at: float = setting(0.8, gt=0, le=1, needs=OF_DIFFICULTY)
    """Mean success at which name=difficulty takes the next level."""
    promotion_groups: int = setting(64, ge=1, needs=OF_DIFFICULTY)
    """Number of last groups of the present level that the mean covers."""
    demote_below: float | None = setting(None, needs=OF_DIFFICULTY)
    """Mean success below which it goes back to the level before; null never does."""
    earlier_share: float = setting(0.2, ge=0, lt=1, needs=OF_DIFFICULTY)
    """Share of prompts from levels that are done, so that they are not forgotten."""


@dataclass
class GroupSizeStep(Section):
    """One entry of group_size_schedule."""

    step: int
    """Finished steps from which it holds."""
    group_size: int
    """Completions of one prompt from then on."""


def group_sizes(first: int, schedule: Sequence[GroupSizeStep]) -> list[int]:
    """Return every group size of a run, in the order they come.

    >>> group_sizes(8, [GroupSizeStep(step=100, group_size=4)])
    [8, 4]
    """
    return [first, *(entry.group_size for entry in schedule)]


def group_size_at(step: int, first: int, schedule: Sequence[GroupSizeStep]) -> int:
    """Return the group size after `step` finished steps.

    >>> group_size_at(100, 8, [GroupSizeStep(step=100, group_size=4)])
    4
    """
    return group_sizes(first, [entry for entry in schedule if entry.step <= step])[-1]
