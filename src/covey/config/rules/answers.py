"""Rules of the environments that judge answers by a scheme: gsm8k, math, countdown and ifeval.

The names and ranges are those of the environments themselves, which are imported when the rule is applied.
"""

from collections.abc import Callable
from typing import Any

from covey.config.schema import Config
from covey.environments.build import ifeval_recipe, ifeval_scheme


def check_answers(config: Config) -> None:
    """Check ranges, and that schemes, forms and kinds exist.

    ValueError names the setting and what it may be.
    """
    check = CHECKS.get(config.environment.name)
    if check is None:
        return
    try:
        check(config.environment, config.data.path is None)
    except ValueError as error:
        raise ValueError(f"environment.{error}") from error


def _check_gsm8k(settings: Any, is_made_up: bool) -> None:
    from covey.environments.math.gsm8k import check_scheme

    check_scheme(settings.scheme, settings.format_reward)


def _check_math(settings: Any, is_made_up: bool) -> None:
    from covey.environments.math.mathematics import MathSettings
    from covey.environments.math.verifier import MathLimits

    MathSettings(settings.scheme, settings.format_reward, limits=MathLimits(settings.timeout, settings.num_workers))


def _check_countdown(settings: Any, is_made_up: bool) -> None:
    from covey.environments.countdown.environment import check_problems, check_rules

    check_rules(settings)
    if is_made_up:
        check_problems(settings)


def _check_ifeval(settings: Any, is_made_up: bool) -> None:
    ifeval_scheme(settings)
    if is_made_up:
        ifeval_recipe(settings)


CHECKS: dict[str, Callable[[Any, bool], None]] = {
    "gsm8k": _check_gsm8k,
    "math": _check_math,
    "countdown": _check_countdown,
    "ifeval": _check_ifeval,
}
"""Environment -> its check of (settings, whether problems are made up)."""
