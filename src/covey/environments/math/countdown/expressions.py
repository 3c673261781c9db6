"""Arithmetic expressions for Countdown: read without `eval`, written, and found by search.

Exact rational arithmetic; length, depth and digits are bounded, so that no expression can take long.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

OPERATORS = "+-*/"
MAX_LENGTH = 400
MAX_DEPTH = 50
MAX_DIGITS = 9
MAX_COMBINATIONS = 200_000
"""Steps after which the search gives up: enough for any five numbers."""

_SIGNS = str.maketrans(
    "\u00d7\u00b7\u22c5\u2217\u00f7\u2215\u2212\uff0b\uff0d\uff0a\uff0f\uff08\uff09", "****//-+-*/()"
)
_TOKEN = re.compile(rf"[0-9]{{1,{MAX_DIGITS}}}(?![0-9])|[-+*/()]")
_TOKENS = re.compile(rf"(?:\s*(?:{_TOKEN.pattern}))+")


@dataclass(frozen=True, slots=True)
class Expression:
    """What an expression comes to, and the numbers it is made of, in their order.

    >>> read_expression("(3 + 5) / 2")
    Expression(value=Fraction(4, 1), numbers=(3, 5, 2))
    """

    value: Fraction
    numbers: tuple[int, ...]


def read_expression(text: str) -> Expression | None:
    """Return the expression that the whole text is. None where it is none, divides by zero, or is too long or deep.

    Numbers are whole and not negative; + - * / and parentheses, the usual precedence, a sign before a number or
    parenthesis. No powers, no `//`, no decimal points, no product without a sign.
    """
    text = text.strip()
    if len(text) > MAX_LENGTH or not _TOKENS.fullmatch(text := text.translate(_SIGNS)):
        return None
    reader = _Reader(_TOKEN.findall(text))
    value = reader.sum()
    return Expression(value, tuple(reader.numbers)) if value is not None and reader.is_at_end() else None


class _Reader:
    """Recursive descent over tokens. Each method returns the value it has read, or None."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.numbers: list[int] = []
        self._tokens = tokens
        self._position = 0
        self._depth = 0

    def is_at_end(self) -> bool:
        return self._position == len(self._tokens)

    def _take(self, wanted: str) -> str:
        """Return the next token if it is one of `wanted`, else ""."""
        if self.is_at_end() or self._tokens[self._position] not in wanted:
            return ""
        self._position += 1
        return self._tokens[self._position - 1]

    def sum(self) -> Fraction | None:
        total = self._product()
        while total is not None and (sign := self._take("+-")):
            term = self._product()
            total = None if term is None else applied(total, sign, term)
        return total

    def _product(self) -> Fraction | None:
        total = self._signed()
        while total is not None and (sign := self._take("*/")):
            factor = self._signed()
            total = None if factor is None else applied(total, sign, factor)
        return total

    def _signed(self) -> Fraction | None:
        sign = self._take("+-")
        value = self._atom()
        return -value if value is not None and sign == "-" else value

    def _atom(self) -> Fraction | None:
        # A sum in brackets
        if self._take("("):
            self._depth += 1
            value = self.sum() if self._depth <= MAX_DEPTH else None
            self._depth -= 1
            return value if value is not None and self._take(")") else None
        # A number
        if self.is_at_end() or not self._tokens[self._position].isdigit():
            return None
        self.numbers.append(int(self._tokens[self._position]))
        self._position += 1
        return Fraction(self.numbers[-1])


def applied(left: Fraction, operator: str, right: Fraction) -> Fraction | None:
    """Compute `left operator right`. None for a division by zero."""
    if operator == "/":
        return left / right if right else None
    return left + right if operator == "+" else left - right if operator == "-" else left * right


# ------------------------------------------------------------------------------------------------ writing


@dataclass(frozen=True, slots=True)
class Term:
    """A written expression: its value, its text without outer parentheses, and how tightly it binds (1 sum .. 3)."""

    value: Fraction
    text: str
    binding: int = 3

    def inside(self, binding: int) -> str:
        """Return the text as an operand of something that binds so tightly."""
        return self.text if self.binding >= binding else f"({self.text})"


def joined(left: Term, operator: str, right: Term) -> Term | None:
    """Write `left operator right` with as few parentheses as can be. None for a division by zero."""
    value = applied(left.value, operator, right.value)
    if value is None:
        return None
    binding = 1 if operator in "+-" else 2
    text = f"{left.inside(binding)}{operator}{right.inside(binding + (operator in '-/'))}"
    return Term(value, text, binding)


def whole(number: int) -> Term:
    """Return a number as an expression."""
    return Term(Fraction(number), str(number))


# ------------------------------------------------------------------------------------------------ making and finding


def random_expression(numbers: Sequence[int], operators: Sequence[str], generator: random.Random) -> Term:
    """Join all numbers by random operators, `+` among them. Every intermediate value is a positive whole number."""
    terms = [whole(number) for number in numbers]
    while len(terms) > 1:
        first, second = generator.sample(range(len(terms)), 2)
        candidates = [made for operator in operators if (made := joined(terms[first], operator, terms[second]))]
        chosen = generator.choice([made for made in candidates if made.value > 0 and made.value.denominator == 1])
        terms = [term for index, term in enumerate(terms) if index not in (first, second)] + [chosen]
    return terms[0]


def find_expression(numbers: Sequence[int], target: int, uses_all: bool) -> str | None:
    """Find an expression of the numbers that reaches the target. None where there is none, or none is found in time.

    The order of the search is drawn from the problem itself, so the same problem has the same answer everywhere.
    """
    generator = random.Random(f"{list(numbers)} {target}")
    search = _Search(Fraction(target), uses_all, generator)
    return search.found([whole(number) for number in numbers])


class _Search:
    """Depth first over pairs to join. Sets of values that led nowhere are not tried again."""

    def __init__(self, target: Fraction, uses_all: bool, generator: random.Random) -> None:
        self._target = target
        self._uses_all = uses_all
        self._generator = generator
        self._hopeless: set[tuple[Fraction, ...]] = set()
        self._num_left = MAX_COMBINATIONS

    def found(self, terms: list[Term]) -> str | None:
        # One of the terms is the target
        if len(terms) == 1 or not self._uses_all:
            for term in terms:
                if term.value == self._target:
                    return term.text
        # The same numbers in another order are as hopeless
        key = tuple(sorted(term.value for term in terms))
        if len(terms) == 1 or key in self._hopeless:
            return None
        # Join two terms in every way
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
