"""Rules of the prompt stream: curriculum, group sizes, parts of a mixture."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from covey.config.checks import format_value
from covey.config.schema import Config
from covey.environments.data.settings import DataConfig
from covey.environments.settings import EnvironmentConfig, MixtureConfig, part_configs
from covey.rollouts.settings import group_sizes

MOST_COMPLETIONS = 1_000_000
"""Maximum completions of a step: more are a slip of the finger, and would be sampled for days."""
Rule = Callable[[Config], None]


def check_curriculum(config: Config) -> None:
    curriculum = config.curriculum
    window = curriculum.window
    if len(window) != 2 or not 0 <= window[0] < window[1] <= 1:
        raise ValueError(f"curriculum.window must be two rates, 0 <= from < to <= 1, got {format_value(window)}")
    if curriculum.demote_below is not None and not 0 < curriculum.demote_below < curriculum.promote_at:
        raise ValueError(
            f"curriculum.demote_below must be in (0, promote_at={curriculum.promote_at}), got {curriculum.demote_below}"
        )


def check_group_sizes(config: Config, least: int) -> None:
    """Require group sizes of at least `least`, and a reached schedule."""
    if config.group_size < least:
        raise ValueError(f"group_size must be >= {least}, got {config.group_size}")
    before = 0
    for entry in config.group_size_schedule:
        if entry.group_size < least:
            raise ValueError(f"group_size_schedule: group_size must be >= {least}, got {entry.group_size}")
        if entry.step <= before:
            raise ValueError(f"group_size_schedule: steps must rise from 1 on, got {entry.step} after {before}")
        if entry.step >= config.num_steps:
            raise ValueError(f"group_size_schedule: step must be < num_steps={config.num_steps}, got {entry.step}")
        before = entry.step
    # A step's completions are held at once
    most = config.groups_per_step * max(group_sizes(config.group_size, config.group_size_schedule))
    if most > MOST_COMPLETIONS:
        raise ValueError(
            f"groups_per_step x group_size must be <= {MOST_COMPLETIONS:,} (a step's completions are held in memory), "
            f"got {most:,}"
        )


def check_mixture(config: Config, rules: Sequence[Rule]) -> None:
    """Require the parts of a mixture, and apply the rules to each."""
    mixture = config.environment
    assert isinstance(mixture, MixtureConfig), "check_environment calls this"
    if not mixture.parts:
        raise ValueError("environment=mixture needs environment.parts={NAME: {...}, ...}, got none")
    for name, part in mixture.parts.items():
        if not isinstance(part, EnvironmentConfig):
            raise ValueError(f"environment.parts.{name} must be settings, such as ArithmeticConfig(), got {part!r:.60}")
    for setting, named in (("weights", mixture.weights), ("data", mixture.data)):
        unknown = sorted(set(named) - set(mixture.parts))
        if unknown:
            parts = ", ".join(mixture.parts)
            raise ValueError(f"environment.{setting}.{unknown[0]} needs a part of that name, got {parts}")
    for name, weight in mixture.weights.items():
        if weight <= 0:
            raise ValueError(f"environment.weights.{name} must be > 0, got {weight}")
    kinds = mixture.parts.items()
    if config.rewards and not any(part.takes_rewards for _, part in kinds):
        raise ValueError(f"rewards={format_value(config.rewards)} needs a part with name: reward_functions, got none")
    sharing = [name for name, part in kinds if part.reads_rows == "always" and name not in mixture.data]
    for setting, value in vars(config.data).items():
        if not sharing and value != vars(DataConfig())[setting]:
            raise ValueError(f"data.{setting}={format_value(value)} needs a part that reads it, got none")
    for name, part in part_configs(config).items():
        _check_part(name, part, rules)


def _check_part(name: str, config: Config, rules: Sequence[Rule]) -> None:
    if isinstance(config.environment, MixtureConfig):
        raise ValueError(f"environment.parts.{name} must be an environment that is no mixture, got mixture")
    if not config.environment.takes_rewards:
        config = replace(config, rewards=[], reward_weights=[])
    for rule in rules:
        try:
            rule(config)
        except ValueError as error:
            raise ValueError(f"environment.parts.{name}: {error}") from error
