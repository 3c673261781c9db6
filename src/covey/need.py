"""What a setting needs to mean anything: the rules of needs.py and environment_needs.py are made of these."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Needs:
    """Settings that only mean something under a condition, and are refused where it does not hold.

    >>> Needs(("reward_weights",), "rewards set", ("rewards",), bool)
    """

    settings: tuple[str, ...]
    condition: str
    """In words: "algorithm.kl_coef > 0"."""
    partners: tuple[str, ...]
    """The settings the condition is about."""
    holds: Callable[..., bool]
    """Takes the partners' values."""
    remedy: str = ""
    """What to type where the message alone does not say it."""


def names_of(section: type, prefix: str, *chosen: str) -> tuple[str, ...]:
    """Dotted names of fields of a section whose names begin with one of `chosen`."""
    return tuple(f"{prefix}.{field.name}" for field in fields(section) if field.name.startswith(chosen))


def is_set(value: Any) -> bool:
    return value is not None
