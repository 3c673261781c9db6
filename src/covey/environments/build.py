"""What is rewarded. The module of an environment is imported when it is built: the package imports nothing heavy."""

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from covey.environments.doors import build as doors

if TYPE_CHECKING:
    from covey.environments.settings import BuildSettings

    Say = Callable[[str], None]
    Row = Mapping[str, Any]
    RewardEntry = str | Mapping[str, Any] | Callable[..., Any]

    from covey.environments.base import Environment, EnvironmentLike, Split
    from covey.environments.conversations.settings import CalculatorConfig, GuessConfig, LookupConfig
    from covey.environments.conversations.tools.settings import ToolsConfig
    from covey.environments.doors.settings import AgentConfig, StepsConfig
    from covey.environments.reward_functions.environment import RewardFunctions
    from covey.environments.reward_functions.settings import RewardFunctionsConfig
    from covey.environments.settings import ArithmeticConfig, CustomConfig, EnvironmentConfig, MixtureConfig

LOGGER = logging.getLogger(__name__)


def build_arithmetic(settings: "ArithmeticConfig", config: "BuildSettings") -> "Environment":
    from covey.environments.arithmetic import Arithmetic

    counts = settings.num_train, settings.num_test
    return Arithmetic(tuple(settings.levels), *counts, settings.problem_seed, settings.style)


def build_reward_functions(
    settings: "RewardFunctionsConfig",
    config: "BuildSettings",
    rewards: "Sequence[RewardEntry] | None" = None,
    rows_in_memory: "Mapping[str, Iterable[Row]] | None" = None,
) -> "Environment":
    """Build it of what the settings name, or of functions and rows that a program gives in their place."""
    from covey.environments.data.rows import load_rows, row_settings
    from covey.environments.reward_functions.environment import RewardFunctions, RewardSettings, reward_functions
    from covey.environments.reward_functions.rows import PromptFormat
    from covey.system.workers.pool import WorkerSettings

    # Load the functions and the rows.
    functions = reward_functions(config.rewards if rewards is None else rewards, config.reward_weights)
    data = config.data
    prompts = PromptFormat(data.prompt_column, data.answer_column, data.prefill)
    how_to_read = replace(row_settings(config.data, (data.prompt_column,), "data.prompt_column"), read=prompts.read)
    rows = load_rows(data.path if rows_in_memory is None else rows_in_memory, how_to_read)
    prompts.check_use(row for of_split in rows.splits.values() for row in of_split)
    # Say how functions are run.
    workers = WorkerSettings(
        num_workers=settings.num_workers,
        timeout=settings.timeout,
        start_timeout=settings.start_timeout,
        max_calls=settings.worker_calls,
        max_bytes=settings.worker_bytes,
    )
    how = RewardSettings(workers, settings.in_process, settings.max_failure_rate)
    made = RewardFunctions(rows.splits, functions, how, prompt_column=data.prompt_column, prefill=data.prefill)
    made.follow(0, config.num_steps, 0.0)
    return made


def _judged(
    settings: "RewardFunctionsConfig",
    config: "BuildSettings",
    rewards: "Sequence[RewardEntry] | None" = None,
    rows_in_memory: "Mapping[str, Iterable[Row]] | None" = None,
) -> "RewardFunctions":
    """Build rows and reward functions; where there are none of these, something else rewards."""
    from covey.environments.doors.trl import no_reward

    functions = rewards or (None if config.rewards else [no_reward])
    return cast("RewardFunctions", build_reward_functions(settings, config, functions, rows_in_memory))


def build_tools(
    settings: "ToolsConfig",
    config: "BuildSettings",
    rewards: "Sequence[RewardEntry] | None" = None,
    rows_in_memory: "Mapping[str, Iterable[Row]] | None" = None,
    given: "Sequence[Callable[..., Any]] | None" = None,
) -> "Environment":
    """Build it of what the settings name, or of functions, a class and rows that a program gives in their place."""
    from covey.environments.conversations.tools.episode import ToolRules
    from covey.environments.doors.mcp import McpServer
    from covey.environments.doors.trl import RowTools
    from covey.system.lookup import resolve

    if given is None:
        functions = [resolve(name, {}) for name in settings.tools]
        toolset = None if settings.toolset is None else resolve(settings.toolset, {})
    else:
        functions = [tool for tool in given if not isinstance(tool, type)]
        toolset = next((tool for tool in given if isinstance(tool, type)), None)
    judged = _judged(settings, config, rewards, rows_in_memory)
    made = RowTools(judged, functions, toolset, has_rewards=bool(config.rewards))
    made.rules = ToolRules(max_calls=settings.max_tool_calls, role=settings.tool_role)
    made.tool_timeout = settings.tool_timeout
    shared = settings.server_sessions == "shared"
    made.servers = [McpServer(server, is_shared=shared, seconds=settings.tool_timeout) for server in settings.servers]
    return made


def build_agent(settings: "AgentConfig", config: "BuildSettings") -> "Environment":
    """Build rows, reward functions, and the agent program that plays every attempt."""
    from covey.environments.doors.gateway.environment import agent_environment

    return agent_environment(settings, _judged(settings, config), config.sampling, has_rewards=bool(config.rewards))


def build_steps(settings: "StepsConfig", config: "BuildSettings") -> "Environment":
    from covey.environments.data.rows import load_rows, row_settings
    from covey.environments.doors.steps import Steps, StepSettings, row_prompts, seed_prompts, with_messages
    from covey.system.lookup import resolve

    function = resolve(settings.factory, {})
    _check_arguments(function, settings, {"extras": {}} if settings.protocol == "skyrl" else {})
    how = StepSettings(partial(function, **settings.options), settings.protocol)
    if settings.protocol == "skyrl":
        rows = load_rows(config.data.path, row_settings(config.data, ("prompt",), make=with_messages))
        return Steps(how, row_prompts("steps", rows.splits))
    counts: dict[Split, int] = {"train": settings.num_train, "test": settings.num_test}
    return Steps(how, seed_prompts("steps", settings.instruction, counts, settings.problem_seed))


def build_guess(settings: "GuessConfig", config: "BuildSettings") -> "Environment":
    from covey.environments.conversations.guess import Guess

    return Guess(settings)


def build_lookup(settings: "LookupConfig", config: "BuildSettings") -> "Environment":
    from covey.environments.conversations.lookup import Lookup

    return Lookup(settings)


def build_calculator(settings: "CalculatorConfig", config: "BuildSettings") -> "Environment":
    from covey.environments.conversations.calculator import Calculator

    return Calculator(settings)


def build_custom(settings: "CustomConfig", config: "BuildSettings") -> "EnvironmentLike":
    from covey.environments.base import EnvironmentLike, faults_of
    from covey.system.lookup import resolve

    factory = resolve(settings.factory, {})
    _check_arguments(factory, settings, {})
    lacking = sorted(getattr(factory, "__abstractmethods__", ()))
    if lacking:
        what = ", ".join(lacking)
        raise ValueError(f"{settings.factory} must make an object with prompts and score, it lacks {what}")
    with faults_of(f"environment.factory={settings.factory}"):
        made = factory(**settings.options)
    if not isinstance(made, EnvironmentLike):
        raise ValueError(f"{settings.factory} must make an object with prompts and score, got {type(made).__name__}")
    return made


def _check_arguments(
    factory: "Callable[..., Any]", settings: "CustomConfig | StepsConfig", more: "Mapping[str, Any]"
) -> None:
    """Refuse options that do not fit before the factory runs."""
    try:
        with suppress(ValueError):  # some that are written in C have no signature
            inspect.signature(factory).bind(**settings.options, **more)
    except TypeError as error:
        raise ValueError(f"environment.options={settings.options} do not fit {settings.factory}: {error}") from error


def _beside(path: str, settings: "EnvironmentConfig", config: "BuildSettings", *say: "Say") -> "Environment":
    """Build an environment of a package beside covey, by its name."""
    module, _, name = path.partition(":")
    return cast("Environment", getattr(import_module(module), name)(settings, config, *say))


def build_mixture(settings: "MixtureConfig", config: "BuildSettings", say: "Say" = LOGGER.info) -> "Environment":
    from covey.environments.mixture import Mixture
    from covey.environments.settings import part_configs

    parts = part_configs(config)
    return Mixture({name: build(part, say) for name, part in parts.items()}, settings.weights)


def build(config: "BuildSettings", say: "Say" = LOGGER.info) -> "Environment":
    """Build the environment that `environment.name` names. `say` hears of what takes a while."""
    from covey.environments.base import adapt

    name = config.environment.name
    if name in TELLING:
        return TELLING[name](config.environment, config, say)
    return adapt(ENVIRONMENTS[name](config.environment, config))


INFILL = partial(_beside, "covey_tasks.infill.build:build_infill")
ENVIRONMENTS: "dict[str, Callable[[Any, BuildSettings], EnvironmentLike]]" = {
    "arithmetic": build_arithmetic,
    "gsm8k": partial(_beside, "covey_tasks.math.build:build_gsm8k"),
    "math": partial(_beside, "covey_tasks.math.build:build_math"),
    "countdown": partial(_beside, "covey_tasks.math.build:build_countdown"),
    "code": partial(_beside, "covey_tasks.code.build:build_code"),
    "ifeval": partial(_beside, "covey_tasks.ifeval.build:build_ifeval"),
    "machines": partial(_beside, "covey_tasks.machines.build:build_machines"),
    "infill": INFILL,
    "reward_functions": build_reward_functions,
    "tools": build_tools,
    "agent": build_agent,
    "steps": build_steps,
    "openenv": doors.build_openenv,
    "verifiers": doors.build_verifiers,
    "reasoning_gym": doors.build_reasoning_gym,
    "guess": build_guess,
    "lookup": build_lookup,
    "calculator": build_calculator,
    "custom": build_custom,
    "mixture": build_mixture,
}
"""Name of an environment to its builder: (its own settings, the whole configuration) -> Environment."""
TELLING: "dict[str, Callable[[Any, BuildSettings, Say], Environment]]" = {
    "infill": INFILL,
    "mixture": build_mixture,
}
"""Those of them that may train a judge first, with who hears of it."""
