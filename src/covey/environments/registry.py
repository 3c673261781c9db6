"""Find the settings class of an environment by its name."""

import logging
from dataclasses import is_dataclass
from typing import TYPE_CHECKING

from covey.system.extensions import Extensions

if TYPE_CHECKING:
    from covey.environments.settings import EnvironmentConfig

LOGGER = logging.getLogger(__name__)
_MATH = "covey_tasks.math.settings"
_GAMES = "covey.environments.conversations.settings"
_DOORS = "covey.environments.doors.settings"
ENVIRONMENTS = Extensions(
    "covey.environments",
    "environment",
    {
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
        "agent": f"{_DOORS}:AgentConfig",
        "steps": f"{_DOORS}:StepsConfig",
        "openenv": f"{_DOORS}:OpenEnvConfig",
        "verifiers": f"{_DOORS}:VerifiersConfig",
        "reasoning_gym": f"{_DOORS}:ReasoningGymConfig",
        "guess": f"{_GAMES}:GuessConfig",
        "lookup": f"{_GAMES}:LookupConfig",
        "calculator": f"{_GAMES}:CalculatorConfig",
        "custom": "covey.environments.settings:CustomConfig",
        "mixture": "covey.environments.settings:MixtureConfig",
    },
)
"""Name -> its settings class, of covey's environments and of installed packages. A program may add to `own`."""


def environment_class(name: str) -> "type[EnvironmentConfig]":
    """Import an environment's settings class. ValueError for an unknown name."""
    from covey.environments.settings import EnvironmentConfig

    found = ENVIRONMENTS.load(name)
    is_class = isinstance(found, type) and issubclass(found, EnvironmentConfig) and is_dataclass(found)
    if not is_class or found.build is EnvironmentConfig.build:
        what = getattr(found, "__qualname__", None) or repr(found)
        raise ValueError(
            f"environment={name} must be a dataclass that inherits EnvironmentConfig and has a build method, got {what}"
            f"{_package(name)}"
        )
    if found.name != name:
        raise ValueError(
            f'environment={name} must have name = "{name}" in its settings, got {found.name!r}{_package(name)}'
        )
    return found


def environment_classes() -> "dict[str, type[EnvironmentConfig]]":
    """Import all settings classes by name, except those of broken packages."""
    found = {}
    for name in ENVIRONMENTS.names():
        try:
            found[name] = environment_class(name)
        except ValueError as error:
            LOGGER.warning("left out: %s", error)
    return found


def _package(name: str) -> str:
    package = ENVIRONMENTS.package(name)
    return f" of {package}" if package else ""


def known_class(name: object) -> "type[EnvironmentConfig]":
    """Import an environment's settings class, the base class where none is usable."""
    from covey.environments.settings import EnvironmentConfig

    try:
        return environment_class(name) if isinstance(name, str) and name in ENVIRONMENTS else EnvironmentConfig
    except ValueError:
        return EnvironmentConfig
