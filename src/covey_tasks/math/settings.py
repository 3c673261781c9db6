"""Settings of the environments that judge mathematics: gsm8k, math and countdown."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from covey.environments.settings import WITHOUT_ROWS, BuildSettings, EnvironmentConfig, Say, check_time, naming_settings
from covey.system.setting import Requires, setting

if TYPE_CHECKING:
    from covey.environments.base import EnvironmentLike

FORMAT_SCHEME = Requires(
    "environment.scheme = covey or values", ("environment.scheme",), lambda scheme: scheme in ("covey", "values")
)
ASKS_MATH_VERIFY = Requires(
    "a scheme that asks math-verify",
    ("environment.scheme",),
    lambda scheme: scheme in ("math_verify", "trl", "torchrl"),
)


@dataclass
class Gsm8kConfig(EnvironmentConfig):
    """Grade-school word problems. Rows from `data`."""

    name: str = "gsm8k"
    scheme: str = setting("covey", choices=("covey", "values", "verl_strict", "verl_flexible", "torchrl", "trl"))
    """Reward scheme: covey, values, verl_strict, verl_flexible, torchrl or trl."""
    format_reward: float = setting(0.1, ge=0, lt=1, needs=FORMAT_SCHEME)
    """Reward for an answer in the requested form that is wrong (schemes covey and values)."""
    instruction: str | None = None
    """Text of the system message; null takes the scheme's own, "" sends none."""

    reads_rows: ClassVar[str] = "always"
    knows_right: ClassVar[bool] = True

    def build(self, run: BuildSettings, say: Say) -> "EnvironmentLike":
        from covey_tasks.math.gsm8k import build_gsm8k

        return build_gsm8k(self, run)


@dataclass
class MathConfig(EnvironmentConfig):
    """Problems whose answer is any mathematics. Rows from `data`."""

    name: str = "math"
    scheme: str = setting("covey", choices=("covey", "values", "math_verify", "trl", "torchrl"))
    """Reward scheme: covey, values, math_verify, trl or torchrl."""
    format_reward: float = setting(0.1, ge=0, lt=1, needs=FORMAT_SCHEME)
    """Reward for a wrong answer in the only box (schemes covey and values)."""
    instruction: str | None = None
    """Text of the system message; null takes the scheme's own, "" sends none."""
    problem_column: str = "problem"
    """Column that holds the problem."""
    answer_column: str = "answer"
    """Column that holds the gold answer, in rows that have one."""
    solution_column: str = "solution"
    """Column of worked solutions; the last box is the gold answer of a row without an answer column."""
    timeout: float = setting(10.0, gt=0, needs=ASKS_MATH_VERIFY)
    """Seconds math-verify may take for one completion before its process is killed; the answer is then wrong."""
    num_workers: int = setting(2, ge=1, needs=ASKS_MATH_VERIFY)
    """Worker processes that run math-verify."""

    reads_rows: ClassVar[str] = "always"
    knows_right: ClassVar[bool] = True

    def build(self, run: BuildSettings, say: Say) -> "EnvironmentLike":
        from covey_tasks.math.mathematics import build_math

        return build_math(self, run)

    def check(self, run: BuildSettings) -> None:
        """Check the time of math-verify."""
        check_time(run, self.timeout, f"environment.timeout={self.timeout:g}")


@dataclass
class CountdownConfig(EnvironmentConfig):
    """Expressions of numbers that equal a target: generated, or from `data`."""

    name: str = "countdown"
    num_numbers: list[int] = setting([3], needs=WITHOUT_ROWS)
    """Numbers of a made-up problem, 2 to 6: the difficulties, in equal parts."""
    max_number: int = setting(20, ge=1, needs=WITHOUT_ROWS)
    """Numbers are drawn from 1 to this."""
    max_target: int = setting(100, ge=1, needs=WITHOUT_ROWS)
    """Targets are from 1 to this."""
    operators: list[str] = setting(["+", "-", "*", "/"], needs=WITHOUT_ROWS)
    """Operators in problems, `+` among them; answers may use all four."""
    num_train: int = setting(4096, ge=1, needs=WITHOUT_ROWS)
    """Training problems (fewer where the ranges have not so many)."""
    num_test: int = setting(512, ge=1, needs=WITHOUT_ROWS)
    """Held-out problems, none of which is in the training set."""
    problem_seed: int = setting(0, needs=WITHOUT_ROWS)
    """Seed of the drawn problems."""
    uses: str = setting("exactly", choices=("exactly", "at_most"))
    """Use of each number: exactly (once) or at_most (once)."""
    answer_form: str = setting("tags", choices=("tags", "plain"))
    """Place of the expression: tags (the last answer tag) or plain (it is the whole completion)."""
    format_reward: float = setting(0.1, ge=0, lt=1)
    """Reward for an answer in the requested form that is wrong."""
    instruction: str | None = None
    """Text of the system message; null takes the form's own, "" sends none."""

    reads_rows: ClassVar[str] = "maybe"
    knows_right: ClassVar[bool] = True

    def build(self, run: BuildSettings, say: Say) -> "EnvironmentLike":
        from covey_tasks.math.countdown.environment import build_countdown

        return build_countdown(self, run)

    def check(self, run: BuildSettings) -> None:
        """Check the numbers and operators of problems that are made up."""
        from covey_tasks.math.countdown.environment import check_problems

        if run.data.path is None:
            with naming_settings():
                check_problems(self)
