"""What is rewarded. The module of an environment is imported when it is built: the package imports nothing heavy."""

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    Say = Callable[[str], None]

    from covey.config import Config
    from covey.environments.base import Environment, Split
    from covey.environments.code_settings import CodeConfig
    from covey.environments.countdown import CountdownProblems, CountdownRules
    from covey.environments.countdown_settings import CountdownConfig
    from covey.environments.data import RowSettings
    from covey.environments.ifeval.generator import Recipe
    from covey.environments.ifeval.rewards import Scheme
    from covey.environments.ifeval.settings import IfevalConfig
    from covey.environments.infill_settings import InfillConfig
    from covey.environments.machines.environment import MachineSettings
    from covey.environments.machines.settings import MachinesConfig
    from covey.environments.math_settings import Gsm8kConfig, MathConfig
    from covey.environments.reward_functions_settings import RewardFunctionsConfig
    from covey.environments.settings import ArithmeticConfig, CustomConfig, MixtureConfig
    from covey.sandbox import Limits, Runner, Tier
    from covey.types import Prompt

LOGGER = logging.getLogger(__name__)


def build_arithmetic(settings: "ArithmeticConfig", config: "Config") -> "Environment":
    from covey.environments.arithmetic import Arithmetic

    return Arithmetic(tuple(settings.levels), settings.num_train, settings.num_test, settings.problem_seed)


def build_gsm8k(settings: "Gsm8kConfig", config: "Config") -> "Environment":
    from covey.environments.data import load_rows
    from covey.environments.gsm8k import GSM8K

    rows = load_rows(config.data.path, _row_settings(config, ("question", "answer"), prompt=("question",)))
    return GSM8K(rows.splits, settings.scheme, settings.format_reward, settings.instruction)


def build_math(settings: "MathConfig", config: "Config") -> "Environment":
    from covey.environments.data import load_rows
    from covey.environments.math_verification import MathLimits
    from covey.environments.mathematics import MathColumns, Mathematics, MathSettings

    rows = load_rows(config.data.path, _row_settings(config, (settings.problem_column,), "environment.problem_column"))
    how = MathSettings(
        scheme=settings.scheme,
        format_reward=settings.format_reward,
        instruction=settings.instruction,
        columns=MathColumns(settings.problem_column, settings.answer_column, settings.solution_column),
        limits=MathLimits(settings.timeout, settings.num_workers),
        skips_bad_rows=config.data.bad_rows == "skip",
    )
    return Mathematics(rows.splits, how)


def build_countdown(settings: "CountdownConfig", config: "Config") -> "Environment":
    from covey.environments.countdown import Countdown, made_up, read_rows
    from covey.environments.data import load_rows

    rules = countdown_rules(settings)
    if config.data.path is not None:
        return Countdown(
            read_rows(load_rows(config.data.path, _row_settings(config, ("nums", "target"))).splits), rules
        )
    return Countdown(made_up(countdown_problems(settings)), rules)


def countdown_rules(settings: "CountdownConfig") -> "CountdownRules":
    """How problems are put and answers judged. ValueError for names that are not there."""
    from covey.environments.countdown import CountdownRules

    return CountdownRules(settings.uses, settings.answer_form, settings.format_reward, settings.instruction)


def countdown_problems(settings: "CountdownConfig") -> "CountdownProblems":
    """Which problems are made up. ValueError for what cannot be."""
    from covey.environments.countdown import CountdownProblems

    return CountdownProblems(
        num_numbers=tuple(settings.num_numbers),
        max_number=settings.max_number,
        max_target=settings.max_target,
        operators=tuple(settings.operators),
        num_train=settings.num_train,
        num_test=settings.num_test,
        problem_seed=settings.problem_seed,
    )


def build_code(settings: "CodeConfig", config: "Config") -> "Environment":
    from covey.environments.code import Code, CodeSettings
    from covey.environments.code_formats import problems_of
    from covey.environments.code_problems import draw_problems
    from covey.environments.data import load_rows

    how = CodeSettings(
        partial_weight=settings.partial_weight,
        second_turn=settings.second_turn,
        recheck_rate=settings.recheck_rate,
        cache_size=settings.cache_size,
        limits=code_limits(settings),
    )
    if config.data.path is not None:
        problems = problems_of(load_rows(config.data.path, _row_settings(config, (), prompt=("prompt", "text"))).splits)
    else:
        counts: dict[Split, int] = {"train": settings.num_train, "test": settings.num_test}
        problems = draw_problems(settings.problem, settings.difficulty, counts, settings.problem_seed)
    return Code(problems, code_runner(settings), how)


def code_limits(settings: "CodeConfig") -> "Limits":
    """What one program may use."""
    from covey.sandbox.types import Limits

    return Limits(
        wall_seconds=settings.wall_seconds,
        total_seconds=settings.total_seconds,
        cpu_seconds=settings.cpu_seconds,
        memory_bytes=settings.memory_bytes,
        output_bytes=settings.output_bytes,
    )


def code_runner(settings: "CodeConfig") -> "Runner":
    """What runs programs, here or elsewhere. ValueError where this machine cannot isolate them."""
    from covey.environments.remote_runner import RemoteRunner
    from covey.sandbox import Sandbox, SandboxFailed

    if settings.remote_url is not None:
        return RemoteRunner(settings.remote_url, settings.num_slots, settings.remote_margin, code_limits(settings))
    try:
        return Sandbox(settings.num_slots, cast("Tier", settings.tier))
    except SandboxFailed as error:
        raise ValueError(f"environment.tier={settings.tier}: {error}") from error


def build_ifeval(settings: "IfevalConfig", config: "Config") -> "Environment":
    from covey.environments.ifeval.environment import IFEval
    from covey.environments.ifeval.generator import generate
    from covey.environments.ifeval.prompts import COLUMNS, Source, from_requests, load

    scheme = ifeval_scheme(settings)
    ask = scheme.instruction if settings.instruction is None else settings.instruction

    def generated() -> "dict[Split, list[Prompt]]":
        requests = generate(ifeval_recipe(settings), settings.num_train, settings.num_test)
        return {split: from_requests(found, split, settings.style, ask) for split, found in requests.items()}

    source = Source(config.data.path, settings.benchmark, _row_settings(config, COLUMNS, prompt=("prompt",)))
    return IFEval(load(source, generated, ask), scheme)


def ifeval_scheme(settings: "IfevalConfig") -> "Scheme":
    """How verdicts become a reward. ValueError for a name that is not there."""
    from covey.environments.ifeval.rewards import Scheme

    bonuses = (settings.answer_bonus, settings.think_bonus)
    return Scheme(settings.scheme, tuple(settings.measure_weights), *bonuses, settings.min_words)


def ifeval_recipe(settings: "IfevalConfig") -> "Recipe":
    """What prompts are made of. ValueError for kinds that are not there."""
    from covey.environments.ifeval.generator import Recipe

    return Recipe(settings.style, tuple(settings.kinds), settings.max_instructions, settings.problem_seed)


def build_machines(settings: "MachinesConfig", config: "Config") -> "Environment":
    import random

    from covey.environments.machines.demonstrations import Wanted
    from covey.environments.machines.environment import Machines
    from covey.environments.machines.score_cache import CachedSimulators
    from covey.environments.machines.simulators import Simulators, SimulatorSettings
    from covey.environments.machines.stages import draw_problems

    counts: dict[Split, int] = {"train": settings.num_train, "test": settings.num_test}
    most, seed = settings.max_blocks, settings.problem_seed
    problems = {
        split: draw_problems(settings.stages, count, most, random.Random(f"machines {split} {seed}"))
        for split, count in counts.items()
    }
    wanted = Wanted(tuple(settings.stages), settings.num_demonstrations, most, settings.family_share, seed)
    simulators = Simulators(SimulatorSettings(settings.num_workers, settings.timeout))
    cached = CachedSimulators(simulators, settings.cache_size)
    return Machines(problems, wanted, cached, machine_settings(settings))


def machine_settings(settings: "MachinesConfig") -> "MachineSettings":
    """How machines are written and judged. ValueError for names that are not there."""
    from covey.environments.machines.environment import MachineSettings

    return MachineSettings(
        form=settings.form,
        score=settings.score,
        transform=settings.transform,
        file_reward=settings.file_reward,
        placed_reward=settings.placed_reward,
        instruction=settings.instruction,
        demonstration_cap=settings.demonstration_cap,
    )


def build_infill(settings: "InfillConfig", config: "Config", say: "Say" = LOGGER.info) -> "Environment":
    from covey.environments.infill_build import build

    columns = () if config.data.path is None else (settings.text_column,)
    rows = _row_settings(config, columns, "environment.text_column")
    return build(settings, config.model, config.data.path, rows, config.seed, say)


def build_reward_functions(settings: "RewardFunctionsConfig", config: "Config") -> "Environment":
    from covey.environments.data import load_rows
    from covey.environments.reward_functions import RewardFunctions, RewardSettings, reward_functions
    from covey.environments.reward_rows import PromptFormat
    from covey.environments.workers import WorkerSettings

    functions = reward_functions(config.rewards, config.reward_weights)
    data = config.data
    prompts = PromptFormat(data.prompt_column, data.answer_column, data.prefill)
    how_to_read = replace(_row_settings(config, (data.prompt_column,), "data.prompt_column"), read=prompts.read)
    rows = load_rows(data.path, how_to_read)
    prompts.check_use(row for of_split in rows.splits.values() for row in of_split)
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


def build_custom(settings: "CustomConfig", config: "Config") -> "Environment":
    from covey.environments.base import Environment
    from covey.tables import resolve

    factory = resolve(settings.factory, {})
    try:
        inspect.signature(factory).bind(**settings.options)
    except TypeError as error:
        raise ValueError(f"environment.options={settings.options} do not fit {settings.factory}: {error}") from error
    made = factory(**settings.options)
    if not isinstance(made, Environment):
        raise ValueError(f"{settings.factory} must make an object with prompts and score, got {type(made).__name__}")
    return made


def build_mixture(settings: "MixtureConfig", config: "Config", say: "Say" = LOGGER.info) -> "Environment":
    from covey.config import part_configs
    from covey.environments.mixture import Mixture

    parts = part_configs(config)
    return Mixture({name: build(part, say) for name, part in parts.items()}, settings.weights)


def build(config: "Config", say: "Say" = LOGGER.info) -> "Environment":
    """The environment that `environment.name` names; `say` hears of what takes a while."""
    name = config.environment.name
    if name in TELLING:
        return TELLING[name](config.environment, config, say)
    return ENVIRONMENTS[name](config.environment, config)


def _row_settings(
    config: "Config", columns: tuple[str, ...], column_setting: str | None = None, prompt: tuple[str, ...] = ()
) -> "RowSettings":
    """`columns` must be there; `prompt` are those of them that make the prompt, where not all do."""
    from covey.environments.data import RowSettings

    data = config.data
    return RowSettings(
        columns=columns,
        column_setting=column_setting,
        prompt_columns=prompt or columns,
        subset=data.subset,
        train_split=data.train_split,
        test_split=data.test_split,
        test_fraction=data.test_fraction,
        max_rows=data.max_rows,
        shuffle_rows=data.shuffle_rows,
        bad_rows=data.bad_rows,
    )


ENVIRONMENTS: "dict[str, Callable[[Any, Config], Environment]]" = {
    "arithmetic": build_arithmetic,
    "gsm8k": build_gsm8k,
    "math": build_math,
    "countdown": build_countdown,
    "code": build_code,
    "ifeval": build_ifeval,
    "machines": build_machines,
    "infill": build_infill,
    "reward_functions": build_reward_functions,
    "custom": build_custom,
    "mixture": build_mixture,
}
"""Name of an environment to its builder: (its own settings, the whole configuration) -> Environment."""
TELLING: "dict[str, Callable[[Any, Config, Say], Environment]]" = {"infill": build_infill, "mixture": build_mixture}
"""Those of them that may train a judge first, with who hears of it."""
