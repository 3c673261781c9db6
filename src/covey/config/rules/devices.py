"""Rules of devices by role, and of the ranks' waits for samplers."""

from covey.config.schema import Config
from covey.environments.reward_functions.settings import RewardFunctionsConfig
from covey.environments.settings import MixtureConfig, part_configs
from covey.system import ranks

LEARNED = ("reward_model", "pairwise")
"""Ready-made rewards that ask a judge."""


def check_devices(config: Config) -> None:
    """Check each role's work, and the ranks' patience."""
    devices, staleness = config.devices, config.max_staleness
    if staleness > 0 and (config.source == "local" or devices.sampler == 0):
        got = "source=local" if config.source == "local" else "devices.sampler=0"
        needed = "source=ray" if config.source == "local" else "devices.sampler >= 1"
        raise ValueError(f"max_staleness={staleness} needs {needed}, got {got} (groups are sampled between updates)")
    if devices.sampler == 0 and config.engine.name != "vllm" and config.engine.update != "keep":
        raise ValueError(
            f"engine.update={config.engine.update} needs devices.sampler >= 1, got devices.sampler=0 (no weights "
            "change while the trainer's processes sample)"
        )
    if config.source == "ray" and devices.judge > 0 and not has_judge(config):
        raise ValueError(
            f"devices.judge={devices.judge} needs an environment with a learned judge (environment=infill, "
            f"{' or '.join(LEARNED)} among rewards, or a mixture with such a part), got "
            f"environment={config.environment.name}"
        )
    if devices.judge + devices.reference > 0 and ranks.world_size() > 1 and devices.trainer == 1:
        raise ValueError(
            f"devices.reference={devices.reference} and devices.judge={devices.judge} need ranks that Ray starts "
            f"(devices.trainer={ranks.world_size()}), got {ranks.world_size()} of a launcher"
        )
    several = config.source == "ray" and max(devices.trainer, ranks.world_size()) > 1
    if several and devices.sampler > 0 and config.timeouts.ranks <= config.timeouts.sampling:
        raise ValueError(
            f"timeouts.ranks={config.timeouts.ranks:g} needs to be > timeouts.sampling={config.timeouts.sampling:g}: "
            "the other ranks wait while the first waits for samplers"
        )


def has_judge(config: Config) -> bool:
    """Return True if the reward contains a model's score."""
    environment = config.environment
    if isinstance(environment, MixtureConfig):
        return any(map(has_judge, part_configs(config).values()))
    if isinstance(environment, RewardFunctionsConfig):
        from covey.environments.reward_functions.specs import reward_spec

        return any(reward_spec(entry).ready_made in LEARNED for entry in config.rewards)
    return bool(environment.learned_judge != "none")
