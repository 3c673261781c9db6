"""Rewards for right answers in LaTeX, graded by math-verify as in TRL.

The column `solution` holds the right answer; an unreadable one gives None. Time limits are TRL's, alarms that work in a
process's main thread, as in covey's workers: a late answer is wrong. Loops in C ignore alarms; environment=math
survives those too.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from covey.algorithm.credit import penalties
from covey.environments.reward_functions.texts import Completion, final_text
from covey_graders.math.symbolic import trl_verdict

PARSE_SECONDS = 10
VERIFY_SECONDS = 5


def accuracy(completions: Sequence[Completion], solution: Sequence[str | None], **columns: Any) -> list[float | None]:
    """Return 1 where the first box or LaTeX answer is the solution."""
    answers = [final_text(completion) for completion in completions]
    return [_verdict(answer, gold) for answer, gold in zip(answers, solution, strict=True)]


@dataclass(frozen=True)
class ReasoningAccuracy:
    """`accuracy` of the text after the reasoning, 0 if unclosed.

    The first of `delimiters` that occurs in the text decides; the text after its last occurrence is the answer.
    """

    __name__ = "reasoning_accuracy"

    delimiters: Sequence[str] = ("</think>",)

    def __call__(
        self, completions: Sequence[Completion], solution: Sequence[str | None], **columns: Any
    ) -> list[float | None]:
        texts = [final_text(completion) for completion in completions]
        return [self._value(text, gold) for text, gold in zip(texts, solution, strict=True)]

    def _value(self, text: str, gold: str | None) -> float | None:
        delimiter = next((found for found in self.delimiters if found in text), None)
        return 0.0 if delimiter is None else _verdict(text.rpartition(delimiter)[2], gold)


@dataclass(frozen=True)
class CosineScaled:
    """`accuracy` priced by length, along half a cosine (arXiv 2502.03373).

    Right answers fall from `right_short` to `right_long`; wrong ones rise from `wrong_short` to `wrong_long`, for
    there thinking longer is worth a try.
    """

    __name__ = "cosine_scaled"

    max_length: int
    wrong_short: float = -1.0
    wrong_long: float = -0.5
    right_long: float = 0.5
    right_short: float = 1.0

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(f"max_length must be >= 1, got {self.max_length}")

    def __call__(
        self,
        completions: Sequence[Completion],
        solution: Sequence[str | None],
        completion_ids: Sequence[Sequence[int]],
        **columns: Any,
    ) -> list[float | None]:
        verdicts = zip(accuracy(completions, solution), completion_ids, strict=True)
        return [None if right is None else self._value(right, len(ids)) for right, ids in verdicts]

    def _value(self, right: float, length: int) -> float:
        ends = (self.right_short, self.right_long) if right else (self.wrong_short, self.wrong_long)
        return penalties.cosine(length, self.max_length, *ends)


def _verdict(answer: str, gold: str | None) -> float | None:
    if gold is None:
        return None
    if threading.current_thread() is threading.main_thread():
        return trl_verdict(answer, gold, parse_seconds=PARSE_SECONDS, verify_seconds=VERIFY_SECONDS)
    return trl_verdict(answer, gold)
