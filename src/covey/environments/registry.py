"""Find the settings class of an environment by its name: covey's own, and entry points of installed packages.

Nothing is imported before its name is chosen, and no metadata is read for a name of covey's own.
"""

import importlib
import logging
import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from covey.system.lookup import describe, near

if TYPE_CHECKING:
    from covey.environments.settings import EnvironmentConfig

LOGGER = logging.getLogger(__name__)
GROUP = "covey.environments"
"""Group of entry points: name -> "module:class" of its settings."""
_MATH = "covey_tasks.math.settings"
_GAMES = "covey.environments.conversations.settings"
_INTEGRATIONS = "covey_integrations.settings"
ENVIRONMENTS: "dict[str, str | type[EnvironmentConfig]]" = {
    "arithmetic": "covey.environments.settings:ArithmeticConfig",
    "gsm8k": f"{_MATH}:Gsm8kConfig",
    "math": f"{_MATH}:MathConfig",
    "countdown": f"{_MATH}:CountdownConfig",
    "code": "covey_tasks.code.settings:CodeConfig",
    "ifeval": "covey_tasks.ifeval.settings:IfevalConfig",
    "machines": "covey_tasks.machines.settings:MachinesConfig",
    "infill": "covey_tasks.infill.settings:InfillConfig",
    "reward_functions": "covey.environments.reward_functions.settings:RewardFunctionsConfig",
    "tools": "covey.environments.conversations.tools.settings:ToolsConfig",
    "agent": f"{_INTEGRATIONS}:AgentConfig",
    "steps": f"{_INTEGRATIONS}:StepsConfig",
    "openenv": f"{_INTEGRATIONS}:OpenEnvConfig",
    "verifiers": f"{_INTEGRATIONS}:VerifiersConfig",
    "reasoning_gym": f"{_INTEGRATIONS}:ReasoningGymConfig",
    "guess": f"{_GAMES}:GuessConfig",
    "lookup": f"{_GAMES}:LookupConfig",
    "calculator": f"{_GAMES}:CalculatorConfig",
    "custom": "covey.environments.settings:CustomConfig",
    "mixture": "covey.environments.settings:MixtureConfig",
}
"""Name -> settings class of covey's own environments. A program may add to it; an entry point never replaces one."""


def environment_names() -> list[str]:
    """List covey's environments and those of installed packages, sorted."""
    return sorted({*ENVIRONMENTS, *_installed()})


def environment_class(name: str) -> "type[EnvironmentConfig]":
    """Import an environment's settings class. ValueError for an unknown name."""
    from covey.environments.settings import EnvironmentConfig

    found, package = _load(name)
    is_class = isinstance(found, type) and issubclass(found, EnvironmentConfig) and is_dataclass(found)
    if not is_class or found.build is EnvironmentConfig.build:
        what = getattr(found, "__qualname__", None) or repr(found)
        raise ValueError(
            f"environment={name} must be a dataclass that inherits EnvironmentConfig and has a build method, got {what}"
            f"{package}"
        )
    if found.name != name:
        raise ValueError(f'environment={name} must have name = "{name}" in its settings, got {found.name!r}{package}')
    return found


def environment_classes() -> "dict[str, type[EnvironmentConfig]]":
    """Import all settings classes by name, except those of broken packages."""
    found = {}
    for name in environment_names():
        try:
            found[name] = environment_class(name)
        except ValueError as error:
            LOGGER.warning("left out: %s", error)
    return found


def known_class(name: Any) -> "type[EnvironmentConfig]":
    """Import an environment's settings class, the base class where none is usable."""
    from covey.environments.settings import EnvironmentConfig

    try:
        return environment_class(name) if name in ENVIRONMENTS or name in _installed() else EnvironmentConfig
    except ValueError:
        return EnvironmentConfig


def _load(name: str) -> tuple[Any, str]:
    """Import what a name stands for, and name its package. ValueError."""
    own = ENVIRONMENTS.get(name)
    if own is not None:
        module, _, attribute = own.partition(":") if isinstance(own, str) else ("", "", "")
        return (getattr(importlib.import_module(module), attribute) if module else own), ""
    if name not in _installed():  # a package may have come since
        _read_entry_points.cache_clear()
    found = _installed().get(name, ())
    package = ", ".join(f"{one.dist.name} {one.dist.version}" if one.dist else one.value for one in found)
    if not found:
        raise ValueError(
            f"environment must be one of {', '.join(environment_names())}, got {name or 'none'}"
            f"{near(name, environment_names())}; a package may add others (pip install PACKAGE)"
        )
    if len(found) > 1:
        raise ValueError(f"environment={name} is in {package}; uninstall all of these but one")
    try:
        return found[0].load(), f" of {package}"
    except Exception as error:  # foreign code
        raise ValueError(
            f"environment={name} needs {found[0].value} of {package}, whose import {describe(error)}"
        ) from error


def _installed() -> Mapping[str, tuple[EntryPoint, ...]]:
    return _read_entry_points(tuple(sys.path))


@lru_cache(maxsize=8)
def _read_entry_points(path: tuple[str, ...]) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Read the environments of packages installed on a path, by name."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for one in entry_points(group=GROUP):
        if one not in found.get(one.name, ()):
            found[one.name] = (*found.get(one.name, ()), one)
    return found
