"""Generated sums with an exact verifier.

Levels (the sizes are the number of different problems):

| level | problems              | example      | size   |
|-------|-----------------------|--------------|--------|
| 1     | one digit + one digit | 7+5=         | 100    |
| 2     | two digits + one      | 41+7=        | 900    |
| 3     | two digits + two      | 41+37=       | 8100   |
| 4     | two digits - two      | 41-57=       | 8100   |
| 5     | three digits + three  | 410+375=     | 810000 |
| 6     | three digits - three  | 410-375=     | 810000 |
| 7     | 2..9 * 2..9           | 7*8=         | 64     |
| 8     | 2..9 * two digits     | 7*85=        | 720    |
| 9     | three terms, + then - | 41+37-12=    | 729000 |
| 10    | product plus term     | 7*85+12=     | 64800  |
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from covey.environments.base import Environment, Split, conversation
from covey.system.lookup import one_of
from covey.types import CutText, Failure, Prompt, Reward
from covey_graders.math.judge import compare

_ONE = range(2, 10)
_DIGIT = range(10)
_TWO = range(10, 100)
_THREE = range(100, 1000)


@dataclass(frozen=True, slots=True)
class SumLevel:
    """Problems of one difficulty: operands joined by operators.

    >>> SumLevel((range(10, 100), range(10, 100)), "+").problem(0)
    ('10+10=', 20)
    """

    operands: tuple[range, ...]
    operators: str

    @property
    def size(self) -> int:
        return math.prod(len(operand) for operand in self.operands)

    def problem(self, index: int) -> tuple[str, int]:
        """Return text and answer of problem `index` in 0 .. size - 1."""
        values = []
        for operand in reversed(self.operands):
            index, choice = divmod(index, len(operand))
            values.append(operand[choice])
        values.reverse()
        text = str(values[0])
        total, product = 0, values[0]
        for operator, value in zip(self.operators, values[1:], strict=True):
            text += f"{operator}{value}"
            if operator == "*":
                product *= value
            else:
                total, product = total + product, value if operator == "+" else -value
        return f"{text}=", total + product


class Arithmetic(Environment):
    """Environment of generated sums, with reward 1 for the right integer.

    A question in full may be answered in words that state it.

    >>> Arithmetic(levels=[3]).prompts("train")[0]
    Prompt(id='train-0', environment='arithmetic', text='95+40=', columns={'answer': 135, 'level': 3})
    """

    def __init__(
        self,
        levels: Sequence[int] = (3,),
        num_train: int = 4096,
        num_test: int = 512,
        problem_seed: int = 0,
        style: str = "short",
    ) -> None:
        """Draw the problems. ValueError for unknown levels, styles or counts.

        A level that has fewer problems than its share of both splits gives each split a proportional part.
        """
        unknown = [level for level in levels if level not in LEVELS]
        if unknown or not levels or len(set(levels)) < len(levels):
            raise ValueError(f"levels must be different numbers of 1..{max(LEVELS)}, got {list(levels)}")
        if num_train < 1 or num_test < 1:
            raise ValueError(f"num_train and num_test must be >= 1, got {num_train} and {num_test}")
        problems: dict[Split, list[tuple[str, int, int]]] = {"train": [], "test": []}
        generator = random.Random(f"arithmetic {problem_seed}")
        for place, level in enumerate(levels):
            train, test = _share(num_train, len(levels), place), _share(num_test, len(levels), place)
            drawn, num_held_out = _draw(LEVELS[level], train, test, generator)
            labelled = [(*LEVELS[level].problem(index), level) for index in drawn]
            problems["test"] += labelled[:num_held_out]
            problems["train"] += labelled[num_held_out:]
        one_of("style", style, WORDS)
        self._prompts = {split: _prompts(split, found, generator, style) for split, found in problems.items()}

    def prompts(self, split: Split) -> list[Prompt]:
        return list(self._prompts[split])

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        judge = score if isinstance(prompt.text, str) else score_stated
        return [judge(completion, prompt.columns["answer"]) for completion in completions]

    def gold(self, prompt: Prompt) -> str:
        return str(prompt.columns["answer"])

    def difficulty(self, prompt: Prompt) -> int:
        return int(prompt.columns["level"])

    def demonstrations(self, split: Split) -> list[tuple[Prompt, str]]:
        return [(prompt, self.gold(prompt)) for prompt in self._prompts[split]]


def score(completion: str, answer: int) -> Reward:
    """Return 1 for the decimal integer alone: `078` is not `78`."""
    correct = float(completion.strip() == str(answer))
    return Reward(correct, {"correct": correct})


def score_stated(completion: str, answer: int) -> Reward:
    """Return 1 where a text states the integer."""
    correct = float(compare(completion, str(answer), is_cut=isinstance(completion, CutText)))
    return Reward(correct, {"correct": correct})


def _share(total: int, num_parts: int, place: int) -> int:
    return total // num_parts + (place < total % num_parts)


def _draw(level: SumLevel, num_train: int, num_test: int, generator: random.Random) -> tuple[list[int], int]:
    """Draw a level's problems in random order, held-out ones first."""
    wanted = num_train + num_test
    count = min(wanted, level.size)
    num_held_out = num_test if count == wanted else math.ceil(count * num_test / wanted)
    return generator.sample(range(level.size), count), num_held_out


def _prompts(
    split: Split, problems: list[tuple[str, int, int]], generator: random.Random, style: str
) -> tuple[Prompt, ...]:
    generator.shuffle(problems)
    said = WORDS[style]
    return tuple(
        Prompt(
            f"{split}-{index}",
            "arithmetic",
            text if said is None else conversation(said.format(sum=text.removesuffix("=")), ""),
            {"answer": answer, "level": level},
        )
        for index, (text, answer, level) in enumerate(problems)
    )


WORDS = {"short": None, "full": "What is {sum}? Answer with the number alone."}
"""Wording around a sum. `short` has the sum alone, for a policy that continues it."""


LEVELS = {
    1: SumLevel((_DIGIT, _DIGIT), "+"),
    2: SumLevel((_TWO, _DIGIT), "+"),
    3: SumLevel((_TWO, _TWO), "+"),
    4: SumLevel((_TWO, _TWO), "-"),
    5: SumLevel((_THREE, _THREE), "+"),
    6: SumLevel((_THREE, _THREE), "-"),
    7: SumLevel((_ONE, _ONE), "*"),
    8: SumLevel((_ONE, _TWO), "*"),
    9: SumLevel((_TWO, _TWO, _TWO), "+-"),
    10: SumLevel((_ONE, _TWO, _TWO), "*+"),
}
