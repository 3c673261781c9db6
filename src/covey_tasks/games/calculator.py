"""Compute a product and a sum with a one-operation calculator.

With three digits to a number a policy of a million parameters cannot do it in the head: the last digits alone are
within its reach.
"""

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from covey.environments.base import Demonstration, Split
from covey.types import Prompt
from covey_tasks.games.game import END, NOT_UNDERSTOOD, Game, MoveResult
from covey_tasks.games.settings import CalculatorConfig

_OPERATION = re.compile(r"C(\d{1,20})([*+-])(\d{1,20})" + END)
_ANSWER = re.compile(r"A(-?\d{1,40})" + END)


class Calculator(Game):
    """Environment of `a*b+c=`: `C12*34;` asks the calculator, `A408;` answers.

    >>> Calculator(CalculatorConfig(num_train=1, num_test=1)).outcome({"answer": 408}, ["C12*34;"], seed=0).reply
    '408'
    """

    def __init__(self, settings: CalculatorConfig) -> None:
        self._settings = settings
        counts: dict[Split, int] = {"test": settings.num_test, "train": settings.num_train}
        super().__init__(_problems(settings, counts), 4, settings)

    def outcome(self, columns: Mapping[str, Any], moves: Sequence[str], seed: int) -> MoveResult:
        state = f"{sum(_OPERATION.fullmatch(move) is not None for move in moves)} used"
        if answer := _ANSWER.fullmatch(moves[-1]):
            return MoveResult("", is_done=True, is_won=int(answer[1]) == columns["answer"], state="answered")
        if asked := _OPERATION.fullmatch(moves[-1]):
            value = str(calculated(int(asked[1]), asked[2], int(asked[3])))
            if self._settings.shuffled:
                drawn = random.Random(f"{seed}/{len(moves)}")
                value = "".join(drawn.choice("0123456789") for _ in value)
            return MoveResult(value, state=state)
        return MoveResult(NOT_UNDERSTOOD, state=state, is_void=True)

    def move(self, columns: Mapping[str, Any], moves: Sequence[str], replies: Sequence[str]) -> str:
        known = dict(zip(moves, replies, strict=True))
        product = f"C{columns['a']}*{columns['b']}{END}"
        if product not in known:
            return product
        total = f"C{known[product]}+{columns['c']}{END}"
        return f"A{known[total]}{END}" if total in known else total

    def wrong_move(self, drawn: random.Random) -> str:
        first, second = (drawn.randrange(*_range(self._settings.digits)) for _ in range(2))
        return f"A{first}{END}" if drawn.random() < 0.5 else f"C{first}{drawn.choice('*+')}{second}{END}"

    def demonstrations(self, split: Split) -> list[Demonstration]:
        seed = self._settings.problem_seed
        return [self.demonstrated(prompt, f"{seed}/{prompt.id}") for prompt in self.prompts(split)]


def calculated(first: int, operator: str, second: int) -> int:
    """Return the result of one operation.

    >>> calculated(12, "*", 34)
    408
    """
    if operator == "*":
        return first * second
    return first + second if operator == "+" else first - second


def _range(digits: int) -> tuple[int, int]:
    return 10 ** (digits - 1), 10**digits


def _problems(settings: CalculatorConfig, counts: Mapping[Split, int]) -> dict[Split, list[Prompt]]:
    """Draw different problems, held-out ones first."""
    drawn = random.Random(f"calculator {settings.problem_seed}")
    low, high = _range(settings.digits)
    if 2 * sum(counts.values()) > (high - low) ** 3:
        raise ValueError(
            f"environment.digits={settings.digits} has {(high - low) ** 3} problems, too few to draw num_train="
            f"{settings.num_train} and num_test={settings.num_test}: set fewer, at most half of them together"
        )
    seen: set[tuple[int, int, int]] = set()
    found: dict[Split, list[Prompt]] = {}
    for split, count in counts.items():
        found[split] = []
        while len(found[split]) < count:
            a, b, c = (drawn.randrange(low, high) for _ in range(3))
            if (a, b, c) in seen:
                continue
            seen.add((a, b, c))
            columns = {"a": a, "b": b, "c": c, "answer": a * b + c}
            found[split].append(Prompt(f"{split}-{len(found[split])}", "calculator", f"{a}*{b}+{c}=", columns))
    return found
