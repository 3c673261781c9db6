"""What is rewarded. The module of an environment is imported when it is built: the package imports nothing heavy."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.config import Config
    from covey.environment_config import ArithmeticConfig, Gsm8kConfig, RewardFunctionsConfig
    from covey.environments.base import Environment
    from covey.environments.data import RowSettings


def build_arithmetic(settings: "ArithmeticConfig", config: "Config") -> "Environment":
    from covey.environments.arithmetic import Arithmetic

    return Arithmetic(tuple(settings.levels), settings.num_train, settings.num_test, settings.problem_seed)


def build_gsm8k(settings: "Gsm8kConfig", config: "Config") -> "Environment":
    from covey.environments.data import load_rows
    from covey.environments.gsm8k import GSM8K

    rows = load_rows(config.data.path, _row_settings(config, ("question", "answer")))
    return GSM8K(rows.splits, settings.scheme, settings.format_reward)


def build_reward_functions(settings: "RewardFunctionsConfig", config: "Config") -> "Environment":
    from covey.environments.data import load_rows
    from covey.environments.reward_functions import RewardFunctions, RewardSettings, reward_functions
    from covey.environments.workers import WorkerSettings

    functions = reward_functions(config.rewards, config.reward_weights)
    rows = load_rows(config.data.path, _row_settings(config, (config.data.prompt_column,)))
    workers = WorkerSettings(
        num_workers=settings.num_workers,
        timeout=settings.timeout,
        start_timeout=settings.start_timeout,
        max_calls=settings.worker_calls,
        max_bytes=settings.worker_bytes,
    )
    how = RewardSettings(workers, settings.in_process, settings.max_failure_rate)
    return RewardFunctions(rows.splits, functions, how, prompt_column=config.data.prompt_column)


def _row_settings(config: "Config", columns: tuple[str, ...]) -> "RowSettings":
    from covey.environments.data import RowSettings

    data = config.data
    return RowSettings(
        columns=columns,
        subset=data.subset,
        train_split=data.train_split,
        test_split=data.test_split,
        test_fraction=data.test_fraction,
        max_rows=data.max_rows,
        bad_rows=data.bad_rows,
    )


ENVIRONMENTS: "dict[str, Callable[[Any, Config], Environment]]" = {
    "arithmetic": build_arithmetic,
    "gsm8k": build_gsm8k,
    "reward_functions": build_reward_functions,
}
"""Name of an environment to its builder: (its own settings, the whole configuration) -> Environment."""
