"""Ready-made reward functions, and bridges to other trainers.

Each takes what it needs of `prompts`, `completions`, `completion_ids` and the columns of the rows, and returns a float
or None for each completion. Those with options are frozen dataclasses: `SoftOverlong(max_length=256, cache=64)`. They
run unchanged in TRL's GRPOTrainer. Each is imported at its first use: worker processes start fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from covey.environments.reward_functions import specs

if TYPE_CHECKING:
    from covey_tasks.rewards.lengths import Repetition, SoftOverlong
    from covey_tasks.rewards.mathematics import CosineScaled, ReasoningAccuracy, accuracy
    from covey_tasks.rewards.pairwise import Pairwise
    from covey_tasks.rewards.reward_model import RewardModel
    from covey_tasks.rewards.style import LengthPenalty, SentenceEnd, think_format
    from covey_tasks.rewards.table import REWARDS
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
_HOMES = {name: module for module, name in (place.split(":") for place in specs.REWARDS.values())}
_HOMES |= {"REWARDS": "covey_tasks.rewards.table"} | dict.fromkeys(
    ("compute_score", "for_trl", "trl_rows"), "covey_trl.judges"
)


def __getattr__(name: str) -> Any:
    """Import a name at its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
