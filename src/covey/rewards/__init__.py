"""Ready-made reward functions of TRL's signature, to be named in `rewards`, and bridges to other trainers.

Each takes what it needs of `prompts`, `completions`, `completion_ids` and the columns of the rows, and returns a float
or None for each completion. Those with options are frozen dataclasses: `SoftOverlong(max_length=256, cache=64)`. They
run unchanged in TRL's GRPOTrainer. Nothing heavy is imported before a function needs it: worker processes start fast.
"""

from collections.abc import Callable
from typing import Any

from covey.rewards.bridges import compute_score, for_trl, trl_rows
from covey.rewards.lengths import Repetition, SoftOverlong
from covey.rewards.mathematics import CosineScaled, ReasoningAccuracy, accuracy
from covey.rewards.pairwise import Pairwise
from covey.rewards.reward_model import RewardModel
from covey.rewards.style import LengthPenalty, SentenceEnd, think_format

__all__ = [
    "REWARDS",
    "CosineScaled",
    "LengthPenalty",
    "Pairwise",
    "ReasoningAccuracy",
    "Repetition",
    "RewardModel",
    "SentenceEnd",
    "SoftOverlong",
    "accuracy",
    "compute_score",
    "for_trl",
    "think_format",
    "trl_rows",
]

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
