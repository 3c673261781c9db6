"""The settings of each environment; part of the schema in config.py."""

from dataclasses import dataclass, field


@dataclass
class EnvironmentConfig:
    """What every environment has."""

    name: str = ""
    """Which environment, a key of environments.ENVIRONMENTS."""


@dataclass
class ArithmeticConfig(EnvironmentConfig):
    """Generated sums, with difficulty levels."""

    name: str = "arithmetic"
    levels: list[int] = field(default_factory=lambda: [3])
    """Difficulty levels to draw problems from (environments/arithmetic.py lists them)."""
    num_train: int = 4096
    """Training problems (fewer where a level has not so many)."""
    num_test: int = 512
    """Held-out problems, none of which is in the training set."""
    problem_seed: int = 0
    """Which problems are drawn."""


@dataclass
class Gsm8kConfig(EnvironmentConfig):
    """Grade-school word problems; rows from `data`."""

    name: str = "gsm8k"
    scheme: str = "covey"
    """How an answer is rewarded: covey, verl_strict, verl_flexible, torchrl or trl."""
    format_reward: float = 0.1
    """Reward for an answer in the requested form that is wrong (scheme covey)."""


@dataclass
class RewardFunctionsConfig(EnvironmentConfig):
    """Your own rows (`data`) and your own reward functions (`rewards`)."""

    name: str = "reward_functions"
    timeout: float = 30.0
    """Seconds one call of a reward function may take before its worker is killed."""
    num_workers: int = 2
    """Worker processes that run reward functions."""
    start_timeout: float = 120.0
    """Seconds a worker may take to start and to import what the reward functions need."""
    worker_calls: int = 500
    """Calls after which a worker is replaced, so that leaks of threads and descriptors stay bounded."""
    worker_bytes: int = 2147483648
    """Memory above which a worker is replaced after its call (on Linux)."""
    in_process: bool = False
    """Run reward functions in the training process: faster, but one that takes longer than `timeout` ends the run."""
    max_failure_rate: float = 0.05
    """Stop the run when more than this share of the last 1000 rewards failed."""


ENVIRONMENT_SETTINGS: dict[str, type[EnvironmentConfig]] = {
    "arithmetic": ArithmeticConfig,
    "gsm8k": Gsm8kConfig,
    "reward_functions": RewardFunctionsConfig,
}
"""The settings of each environment by its name."""
