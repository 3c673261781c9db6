"""Long arithmetic with a calculator tool, of recipe=tools."""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from covey.environments.base import Split, conversation
from covey.types import CutText
from covey_graders.tags import without_thoughts
from covey_tasks.games.calculator import calculated

DIGITS = 4
NUM_TRAIN, NUM_TEST = 4096, 512
_NUMBER = re.compile(r"-?\d[\d,]{0,40}")


def problems() -> dict[Split, list[Mapping[str, Any]]]:
    """Generate sums of two products of four-digit numbers; splits are disjoint.

    >>> problems()["train"][0]
    {'prompt': ({'role': 'user', 'content': 'What is 3714 * 7957 + 6148 * 4990? ...'},), 'answer': 60230818}
    """
    drawn = random.Random("long arithmetic")
    found: dict[str, Mapping[str, Any]] = {}
    while len(found) < NUM_TRAIN + NUM_TEST:
        a, b, c, d = (drawn.randrange(10 ** (DIGITS - 1), 10**DIGITS) for _ in range(4))
        asked = f"What is {a} * {b} + {c} * {d}? Use the calculator, then end with the number alone on the last line."
        found[asked] = {"prompt": conversation(asked, ""), "answer": a * b + c * d}
    rows = list(found.values())
    return {"test": rows[:NUM_TEST], "train": rows[NUM_TEST:]}


def calculate(left: int, operator: str, right: int) -> str:
    """Work out one operation on two whole numbers.

    Args:
        left: The first number.
        operator: One of +, - and *.
        right: The second number.
    """
    if operator not in ("+", "-", "*"):
        raise ValueError(f"operator must be one of + - *, got {operator!r:.20}")
    return str(calculated(left, operator, right))


def right_answer(completions: Sequence[Any], answer: Sequence[int], **columns: Any) -> list[float]:
    """Return 1 where the last line is the number alone, commas aside."""
    return [float(_last_number(completion) == right) for completion, right in zip(completions, answer, strict=True)]


def _last_number(completion: Any) -> int | None:
    """Return the number of the last line, None if there is more."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    if isinstance(text, CutText):
        return None
    line = without_thoughts(text).strip().rpartition("\n")[2].strip().rstrip(".").strip("*$ ")
    return int(line.replace(",", "")) if _NUMBER.fullmatch(line) else None
