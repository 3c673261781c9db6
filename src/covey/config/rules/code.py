"""Rules of the settings of environment=code."""

import math

from covey.config.schema import Config
from covey.environments.build import code_limits
from covey.environments.code.families import chosen_families
from covey.environments.code.settings import CodeConfig

DEFAULT_SLOTS = 2
"""As many there are on a machine with a single processor."""


def check_code(config: Config) -> None:
    """Check ranges, that problems exist, and the time for a group's programs.

    ValueError names the setting.
    """
    settings = config.environment
    assert isinstance(settings, CodeConfig), "check_environment calls this"
    try:
        code_limits(settings)
        if config.data.path is None:
            _check_problems(settings)
    except ValueError as error:
        raise ValueError(f"environment.{error}") from error
    if settings.remote_url is not None and not settings.remote_url.startswith(("http://", "https://")):
        raise ValueError(f"environment.remote_url must begin with http:// or https://, got {settings.remote_url}")
    _check_time(config, settings)


def _check_problems(settings: CodeConfig) -> None:
    chosen_families(settings.problem, settings.difficulty)


def _check_time(config: Config, settings: CodeConfig) -> None:
    """Refuse a timeout that ends a program before its group can be judged."""
    num_slots = settings.num_slots or DEFAULT_SLOTS
    longest = settings.total_seconds * math.ceil(config.group_size / num_slots)
    if config.timeouts.scoring <= longest:
        raise ValueError(
            f"environment.total_seconds={settings.total_seconds:g} for {config.group_size} programs in "
            f"{num_slots} slots needs timeouts.scoring > {longest:g}, got {config.timeouts.scoring:g}"
        )
