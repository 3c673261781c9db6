"""The check of a whole configuration: names, types, and every rule between settings."""

from collections.abc import Callable

from covey.config.rules.general import RULES, check_functions
from covey.config.schema import Config
from covey.environments.settings import EnvironmentConfig
from covey.system.section import check_section


def validate(config: Config, meanwhile: Callable[[Config], None] | None = None) -> None:
    """Check names, types and every rule between settings. The rules are `covey.config.rules.general.RULES`.

    `meanwhile` is called after the plain ones, before those that import torch. ValueError with one line that names the
    settings to mend.
    """
    check_section(config)
    if not isinstance(config.environment, EnvironmentConfig):
        raise ValueError(f"environment must be settings, such as ArithmeticConfig(), got {config.environment!r:.60}")
    for rule in RULES:
        rule(config)
    if meanwhile is not None:
        meanwhile(config)
    check_functions(config)
