"""Rewards of verdicts on covey's scale and on TorchRL's."""

from covey.types import Reward
from covey_graders.tags import first_block


def graded(is_right: bool, has_form: bool, format_reward: float) -> Reward:
    """Return 1 for the right answer, `format_reward` for the form alone."""
    value = 1.0 if is_right else format_reward * has_form
    return Reward(value, {"correct": float(is_right), "format": float(has_form)})


def torchrl_reward(completion: str, is_right: bool) -> Reward:
    """Apply TorchRL's scale (pytorch/rl ae9719f1): 1 right, 0.1 wrong, 0 without block."""
    answered, thought = first_block(completion, "answer") != "", first_block(completion, "think") != ""
    right = answered and is_right
    value = 1.0 if right else 0.1 if answered else 0.0
    return Reward(value, {"correct": float(right), "answer": float(answered), "think": float(thought)})
