"""Settings of the environments that judge mathematics: gsm8k and math."""

from dataclasses import dataclass

from covey.environments.settings import EnvironmentConfig
from covey.system.setting import Requires, setting

FORMAT_SCHEME = Requires(
    "environment.scheme = covey or values", ("environment.scheme",), lambda scheme: scheme in ("covey", "values")
)
ASKS_MATH_VERIFY = Requires(
    "a scheme that asks math-verify", ("environment.scheme",), lambda scheme: scheme not in ("verl", "verl_dapo")
)


@dataclass
class Gsm8kConfig(EnvironmentConfig):
    """Grade-school word problems. Rows from `data`."""

    name: str = "gsm8k"
    scheme: str = "covey"
    """How an answer is rewarded: covey, values, verl_strict, verl_flexible, torchrl or trl."""
    format_reward: float = setting(0.1, needs=FORMAT_SCHEME)
    """Reward for an answer in the requested form that is wrong (schemes covey and values)."""
    instruction: str | None = None
    """What the system message says; null takes the scheme's own, "" sends none."""


@dataclass
class MathConfig(EnvironmentConfig):
    """Problems whose answer is any mathematics. Rows from `data`."""

    name: str = "math"
    scheme: str = "covey"
    """How an answer is rewarded: covey, values, math_verify, trl, verl, verl_dapo or torchrl."""
    format_reward: float = setting(0.1, needs=FORMAT_SCHEME)
    """Reward for a wrong answer in the only box (schemes covey and values)."""
    instruction: str | None = None
    """What the system message says; null takes the scheme's own, "" sends none."""
    problem_column: str = "problem"
    """Column that holds the problem."""
    answer_column: str = "answer"
    """Column that holds the gold answer, in rows that have one."""
    solution_column: str = "solution"
    """Column of worked solutions; the last box is the gold answer of a row without an answer column."""
    timeout: float = setting(10.0, needs=ASKS_MATH_VERIFY)
    """Seconds math-verify may take for one completion before its process is killed; the answer is then wrong."""
    num_workers: int = setting(2, needs=ASKS_MATH_VERIFY)
    """Worker processes that run math-verify."""
