"""Countdown: write an expression of given numbers that equals a target.

The rule is that of TinyZero (github.com/Jiayi-Pan/TinyZero): each number exactly once, + - * / and parentheses. Unlike
there, nothing is evaluated as code and values are compared as fractions; `**`, `//` and decimal points are refused.
"""

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from typing import Any

from covey.environments.base import Environment, Split, conversation
from covey.environments.data.columns import VERLS, from_text, value_in
from covey.environments.data.rows import load_rows, row_settings
from covey.environments.settings import BuildSettings
from covey.system.section import check_bounds
from covey.types import CutText, Failure, Message, Prompt, Reward
from covey_graders import countdown
from covey_graders.countdown import OPERATORS, applied
from covey_tasks.math.schemes import graded
from covey_tasks.math.settings import CountdownConfig

Row = Mapping[str, Any]

MAX_NUMBERS = 6
MAX_MISSES = 3000
"""Most draws in a row without a new problem, and there are hardly any more: small ranges have few."""


def check_problems(settings: CountdownConfig) -> None:
    sizes = settings.num_numbers
    if not sizes or len(set(sizes)) < len(sizes) or not all(2 <= size <= MAX_NUMBERS for size in sizes):
        raise ValueError(f"num_numbers must be different numbers of 2..{MAX_NUMBERS}, got {list(sizes)}")
    operators = tuple(settings.operators)
    if "+" not in operators or any(operator not in tuple(OPERATORS) for operator in operators):
        raise ValueError(f"operators must be some of {' '.join(OPERATORS)}, + among them, got {operators}")


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
        check_bounds(self._settings)
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
    how = row_settings(config.data, ("nums", "target"), make=problem_of)
    rows = load_rows(config.data.path, replace(how, known=with_columns))
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
    check_bounds(settings)
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


def with_columns(row: Row) -> Row:
    """Return a row of verl, or with `numbers`, as one with `nums`."""
    truth = from_text(value_in(row, VERLS))
    row = {**row, **truth} if isinstance(truth, Mapping) else row
    return row if "numbers" not in row else {"nums": row["numbers"], **row}


def problem_of(row: Row) -> Problem:
    """Read a row's `nums` and `target`, as in Jiayi-Pan/Countdown-Tasks-3to4.

    Raises ValueError where they are no numbers.
    """
    given = from_text(row["nums"])
    found = [_whole(number) for number in given] if isinstance(given, list | tuple) else []
    numbers = tuple(number for number in found if number is not None and number >= 0)
    if len(numbers) < len(found) or not numbers:
        raise ValueError(f"nums must be a list of whole numbers, got {given!r}")
    target = _whole(row["target"])
    if target is None:
        raise ValueError(f"target must be a whole number, got {row['target']!r}")
    return Problem(numbers, target, None)


def _whole(value: Any) -> int | None:
    """Return a whole number, which tables may hold as text or fraction."""
    return int(float(value)) if re.fullmatch(r"-?\d{1,9}(?:\.0)?", str(value).strip()) else None


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


MAX_COMBINATIONS = 200_000
"""Steps after which the search gives up: enough for any five numbers."""


@dataclass(frozen=True, slots=True)
class Term:
    """An expression: value, text without outer parentheses, binding strength (1 to 3)."""

    value: Fraction
    text: str
    binding: int = 3

    def inside(self, binding: int) -> str:
        return self.text if self.binding >= binding else f"({self.text})"


def joined(left: Term, operator: str, right: Term) -> Term | None:
    """Write `left operator right` with few parentheses, None for division by zero."""
    value = applied(left.value, operator, right.value)
    if value is None:
        return None
    binding = 1 if operator in "+-" else 2
    text = f"{left.inside(binding)}{operator}{right.inside(binding + (operator in '-/'))}"
    return Term(value, text, binding)


def whole(number: int) -> Term:
    return Term(Fraction(number), str(number))


def random_expression(numbers: Sequence[int], operators: Sequence[str], generator: random.Random) -> Term:
    """Join all numbers by random operators, with positive whole intermediate values."""
    terms = [whole(number) for number in numbers]
    while len(terms) > 1:
        first, second = generator.sample(range(len(terms)), 2)
        candidates = [made for operator in operators if (made := joined(terms[first], operator, terms[second]))]
        chosen = generator.choice([made for made in candidates if made.value > 0 and made.value.denominator == 1])
        terms = [term for index, term in enumerate(terms) if index not in (first, second)] + [chosen]
    return terms[0]


def search_expression(numbers: Sequence[int], target: int, uses_all: bool) -> str | None:
    """Find an expression that reaches the target, None without one in time.

    The order of the search is drawn from the problem itself, so the same problem has the same answer everywhere.
    """
    generator = random.Random(f"{list(numbers)} {target}")
    search = _Search(Fraction(target), uses_all, generator)
    return search.found([whole(number) for number in numbers])


class _Search:
    """Searches pairs to join depth first, skipping failed sets of values."""

    def __init__(self, target: Fraction, uses_all: bool, generator: random.Random) -> None:
        self._target = target
        self._uses_all = uses_all
        self._generator = generator
        self._hopeless: set[tuple[Fraction, ...]] = set()
        self._num_left = MAX_COMBINATIONS

    def found(self, terms: list[Term]) -> str | None:
        if len(terms) == 1 or not self._uses_all:
            for term in terms:
                if term.value == self._target:
                    return term.text
        key = tuple(sorted(term.value for term in terms))
        if len(terms) == 1 or key in self._hopeless:
            return None
        for remaining in self._joinings(terms):
            answer = self.found(remaining)
            if answer is not None or self._num_left <= 0:
                return answer
        self._hopeless.add(key)
        return None

    def _joinings(self, terms: list[Term]) -> Iterator[list[Term]]:
        pairs = list(combinations(range(len(terms)), 2))
        self._generator.shuffle(pairs)
        for first, second in pairs:
            others = [term for index, term in enumerate(terms) if index not in (first, second)]
            for operator, left, right in _ways(terms[first], terms[second]):
                self._num_left -= 1
                made = joined(left, operator, right)
                if made is not None:
                    yield [*others, made]


def _ways(a: Term, b: Term) -> tuple[tuple[str, Term, Term], ...]:
    return (("+", a, b), ("*", a, b), ("-", a, b), ("-", b, a), ("/", a, b), ("/", b, a))
