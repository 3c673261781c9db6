"""Which of a rule's advice is still open in a run: what its settings have already is not advised again.

A piece of advice is a sentence, or one of these, about which the settings of a run are asked:

    model.precision=bfloat16                    a value
    algorithm=dr_grpo                           a preset
    algorithm.shaping with soft_overlong        a key
    optimizer.lr lower                          a direction: lower, higher, or other words for it
    environment.num_train larger | more rows    the first of these that a run can follow
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from covey.config.checks import format_value, walk
from covey.config.schema import ENVIRONMENT_SETTINGS, Config
from covey.config.shelves import preset_file
from covey.system.setting import NO_BOUNDS, Bounds

NAME = r"(?P<name>[a-z_0-9]+(?:\.[a-z_0-9]+)*)"
VALUE = re.compile(rf"{NAME}=(?P<value>[^\s,]+)")
KEY = re.compile(rf"{NAME} with (?P<key>[a-z_0-9]+)")
DIRECTION = re.compile(rf"{NAME} (?:(?P<lower>lower|to a third)|higher|larger|longer|times 3 to 10).*")
OR = " | "
ALL = math.inf
"""A number of which there are no more to be had."""
CLIPPING = ("clip", "clip_cov", "gmpo")
"""Losses, by name, that have a range to clip to."""

Settings = Mapping[str, Any]


class _Field(NamedTuple):
    """What a setting of a run may be."""

    value: Any
    bounds: Bounds


def still_open(advice: Sequence[str], settings: Settings) -> tuple[str, ...]:
    """Return the advice that a run with these settings can follow, with the values it has now; all of it for none."""
    if not settings:
        return tuple(advice)
    fields = _fields(str(settings.get("environment.name")))
    said = (next(filter(None, (_said(way, settings, fields) for way in one.split(OR))), None) for one in advice)
    return tuple(one for one in said if one is not None)


def _said(advice: str, settings: Settings, fields: Mapping[str, _Field]) -> str | None:
    """Return a piece of advice as a run is told it, None where the run does so already or never could."""
    # What is no setting of a run is a sentence
    for kind in (VALUE, KEY, DIRECTION):
        if found := kind.fullmatch(advice):
            break
    else:
        return advice
    name = found["name"]
    if kind is VALUE and (preset := preset_file(name, found["value"])):
        return None if _is_preset(name, preset, settings) else advice
    # Settings that this run has not, or that nothing in it reads
    if _is_foreign(name, settings, fields):
        return None
    if kind is KEY:
        has_key = any(other.startswith(f"{name}.{found['key']}") for other in settings)
        return None if has_key else advice
    if kind is VALUE and _is_same(settings.get(name), yaml.safe_load(found["value"])):
        return None
    if not _is_read(name, settings, fields):
        return None
    return advice if kind is VALUE else _directed(advice, name, bool(found["lower"]), settings, fields)


def _directed(advice: str, name: str, lower: bool, settings: Settings, fields: Mapping[str, _Field]) -> str | None:
    """Return advice of a direction, and the value that there is now, None where it cannot go further."""
    value = settings.get(name)
    if name in settings and value is None:
        return f"{name} set"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return advice
    bounds = fields[name].bounds if name in fields else NO_BOUNDS
    least = 0.0 if bounds.ge is None else bounds.ge
    if value <= least if lower else value >= (ALL if bounds.le is None else bounds.le):
        return None
    return f"{advice} (now {format_value(value)})"


def _is_read(name: str, settings: Settings, fields: Mapping[str, _Field]) -> bool:
    """Tell whether this run has what a setting needs to be read."""
    for need in fields[name].bounds.needs if name in fields else ():
        values = [
            settings.get(partner, fields[partner].value if partner in fields else None) for partner in need.partners
        ]
        if need.value is None and not need.holds(*values):
            return False
    return True


def _is_foreign(name: str, settings: Settings, fields: Mapping[str, _Field]) -> bool:
    """Tell whether a setting belongs to another environment, or another loss, than the run's."""
    if name.startswith("environment.") and "environment.name" in settings:
        return name not in settings and name not in fields
    loss = str(settings.get("algorithm.loss", CLIPPING[0]))
    return name == "algorithm.loss_options.eps_high" and ":" not in loss and loss not in CLIPPING


def _is_preset(group: str, file: Path, settings: Settings) -> bool:
    """Tell whether a run has all that a preset says."""
    return all(_is_same(settings.get(key), value) for key, value in _preset(group, file).items())


@cache
def _preset(group: str, file: Path) -> Mapping[str, Any]:
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    return dict(_flat({key: value for key, value in content.items() if key != "defaults"}, f"{group}."))


def _flat(content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_same(one: Any, other: Any) -> bool:
    return isinstance(one, bool) is isinstance(other, bool) and one == other


@cache
def _fields(environment: str) -> Mapping[str, _Field]:
    """Return every setting of a run with this environment."""
    config = Config()
    if environment in ENVIRONMENT_SETTINGS:
        config.environment = ENVIRONMENT_SETTINGS[environment]()
    return {found.name: _Field(found.default, found.bounds) for found in walk(config)}
