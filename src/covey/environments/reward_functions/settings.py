"""Settings of environment=reward_functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from covey.environments.settings import BuildSettings, EnvironmentConfig, Say, check_time
from covey.system.setting import Requires, setting

if TYPE_CHECKING:
    from covey.environments.base import Environment, EnvironmentLike

IN_WORKERS = Requires("environment.in_process = false", ("environment.in_process",), lambda in_process: not in_process)


@dataclass
class RewardFunctionsConfig(EnvironmentConfig):
    """Your own rows (`data`) and your own reward functions (`rewards`)."""

    name: str = "reward_functions"
    timeout: float = setting(30.0, gt=0)
    """Seconds one call of a reward function may take before its worker is killed."""
    num_workers: int = setting(2, ge=1, needs=IN_WORKERS)
    """Worker processes that run reward functions."""
    start_timeout: float = setting(120.0, gt=0, needs=IN_WORKERS)
    """Seconds a worker may take to start and to import the reward functions' modules."""
    worker_calls: int = setting(500, gt=0, needs=IN_WORKERS)
    """Calls after which a worker is replaced, so that leaks of threads and descriptors stay bounded."""
    worker_bytes: int = setting(2147483648, gt=0, needs=IN_WORKERS)
    """Memory above which a worker is replaced after its call (on Linux)."""
    in_process: bool = False
    """Run reward functions in the training process: faster, but one that takes longer than `timeout` ends the run."""
    max_failure_rate: float = setting(0.05, ge=0, le=1)
    """Stop the run when more than this share of the last 1000 rewards failed."""

    reads_rows: ClassVar[str] = "always"
    takes_rewards: ClassVar[bool] = True
    masked_prompts: ClassVar[str] = "maybe"

    def build(self, run: BuildSettings, say: Say) -> "EnvironmentLike":
        from covey.environments.reward_functions.build import build_reward_functions

        return build_reward_functions(self, run)

    def build_of(self, run: BuildSettings, rewards: Sequence[Any], rows: Any, tools: Sequence[Any]) -> "Environment":
        """Build it from a program's functions, rows by split and tools."""
        from covey.environments.reward_functions.build import build_reward_functions

        return build_reward_functions(self, run, rewards, rows)

    def check(self, run: BuildSettings) -> None:
        start = 0 if self.in_process else self.start_timeout
        names = "environment.timeout" + ("" if self.in_process else " + environment.start_timeout")
        check_time(run, self.timeout + start, names)
