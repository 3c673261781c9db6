"""Ready-made reward functions, and bridges to other trainers.

Each takes what it needs of `prompts`, `completions`, `completion_ids` and the columns of the rows, and returns a float
or None for each completion. Those with options are frozen dataclasses: `SoftOverlong(max_length=256, cache=64)`. They
run unchanged in TRL's GRPOTrainer. Nothing heavy is imported before a function needs it: worker processes start fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from covey.environments.reward_functions.ready_made.lengths import Repetition, SoftOverlong
from covey.environments.reward_functions.ready_made.mathematics import CosineScaled, ReasoningAccuracy, accuracy
from covey.environments.reward_functions.ready_made.pairwise import Pairwise
from covey.environments.reward_functions.ready_made.reward_model import RewardModel
from covey.environments.reward_functions.ready_made.style import LengthPenalty, SentenceEnd, think_format
from covey.environments.reward_functions.ready_made.table import REWARDS

if TYPE_CHECKING:
    from covey_trl.judges import compute_score, for_trl, trl_rows

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


def __getattr__(name: str) -> Any:
    """Import a bridge to another trainer at its first use."""
    if name not in ("compute_score", "for_trl", "trl_rows"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("covey_trl.judges"), name)
