"""The ready-made reward functions by name."""

from collections.abc import Callable
from typing import Any

from covey.environments.reward_functions import specs
from covey.system.lookup import resolve

REWARDS: dict[str, Callable[..., Any]] = {name: resolve(place, {}) for name, place in specs.REWARDS.items()}
"""Name of a ready-made reward to its function, or to the class that makes it."""
