"""The settings of each environment by its name; part of the schema in schema.py."""

from covey.environments.code.settings import CodeConfig
from covey.environments.countdown.settings import CountdownConfig
from covey.environments.ifeval.settings import IfevalConfig
from covey.environments.infill.settings import InfillConfig
from covey.environments.machines.settings import MachinesConfig
from covey.environments.math.settings import Gsm8kConfig, MathConfig
from covey.environments.reward_functions.settings import RewardFunctionsConfig
from covey.environments.settings import ArithmeticConfig, CustomConfig, EnvironmentConfig, MixtureConfig

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
