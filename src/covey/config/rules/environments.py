"""Rules of the settings of single environments, and of masked policies, which few of them have prompts for.

Names and ranges are those of the environments themselves, which are imported when a rule is applied.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from covey.config.schema import Config
from covey.environments.code.families import chosen_families
from covey.environments.code.settings import CodeConfig
from covey.environments.conversations.tools.settings import ToolsConfig
from covey.environments.doors.settings import AgentConfig, OpenEnvConfig, StepsConfig, VerifiersConfig
from covey.environments.infill.settings import InfillConfig
from covey.environments.machines.settings import MachinesConfig
from covey.environments.settings import CustomConfig
from covey.policy.settings import NANO
from covey.system.lookup import is_function_path


def check_answers(config: Config) -> None:
    """Check ranges, and that schemes, forms and kinds exist.

    ValueError names the setting and what it may be.
    """
    check = CHECKS.get(config.environment.name)
    if check is not None:
        with _of_environment():
            check(config.environment, config.data.path is None)


@contextmanager
def _of_environment() -> Iterator[None]:
    """Complete the name of a setting that the environment refuses itself."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"environment.{error}") from error


def _check_gsm8k(settings: Any, is_generated: bool) -> None:
    from covey.environments.math.gsm8k import check_scheme

    check_scheme(settings.scheme, settings.format_reward)


def _check_math(settings: Any, is_generated: bool) -> None:
    from covey.environments.math.mathematics import MathSettings
    from covey.environments.math.verifier import MathLimits

    MathSettings(settings.scheme, settings.format_reward, limits=MathLimits(settings.timeout, settings.num_workers))


def _check_countdown(settings: Any, is_generated: bool) -> None:
    from covey.environments.math.countdown.environment import check_problems, check_rules

    check_rules(settings)
    if is_generated:
        check_problems(settings)


def _check_ifeval(settings: Any, is_generated: bool) -> None:
    from covey.environments.ifeval.generator import recipe_of
    from covey.environments.ifeval.rewards import scheme_of

    scheme_of(settings)
    if is_generated:
        recipe_of(settings)


CHECKS: dict[str, Callable[[Any, bool], None]] = {
    "gsm8k": _check_gsm8k,
    "math": _check_math,
    "countdown": _check_countdown,
    "ifeval": _check_ifeval,
}
"""Environment -> its check of (settings, whether problems are made up)."""


DEFAULT_SLOTS = 2
"""As many there are on a machine with a single processor."""


def _check_code(config: Config, settings: CodeConfig) -> None:
    """Check ranges, that problems exist, and the time for a group's programs.

    ValueError names the setting.
    """
    with _of_environment():
        from covey.environments.code.environment import code_limits

        code_limits(settings)
        if config.data.path is None:
            chosen_families(settings.problem, settings.difficulty)
    _check_program_time(config, settings)


def _check_program_time(config: Config, settings: CodeConfig) -> None:
    """Refuse a timeout that ends a program before its group can be judged."""
    num_slots = settings.num_slots or DEFAULT_SLOTS
    longest = settings.total_seconds * math.ceil(config.group_size / num_slots)
    if config.timeouts.scoring <= longest:
        raise ValueError(
            f"environment.total_seconds={settings.total_seconds:g} for {config.group_size} programs in "
            f"{num_slots} slots needs timeouts.scoring > {longest:g}, got {config.timeouts.scoring:g}"
        )


FILLS = ("infill", "reward_functions", "mixture", "custom")
"""Environments whose prompts may have masked tokens."""
ARCHITECTURES = ("modernbert", "bert", "roberta")
"""Of nano-masked."""


def check_kind(config: Config) -> None:
    """Require that masked policies, their engine and their environment come together."""
    model, engine = config.model, config.engine.name
    # The embedded models have one kind and one list of architectures
    masked = model.kind == "masked"
    if model.name in NANO and masked != (model.name == "nano-masked"):
        wanted = "masked" if model.name == "nano-masked" else "causal"
        raise ValueError(f"model.name={model.name} needs model.kind={wanted}, got model.kind={model.kind}")
    if model.name in NANO and masked != (model.nano_architecture in ARCHITECTURES):
        raise ValueError(f"model.nano_architecture={model.nano_architecture} is none of model.name={model.name}")
    # Masked policies need engine=fill, causal ones any other
    if masked != (engine == "fill") and (masked or engine != "fake"):
        wanted = "masked" if engine == "fill" else "causal"
        raise ValueError(f"engine.name={engine} needs model.kind={wanted}, got model.kind={model.kind}")
    # Masked policies need prompts with masks, and the other way round
    environment = config.environment.name
    if masked and environment not in FILLS:
        raise ValueError(f"model.kind=masked needs prompts with masked tokens, got environment={environment}")
    if not masked and environment == "infill":
        raise ValueError("environment=infill needs model.kind=masked, got model.kind=causal")


def _check_infill(config: Config, settings: InfillConfig) -> None:
    """Check shares of masked tokens, and what can be watched. ValueError names the setting."""
    if not settings.mask_ratios or not all(0 < ratio < 1 for ratio in settings.mask_ratios):
        raise ValueError(f"environment.mask_ratios must be numbers between 0 and 1, got {settings.mask_ratios}")
    if config.data.path is not None and "grammar" in settings.monitors:
        raise ValueError(f"environment.monitors=[grammar] needs data.path = null, got data.path={config.data.path}")


def _check_machines(config: Config, settings: MachinesConfig) -> None:
    """Check that stages and scores exist, and the time for a group's machines."""
    from covey.environments.machines.design.stages import STAGES, check_stages
    from covey.environments.machines.scores import find_score

    with _of_environment():
        check_stages(settings.stages)
        for stage in settings.stages:
            find_score(STAGES[stage].task, settings.score)
    _check_size(settings)
    _check_machine_time(config, settings)


def _check_size(settings: MachinesConfig) -> None:
    """Refuse stages without a right answer.

    They would ask for more blocks than there may be, and no form can write more than 48.
    """
    from covey.environments.machines.design.stages import STAGES

    for stage in settings.stages:
        least = 8 if STAGES[stage].task == "catapult" else max(2, STAGES[stage].min_blocks)
        least = max(STAGES[stage].budgets) if STAGES[stage].is_begun else least
        if settings.max_blocks < least:
            raise ValueError(f"environment.max_blocks must be >= {least} for stage {stage}, got {settings.max_blocks}")


def _check_machine_time(config: Config, settings: MachinesConfig) -> None:
    """Refuse a timeout that ends a simulation before its group can be judged."""
    longest = settings.timeout * math.ceil(config.group_size / settings.num_workers)
    if config.timeouts.scoring <= longest:
        raise ValueError(
            f"environment.timeout={settings.timeout:g} for {config.group_size} machines in {settings.num_workers} "
            f"processes needs timeouts.scoring > {longest:g}, got {config.timeouts.scoring:g}"
        )


def _check_tools(config: Config, settings: ToolsConfig) -> None:
    """Require tools of environment=tools, something that rewards, and names that can be imported."""
    if not settings.tools and settings.toolset is None and not settings.servers:
        raise ValueError("environment=tools needs environment.tools=[module:function], toolset or servers, got none")
    if not config.rewards and settings.toolset is None:
        raise ValueError("environment=tools needs rewards=[module:function], or a toolset with get_reward, got none")
    for name in (*settings.tools, *([settings.toolset] if settings.toolset is not None else [])):
        if not is_function_path(name):
            raise ValueError(f"tools of environment=tools must be module:function, got {name}")


def _check_agent(config: Config, settings: AgentConfig) -> None:
    """Require one program of environment=agent."""
    if (settings.program is None) == (not settings.command):
        got = "none" if settings.program is None else "both"
        raise ValueError(f"environment=agent needs environment.program=module:function or command=[...], got {got}")
    if settings.program is not None and not is_function_path(settings.program):
        raise ValueError(f"environment.program must be module:function, got {settings.program}")


def _check_openenv(config: Config, settings: OpenEnvConfig) -> None:
    """Require the address of a server of environment=openenv."""
    if not settings.url.startswith(("http://", "https://", "ws://", "wss://")):
        got = settings.url or "none"
        raise ValueError(f"environment=openenv needs environment.url=http://HOST:PORT of its server, got {got}")


def _check_verifiers(config: Config, settings: VerifiersConfig) -> None:
    """Require the name of an environment of environment=verifiers."""
    if not settings.id:
        raise ValueError("environment=verifiers needs environment.id=NAME of an installed environment, got none")


def _check_steps(config: Config, settings: StepsConfig) -> None:
    """Require a factory of environment=steps, and rows of SkyRL-Gym alone."""
    if not is_function_path(settings.factory):
        raise ValueError(
            f"environment=steps needs environment.factory=module:function, got {settings.factory or 'none'}"
        )
    path, is_skyrl = config.data.path, settings.protocol == "skyrl"
    if is_skyrl and path is None:
        raise ValueError("environment.protocol=skyrl needs data.path (rows with a prompt), got data.path=null")
    if path is not None and not is_skyrl:
        raise ValueError(f"data.path={path} needs environment.protocol=skyrl, got {settings.protocol}")


def _check_custom(config: Config, settings: CustomConfig) -> None:
    """Require environment.factory=module:function of a custom environment."""
    if not is_function_path(settings.factory):
        got = settings.factory or "none"
        raise ValueError(f"environment=custom needs environment.factory=module:function, got {got}")


OWN_RULES: Mapping[Any, Callable[[Config, Any], None]] = {
    **{CodeConfig: _check_code, MachinesConfig: _check_machines, InfillConfig: _check_infill},
    **{ToolsConfig: _check_tools, StepsConfig: _check_steps, AgentConfig: _check_agent, CustomConfig: _check_custom},
    **{OpenEnvConfig: _check_openenv, VerifiersConfig: _check_verifiers},
}
"""Settings of an environment -> its check of (all settings, these)."""
