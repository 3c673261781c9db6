"""Advice of a rule, less the settings that the run has already.

A piece of advice is a sentence, or one of these, about which the settings of a run are asked:

    model.precision=bfloat16                    a value
    algorithm=dr_grpo                           a preset
    algorithm.shaping with soft_overlong        a key
    optimizer.lr lower                          a direction: lower, higher, or other words for it
    environment.num_train larger | more rows    the first of these that a run can follow
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

NAME = r"(?P<name>[a-z_0-9]+(?:\.[a-z_0-9]+)*)"
VALUE = re.compile(rf"{NAME}=(?P<value>[^\s,]+)")
KEY = re.compile(rf"{NAME} with (?P<key>[a-z_0-9]+)")
DIRECTION = re.compile(rf"{NAME} (?:(?P<lower>lower|to a third)|higher|larger|longer).*")
OR = " | "
ALL = math.inf
"""Number of everything that there is."""
CLIPPING = ("clip", "clip_cov", "gmpo")
"""Losses, by name, that have a range to clip to."""

Settings = Mapping[str, Any]


class Field(NamedTuple):
    """Range of a setting, and whether the run reads it."""

    least: float = 0.0
    most: float = ALL
    is_read: bool = True


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about the settings of a run, beside their values."""

    fields: Mapping[str, Field] = field(default_factory=dict)
    """All that a run with this environment has, by dotted name."""
    preset: Callable[[str, str], Settings | None] = lambda group, name: None
    """Reads the settings of the preset GROUP=NAME, by dotted name; None where there is no such preset."""


NO_FACTS = Facts()


def still_open(advice: Sequence[str], settings: Settings, facts: Facts = NO_FACTS) -> tuple[str, ...]:
    """Choose the advice that a run can follow, with current values."""
    if not settings:
        return tuple(advice)
    found = (next(filter(None, (_phrase(way, settings, facts) for way in one.split(OR))), None) for one in advice)
    return tuple(one for one in found if one is not None)


def _phrase(advice: str, settings: Settings, facts: Facts) -> str | None:
    """Phrase a piece of advice, None where the run cannot follow it."""
    for kind in (VALUE, KEY, DIRECTION):
        if found := kind.fullmatch(advice):
            break
    else:
        return advice
    name = found["name"]
    if kind is VALUE and (preset := facts.preset(name, found["value"])) is not None:
        has_all = all(_is_same(settings.get(key), value) for key, value in preset.items())
        is_too_large = preset.get("algorithm.advantage_options.k", 0) > settings.get("group_size", ALL)
        return None if has_all or is_too_large else advice
    # Settings that this run has not, or that nothing in it reads
    if _is_foreign(name, settings, facts):
        return None
    if kind is KEY:
        has_key = any(other.startswith(f"{name}.{found['key']}") for other in settings)
        return None if has_key else advice
    if kind is VALUE and _is_same(settings.get(name), yaml.safe_load(found["value"])):
        return None
    of_run = facts.fields.get(name, Field())
    if not of_run.is_read:
        return None
    return advice if kind is VALUE else _with_value(advice, name, bool(found["lower"]), settings, of_run)


def _with_value(advice: str, name: str, lower: bool, settings: Settings, of_run: Field) -> str | None:
    """Add the current value to a direction, None at its bound."""
    value = settings.get(name)
    if name in settings and value is None:
        return f"{name} set"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return advice
    if value <= of_run.least if lower else value >= of_run.most:
        return None
    return f"{advice} (now {value})"


def _is_foreign(name: str, settings: Settings, facts: Facts) -> bool:
    """Return True if a setting belongs to another environment or loss."""
    if name.startswith("environment.") and "environment.name" in settings:
        return name not in settings and name not in facts.fields
    if name == "engine.name":
        return settings.get("model.kind") == "masked"
    if name == "max_staleness":  # synchronous: nothing is old
        return settings.get(name) == 0
    loss = str(settings.get("algorithm.loss", CLIPPING[0]))
    return name == "algorithm.loss_options.eps_high" and ":" not in loss and loss not in CLIPPING


def _is_same(one: Any, other: Any) -> bool:
    return isinstance(one, bool) is isinstance(other, bool) and one == other
