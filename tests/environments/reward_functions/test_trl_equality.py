"""The ready-made rewards that TRL has too give the same floats."""

from collections.abc import Callable
from typing import Any

import pytest

from covey.rewards import CosineScaled, ReasoningAccuracy, Repetition, SoftOverlong, accuracy, think_format

trl = pytest.importorskip("trl.rewards", reason="compares with TRL: pip install trl")

TEXTS = [
    "<think>half</think> \\boxed{\\frac{1}{2}}",
    "<think>a third</think> \\boxed{\\frac{1}{3}}",
    "<think>",
    "<think></think>",
    "no tags, 0.5",
    " <think>late</think> \\boxed{0.5}",
    "<think>one <think>two</think> \\boxed{0.5}",
    "<think>a</think> b <think>c</think> $0.5$",
    "<think>a\nb</think>\n\nthe answer is $\\frac{1}{2}$",
    "<think>a</think></think>\\boxed{2}",
    "",
    "the the the the the the \\boxed{\\frac{1}{2}} the the the",
    "\\boxed{50\\%} and \\boxed{3}",
    "\\boxed{\\frac{1}{2}",
]
MESSAGES = [[{"role": "assistant", "content": text}] for text in TEXTS]
IDS = [[ord(character) for character in text] for text in TEXTS]
GOLDS = ["$\\frac{1}{2}$", "\\boxed{0.5}", "0.5", "", "the half"]
PAIRS: dict[str, tuple[Callable[..., Any], Callable[[], Callable[..., Any]]]] = {
    "accuracy": (accuracy, lambda: trl.accuracy_reward),
    "reasoning_accuracy": (ReasoningAccuracy(), lambda: trl.reasoning_accuracy_reward),
    "think_format": (think_format, lambda: trl.think_format_reward),
    "cosine_scaled": (CosineScaled(max_length=30), lambda: trl.get_cosine_scaled_reward(30)),
    "cosine_scaled with values": (
        CosineScaled(30, wrong_short=-9.0, wrong_long=-1.0, right_long=2.0, right_short=7.0),
        lambda: trl.get_cosine_scaled_reward(30, -9.0, -1.0, 2.0, 7.0),
    ),
    "repetition": (Repetition(), lambda: trl.get_repetition_penalty_reward()),
    "repetition with values": (Repetition(5, -0.3), lambda: trl.get_repetition_penalty_reward(5, -0.3)),
    "soft_overlong": (SoftOverlong(40, 30), lambda: trl.get_soft_overlong_punishment(40, 30)),
}


@pytest.mark.parametrize("gold", GOLDS)
@pytest.mark.parametrize("name", PAIRS)
def test_a_reward_equals_that_of_trl(name: str, gold: str) -> None:
    ours, theirs = PAIRS[name][0], PAIRS[name][1]()
    keywords = {"completions": MESSAGES, "completion_ids": IDS, "solution": [gold] * len(TEXTS)}
    expected = theirs(**keywords, log_extra=None)
    assert ours(**keywords, prompts=[[]] * len(TEXTS), trainer_state=None) == expected
    assert ours(**keywords | {"completions": TEXTS}) == expected
