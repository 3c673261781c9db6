"""Rules of the settings of environment=machines."""

import math

from covey.config.schema import Config
from covey.environments.build import machine_settings
from covey.environments.machines.design.stages import STAGES, check_stages
from covey.environments.machines.scores import find_score
from covey.environments.machines.settings import MachinesConfig


def check_machines(config: Config) -> None:
    """Check ranges, that stages and scores exist, and the time for a group's machines."""
    settings = config.environment
    assert isinstance(settings, MachinesConfig), "check_environment calls this"
    try:
        machine_settings(settings)
        check_stages(settings.stages)
        for stage in settings.stages:
            find_score(STAGES[stage].task, settings.score)
    except ValueError as error:
        raise ValueError(f"environment.{error}") from error
    _check_size(settings)
    _check_time(config, settings)


def _check_size(settings: MachinesConfig) -> None:
    """Refuse stages without a right answer.

    They would ask for more blocks than there may be, and no form can write more than 48.
    """
    for stage in settings.stages:
        least = 8 if STAGES[stage].task == "catapult" else max(2, STAGES[stage].min_blocks)
        least = max(STAGES[stage].budgets) if STAGES[stage].is_begun else least
        if settings.max_blocks < least:
            raise ValueError(f"environment.max_blocks must be >= {least} for stage {stage}, got {settings.max_blocks}")


def _check_time(config: Config, settings: MachinesConfig) -> None:
    """Refuse a timeout that ends a simulation before its group can be judged."""
    longest = settings.timeout * math.ceil(config.group_size / settings.num_workers)
    if config.timeouts.scoring <= longest:
        raise ValueError(
            f"environment.timeout={settings.timeout:g} for {config.group_size} machines in {settings.num_workers} "
            f"processes needs timeouts.scoring > {longest:g}, got {config.timeouts.scoring:g}"
        )
