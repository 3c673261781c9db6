"""Countdown: whether an arithmetic expression of given numbers comes to a target, read without `eval`.

The rule is that of TinyZero (github.com/Jiayi-Pan/TinyZero): each number exactly once, + - * / and parentheses. Unlike
there, values are compared as fractions; `**`, `//` and decimal points are refused. Length, depth and digits are
bounded, so that no expression can take long.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from covey_graders.grade import Grade
from covey_graders.tags import visible

OPERATORS = "+-*/"
MAX_LENGTH = 400
MAX_DEPTH = 50
MAX_DIGITS = 9

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


def grade(
    completion: str,
    numbers: Sequence[int],
    target: int,
    *,
    uses: str = "exactly",
    form: str = "tags",
    is_cut: bool = False,
) -> Grade:
    """Grade an expression of the numbers against the target.

    Args:
        uses: each number `exactly` once, or `at_most` once.
        form: the expression stands in the last answer tag (`tags`), or is the whole completion (`plain`).
        is_cut: the completion ran out of tokens; a plain expression may go on.
    """
    is_tagged = form == "tags"
    answer = find_expression(completion) if is_tagged else "" if is_cut else completion.strip()
    expression = read_expression(answer)
    has_form = answer != "" if is_tagged else expression is not None
    if expression is None or expression.value != target:
        return Grade(False, has_form)
    used, given = Counter(expression.numbers), Counter(numbers)
    return Grade(used == given if uses == "exactly" else used <= given, has_form)


def find_expression(completion: str) -> str:
    """Return the trimmed content of the last closed answer tag outside think tags. "" where there is none."""
    said = visible(completion)
    end = said.rfind("</answer>")
    begin = said.rfind("<answer>", 0, end) if end >= 0 else -1
    return said[begin + len("<answer>") : end].strip() if begin >= 0 else ""
