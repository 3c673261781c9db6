"""The length of a run: steps, completions or passes."""

import math
from collections.abc import Sequence
from dataclasses import replace

from covey.config.schema import Config
from covey.rollouts.settings import GroupSizeStep, group_sizes

BUDGETS = ("num_steps", "total_rollouts", "num_epochs")
"""Settings that say how long a run is. One of them counts: the others follow from it or are null."""


def resolve_budget(config: Config, num_prompts: int | None = None) -> Config:
    """Return the settings with the `num_steps` of their budget.

    `num_prompts` are the trainable ones; without them, epochs are not counted.
    """
    if config.total_rollouts is not None:
        steps = steps_for_rollouts(
            config.total_rollouts, config.groups_per_step, config.group_size, config.group_size_schedule
        )
    elif config.num_epochs is not None and num_prompts is not None:
        steps = steps_for_epochs(config.num_epochs, num_prompts, config.groups_per_step)
    else:
        steps = config.num_steps
    return config if steps == config.num_steps else replace(config, num_steps=steps)


def steps_for_rollouts(total: int, groups_per_step: int, group_size: int, schedule: Sequence[GroupSizeStep]) -> int:
    """Return the steps that take `total` completions, the last step whole.

    >>> steps_for_rollouts(100, 2, 8, []), steps_for_rollouts(100, 2, 8, [GroupSizeStep(step=4, group_size=2)])
    (7, 13)
    """
    steps, left = 0, total
    # Each size holds up to the step at which the next one begins
    ends = [*(entry.step for entry in schedule), math.inf]
    for size, end in zip(group_sizes(group_size, schedule), ends, strict=True):
        of_step = max(1, groups_per_step * size)
        needed = min(math.ceil(left / of_step), end - steps)
        steps, left = steps + int(needed), left - int(needed) * of_step
        if left <= 0:
            break
    return steps


def steps_for_epochs(num_epochs: float, num_prompts: int, groups_per_step: int) -> int:
    """Return the steps of `num_epochs` passes, the last step whole.

    >>> steps_for_epochs(2, 22, 4), steps_for_epochs(0.5, 22, 4)
    (11, 3)
    """
    return max(1, math.ceil(round(num_epochs * num_prompts / groups_per_step, 9)))
