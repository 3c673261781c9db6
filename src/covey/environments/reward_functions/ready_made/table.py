"""The ready-made reward functions by name."""

from collections.abc import Callable
from typing import Any

from covey.environments.reward_functions.ready_made.lengths import Repetition, SoftOverlong
from covey.environments.reward_functions.ready_made.mathematics import CosineScaled, ReasoningAccuracy, accuracy
from covey.environments.reward_functions.ready_made.pairwise import Pairwise
from covey.environments.reward_functions.ready_made.reward_model import RewardModel
from covey.environments.reward_functions.ready_made.style import LengthPenalty, SentenceEnd, think_format

REWARDS: dict[str, Callable[..., Any]] = {
    "accuracy": accuracy,
    "reasoning_accuracy": ReasoningAccuracy,
    "cosine_scaled": CosineScaled,
    "think_format": think_format,
    "sentence_end": SentenceEnd,
    "length_penalty": LengthPenalty,
    "soft_overlong": SoftOverlong,
    "repetition": Repetition,
    "pairwise": Pairwise,
    "reward_model": RewardModel,
}
"""Name of a ready-made reward to its function, or to the class that makes it."""
