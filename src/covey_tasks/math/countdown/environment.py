"""Countdown: write an expression of given numbers that equals a target.

The rule is that of TinyZero (github.com/Jiayi-Pan/TinyZero): each number exactly once, + - * / and parentheses. Unlike
there, nothing is evaluated as code and values are compared as fractions; `**`, `//` and decimal points are refused.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.environments.base import Environment, Split, conversation
from covey.environments.data.columns import from_json
from covey.environments.data.rows import load_rows, row_settings
from covey.environments.settings import BuildSettings
from covey.types import CutText, Failure, Message, Prompt, Reward
from covey_graders import countdown
from covey_graders.countdown import OPERATORS
from covey_tasks.math.countdown.expressions import random_expression, search_expression
from covey_tasks.math.schemes import check_format_reward, graded
from covey_tasks.math.settings import CountdownConfig

Row = Mapping[str, Any]

MAX_NUMBERS = 6
MAX_MISSES = 3000
"""Most draws in a row without a new problem, and there are hardly any more: small ranges have few."""


def check_rules(settings: CountdownConfig) -> None:
    if settings.uses not in USES:
        raise ValueError(f"uses must be one of {', '.join(USES)}, got {settings.uses!r}")
    if settings.answer_form not in INSTRUCTIONS:
        raise ValueError(f"answer_form must be one of {', '.join(INSTRUCTIONS)}, got {settings.answer_form!r}")
    check_format_reward(settings.format_reward)


def check_problems(settings: CountdownConfig) -> None:
    sizes = settings.num_numbers
    if not sizes or len(set(sizes)) < len(sizes) or not all(2 <= size <= MAX_NUMBERS for size in sizes):
        raise ValueError(f"num_numbers must be different numbers of 2..{MAX_NUMBERS}, got {list(sizes)}")
    operators = tuple(settings.operators)
    if "+" not in operators or any(operator not in tuple(OPERATORS) for operator in operators):
        raise ValueError(f"operators must be some of {' '.join(OPERATORS)}, + among them, got {operators}")
    for name in ("num_train", "num_test", "max_number", "max_target"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be >= 1, got {getattr(settings, name)}")


@dataclass(frozen=True, slots=True)
class Problem:
    """Numbers, the target, and an expression that solves it.

    >>> Problem((3, 5, 7), 22, "3*5+7")
    """

    numbers: tuple[int, ...]
    target: int
    solution: str | None
    """None where it must be searched for first."""


class Countdown(Environment):
    """Environment of Countdown problems.

    >>> Countdown(generate(CountdownConfig())).prompts("train")[0].columns
    {'nums': [12, 17, 2], 'target': 46, 'solution': '12+2*17', 'level': 3}
    """

    def __init__(self, problems: Mapping[Split, Sequence[Problem]], settings: CountdownConfig | None = None) -> None:
        self._settings = settings or CountdownConfig()
        check_rules(self._settings)
        self._prompts = {
            split: tuple(
                _prompt(split, index, problem, self._settings) for index, problem in enumerate(problems[split])
            )
            for split in problems
        }

    def prompts(self, split: Split) -> list[Prompt]:
        return list(self._prompts[split])

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
        numbers, target = prompt.columns["nums"], prompt.columns["target"]
        return [score(completion, numbers, target, self._settings) for completion in completions]

    def difficulty(self, prompt: Prompt) -> int:
        return int(prompt.columns["level"])

    def gold(self, prompt: Prompt) -> str | None:
        columns = prompt.columns
        found = columns["solution"] or search_expression(
            columns["nums"], columns["target"], uses_all=self._settings.uses == "exactly"
        )
        return None if found is None else _write(found, columns["target"], self._settings.answer_form)

    def demonstrations(self, split: Split) -> list[tuple[Prompt, str]]:
        found = [(prompt, self.gold(prompt)) for prompt in self._prompts[split]]
        return [(prompt, answer) for prompt, answer in found if answer is not None]


def build_countdown(settings: CountdownConfig, config: BuildSettings) -> Environment:
    if config.data.path is None:
        return Countdown(generate(settings), settings)
    rows = load_rows(config.data.path, row_settings(config.data, ("nums", "target"), make=problem_of))
    return Countdown(rows.splits, settings)


def score(completion: str, numbers: Sequence[int], target: int, settings: CountdownConfig) -> Reward:
    """Return 1 for a right expression, `format_reward` for others in form."""
    is_cut = isinstance(completion, CutText)
    grade = countdown.grade(completion, numbers, target, uses=settings.uses, form=settings.answer_form, is_cut=is_cut)
    return graded(grade.is_right, grade.has_form, settings.format_reward)


def generate(settings: CountdownConfig) -> dict[Split, list[Problem]]:
    """Generate solvable problems from the seed, all distinct across both splits.

    A difficulty that has fewer problems than its share of both splits gives each split a proportional part.
    """
    check_problems(settings)
    generator = random.Random(f"countdown {settings.problem_seed}")
    splits: dict[Split, list[Problem]] = {"train": [], "test": []}
    for place, size in enumerate(settings.num_numbers):
        train, test = (
            _share(total, len(settings.num_numbers), place) for total in (settings.num_train, settings.num_test)
        )
        drawn = _draw(size, train + test, settings, generator)
        num_held_out = test if len(drawn) == train + test else math.ceil(len(drawn) * test / (train + test))
        splits["test"] += drawn[:num_held_out]
        splits["train"] += drawn[num_held_out:]
    for problems in splits.values():
        generator.shuffle(problems)
    return splits


def _share(total: int, num_parts: int, place: int) -> int:
    return total // num_parts + (place < total % num_parts)


def _draw(size: int, count: int, settings: CountdownConfig, generator: random.Random) -> list[Problem]:
    found: dict[tuple[tuple[int, ...], int], Problem] = {}
    num_misses = 0
    while len(found) < count and num_misses < MAX_MISSES:
        numbers = tuple(generator.randint(1, settings.max_number) for _ in range(size))
        made = random_expression(numbers, tuple(settings.operators), generator)
        key = tuple(sorted(numbers)), int(made.value)
        is_echo = key[1] in numbers  # one number alone would be a solution where numbers may be left over
        is_new = made.value <= settings.max_target and key not in found and not is_echo
        num_misses = 0 if is_new else num_misses + 1
        if is_new:
            found[key] = Problem(numbers, key[1], made.text)
    drawn = list(found.values())
    generator.shuffle(drawn)  # of few problems the likelier ones come first, and must not all be held out
    return drawn


def problem_of(row: Row) -> Problem:
    """Read a row's `nums` and `target`, as in Jiayi-Pan/Countdown-Tasks-3to4.

    Raises ValueError where they are no numbers.
    """
    numbers, target = from_json(row["nums"]), row["target"]
    is_list = isinstance(numbers, Sequence) and not isinstance(numbers, str)
    if not is_list or not all(type(number) is int and number >= 0 for number in numbers) or not numbers:
        raise ValueError(f"nums must be a list of whole numbers, got {numbers!r}")
    if type(target) is not int:
        raise ValueError(f"target must be a whole number, got {target!r}")
    return Problem(tuple(numbers), target, None)


def _prompt(split: Split, index: int, problem: Problem, settings: CountdownConfig) -> Prompt:
    columns = {
        "nums": list(problem.numbers),
        "target": problem.target,
        "solution": problem.solution,
        "level": len(problem.numbers),
    }
    return Prompt(f"{split}-{index}", "countdown", _ask(problem, settings), columns)


def _ask(problem: Problem, settings: CountdownConfig) -> str | tuple[Message, ...]:
    numbers = " ".join(map(str, problem.numbers))
    instruction = INSTRUCTIONS[settings.answer_form] if settings.instruction is None else settings.instruction
    if settings.answer_form == "plain" and not instruction:
        return f"{numbers} -> {problem.target}: "
    question = f"Numbers: {numbers}. Target: {problem.target}. {USES[settings.uses]}"
    return conversation(question, instruction)


def _write(expression: str, target: int, answer_form: str) -> str:
    if answer_form == "plain":
        return expression
    return f"<think>{expression}={target}</think>\n<answer>{expression}</answer>"


USES = {"exactly": "Use each number exactly once.", "at_most": "Use each number at most once."}
INSTRUCTIONS = {
    "tags": "Write an arithmetic expression of the given numbers, with + - * / and parentheses, that equals the "
    "target. Reason inside <think></think> tags, then write the expression alone inside <answer></answer> tags, for "
    "example: <think>3 * 5 = 15 and 15 + 7 = 22.</think> <answer>3*5+7</answer>",
    "plain": "",
}
