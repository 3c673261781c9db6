"""Build rows and reward functions from settings or objects."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from covey.environments.data.rows import Row, as_it_is, load_rows, row_settings
from covey.environments.reward_functions.environment import RewardFunctions, RewardSettings, reward_functions
from covey.environments.reward_functions.rows import PromptFormat
from covey.environments.reward_functions.settings import RewardFunctionsConfig
from covey.environments.settings import BuildSettings
from covey.system.workers.pool import WorkerSettings

RewardEntry = str | Mapping[str, Any] | Callable[..., Any]
Rows = Mapping[str, Iterable[Mapping[str, Any]]]


def build_reward_functions(
    settings: RewardFunctionsConfig,
    run: BuildSettings,
    rewards: Sequence[RewardEntry] | None = None,
    rows_in_memory: Rows | None = None,
    opened: Callable[[Row], Row] = as_it_is,
) -> RewardFunctions:
    """Build it from settings, or from a program's functions and rows.

    Without functions a teacher trains alone, and every answer has the reward 0. `opened` reads each row first.
    """
    given = run.rewards if rewards is None else rewards
    functions = reward_functions(given or ([taught_alone] if run.algorithm.teacher else []), run.reward_weights)
    data = run.data
    prompts = PromptFormat(data.prompt_column, data.answer_column, data.prefill)
    how = row_settings(run.data, (data.prompt_column,), "data.prompt_column")
    how_to_read = replace(how, read=lambda row: prompts.read(opened(row)))
    rows = load_rows(data.path if rows_in_memory is None else rows_in_memory, how_to_read)
    prompts.check_use(row for of_split in rows.splits.values() for row in of_split)
    workers = WorkerSettings(
        num_workers=settings.num_workers,
        timeout=settings.timeout,
        start_timeout=settings.start_timeout,
        max_calls=settings.worker_calls,
        max_bytes=settings.worker_bytes,
    )
    judging = RewardSettings(workers, settings.in_process, settings.max_failure_rate)
    made = RewardFunctions(rows.splits, functions, judging, prompt_column=data.prompt_column, prefill=data.prefill)
    made.follow(0, run.num_steps, 0.0)
    return made


def build_judged(
    settings: RewardFunctionsConfig,
    run: BuildSettings,
    rewards: Sequence[RewardEntry] | None = None,
    rows_in_memory: Rows | None = None,
    opened: Callable[[Row], Row] = as_it_is,
) -> RewardFunctions:
    """Build rows and reward functions; without functions, something else rewards."""
    functions = rewards or (None if run.rewards else [no_reward])
    return build_reward_functions(settings, run, functions, rows_in_memory, opened)


def taught_alone(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Return 0 for every answer, which stands for no reward (`types.UNREWARDED`)."""
    return [0.0] * len(completions)


def no_reward(completions: Sequence[Any], **columns: Any) -> list[None]:
    """Apply to nothing, where an attempt's object rewards."""
    return [None] * len(completions)
