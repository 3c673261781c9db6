"""Arithmetic expressions for Countdown: written, made at random, and found by search."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

from covey_graders.countdown import applied

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
