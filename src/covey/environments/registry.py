"""Find environments' settings classes by name: covey's, and entry points of packages.

Nothing is imported before its name is chosen, and no metadata is read for a name of covey's own.
"""

import logging
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

from covey.system.extensions import Extensions

if TYPE_CHECKING:
    from covey.environments.base import Environment
    from covey.environments.settings import BuildSettings, EnvironmentConfig, Say

LOGGER = logging.getLogger(__name__)
_MATH = "covey_tasks.math.settings"
_GAMES = "covey_tasks.games.settings"
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
    "tools": "covey_integrations.tools.settings:ToolsConfig",
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


_KNOWN = Extensions("covey.environments", "environment", ENVIRONMENTS)


def environment_names() -> list[str]:
    """List covey's environments and those of installed packages, sorted."""
    return _KNOWN.names()


def environment_class(name: str) -> "type[EnvironmentConfig]":
    """Import an environment's settings class. ValueError for an unknown name."""
    from covey.environments.settings import EnvironmentConfig

    found, package = _KNOWN.load(name), _KNOWN.package(name)
    package = f" of {package}" if package else ""
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
        return environment_class(name) if name in _KNOWN else EnvironmentConfig
    except ValueError:
        return EnvironmentConfig


def build(run: "BuildSettings", say: "Say" = LOGGER.info) -> "Environment":
    """Build the environment of `run.environment`. `say` is called with a line before long work."""
    from covey.environments.base import adapt

    return adapt(run.environment.build(run, say))
