"""The settings of each environment by its name; part of the schema in config.py."""

from covey.environments.code_settings import CodeConfig
from covey.environments.countdown_settings import CountdownConfig
from covey.environments.ifeval.settings import IfevalConfig
from covey.environments.infill_settings import InfillConfig
from covey.environments.machines.settings import MachinesConfig
from covey.environments.math_settings import Gsm8kConfig, MathConfig
from covey.environments.reward_functions_settings import RewardFunctionsConfig
from covey.environments.settings import ArithmeticConfig, CustomConfig, EnvironmentConfig, MixtureConfig

__all__ = [
    "ENVIRONMENT_SETTINGS",
    "ArithmeticConfig",
    "CodeConfig",
    "CountdownConfig",
    "CustomConfig",
    "EnvironmentConfig",
    "Gsm8kConfig",
    "IfevalConfig",
    "InfillConfig",
    "MachinesConfig",
    "MathConfig",
    "MixtureConfig",
    "RewardFunctionsConfig",
]

ENVIRONMENT_SETTINGS: dict[str, type[EnvironmentConfig]] = {
    "arithmetic": ArithmeticConfig,
    "gsm8k": Gsm8kConfig,
    "math": MathConfig,
    "countdown": CountdownConfig,
    "code": CodeConfig,
    "ifeval": IfevalConfig,
    "machines": MachinesConfig,
    "infill": InfillConfig,
    "reward_functions": RewardFunctionsConfig,
    "custom": CustomConfig,
    "mixture": MixtureConfig,
}
