"""Ready-made reward functions, and bridges to other trainers.

Each takes what it needs of `prompts`, `completions`, `completion_ids` and the columns of the rows, and returns a float
or None for each completion. Those with options are frozen dataclasses: `SoftOverlong(max_length=256, cache=64)`. They
run unchanged in TRL's GRPOTrainer. Nothing heavy is imported before a function needs it: worker processes start fast.
"""

from covey.environments.reward_functions.bridges.trainers import compute_score, for_trl, trl_rows
from covey.environments.reward_functions.ready_made.lengths import Repetition, SoftOverlong
from covey.environments.reward_functions.ready_made.mathematics import CosineScaled, ReasoningAccuracy, accuracy
from covey.environments.reward_functions.ready_made.pairwise import Pairwise
from covey.environments.reward_functions.ready_made.reward_model import RewardModel
from covey.environments.reward_functions.ready_made.style import LengthPenalty, SentenceEnd, think_format
from covey.environments.reward_functions.ready_made.table import REWARDS

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
