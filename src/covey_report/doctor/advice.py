"""Facts about covey's settings for the doctor's advice."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from covey.config.checks import Found, walk
from covey.config.schema import Config
from covey.environments.registry import known_class
from covey_doctor.advice import ALL, Facts, Field
from covey_report.page.origins import preset_settings


def facts_of(settings: Mapping[str, Any]) -> Facts:
    """Gather the ranges of a run's settings, and which are read."""
    known = _settings_of(str(settings.get("environment.name")))
    return Facts({name: _field(found, settings, known) for name, found in known.items()}, preset_settings)


def _field(found: Found, settings: Mapping[str, Any], known: Mapping[str, Found]) -> Field:
    bounds = found.bounds
    needs = [need for need in bounds.needs if need.value is None]
    values = [[settings.get(one, known[one].default if one in known else None) for one in n.partners] for n in needs]
    section, _, last = found.name.rpartition(".")
    is_on = last == "enabled" or settings.get(f"{section}.enabled") is not False
    is_read = is_on and all(need.holds(*own) for need, own in zip(needs, values, strict=True))
    return Field(0.0 if bounds.ge is None else bounds.ge, ALL if bounds.le is None else bounds.le, is_read)


@cache
def _settings_of(environment: str) -> Mapping[str, Found]:
    config = Config()
    config.environment = known_class(environment)()
    return {found.name: found for found in walk(config)}
