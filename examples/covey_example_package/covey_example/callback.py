"""End a run once its policy is good enough."""

from collections.abc import Callable

import covey
from covey.config.schema import Config


class GoodEnough(covey.Callback):
    """Ends a run when the mean reward of a step is above 0.95."""

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self._num_steps, self._say = config.num_steps, say

    def on_step(self, step: int, metrics: dict[str, float | None]) -> None:
        reward = metrics["reward_mean"] or 0.0
        metrics["example/short_of_enough"] = max(0.0, 0.95 - reward)  # logged like any other
        if reward > 0.95:
            self._say(f"good enough after {step} of {self._num_steps} steps")
            raise covey.StopTraining("the mean reward is above 0.95")
