"""Settings of environment=countdown."""

from dataclasses import dataclass

from covey.environments.settings import EnvironmentConfig
from covey.system.setting import Requires, setting

GENERATED = Requires("data.path = null", ("data.path",), lambda path: path is None)


@dataclass
class CountdownConfig(EnvironmentConfig):
    """Expressions of given numbers that come to a target: made up, or rows (nums, target) from `data`."""

    name: str = "countdown"
    num_numbers: list[int] = setting([3], needs=GENERATED)
    """How many numbers a made-up problem has, 2 to 6: the difficulties, in equal parts."""
    max_number: int = setting(20, needs=GENERATED)
    """Numbers are drawn from 1 to this."""
    max_target: int = setting(100, needs=GENERATED)
    """Targets are from 1 to this."""
    operators: list[str] = setting(["+", "-", "*", "/"], needs=GENERATED)
    """What problems are made of, `+` among them; answers may use all four."""
    num_train: int = setting(4096, needs=GENERATED)
    """Training problems (fewer where the ranges have not so many)."""
    num_test: int = setting(512, needs=GENERATED)
    """Held-out problems, none of which is in the training set."""
    problem_seed: int = setting(0, needs=GENERATED)
    """Which problems are drawn."""
    uses: str = "exactly"
    """How often each number is used: exactly (once) or at_most (once)."""
    answer_form: str = "tags"
    """Where the expression stands: tags (the last answer tag) or plain (it is the whole completion)."""
    format_reward: float = 0.1
    """Reward for an answer in the requested form that is wrong."""
    instruction: str | None = None
    """What the system message says; null takes the form's own, "" sends none."""
