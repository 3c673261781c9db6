"""Countdown: evaluate an arithmetic expression of given numbers without `eval`.

The rule is that of TinyZero (github.com/Jiayi-Pan/TinyZero): each number exactly once, + - * / and parentheses. Unlike
there, values are compared as fractions; `**`, `//` and decimal points are refused. Length, depth and digits are
bounded, so that no expression can take long.
"""

import ast
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from covey_graders.grade import Grade
from covey_graders.math.layout import boxed_answer
from covey_graders.math.reading.normalize import plain
from covey_graders.tags import visible

OPERATORS = "+-*/"
MAX_LENGTH = 400
MAX_DEPTH = 50
MAX_DIGITS = 9

_TOKEN = re.compile(rf"[0-9]{{1,{MAX_DIGITS}}}(?![0-9])|[-+*/()]")
_TOKENS = re.compile(rf"(?:\s*(?:{_TOKEN.pattern}))+")
_MIXED = re.compile(r"\d[\s{]*\\[a-z]*frac|[\u00bc-\u00be\u2150-\u215e]")
"""A mixed number, or a character that is a fraction."""
_TIMES = re.compile(r"(?<=[\d)]) [xX] (?=[\d(])")
_TWO_SIGNS = re.compile(r"(?:^|[-+*/(])[-+]{2}")
"""Two signs in front of one number or bracket."""
_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


@dataclass(frozen=True, slots=True)
class Expression:
    """The value of an expression, and its numbers in order.

    >>> read_expression("(3 + 5) / 2")
    Expression(value=Fraction(4, 1), numbers=(3, 5, 2))
    """

    value: Fraction
    numbers: tuple[int, ...]


def read_expression(text: str) -> Expression | None:
    """Read the whole text as an expression, None if invalid or too long.

    Numbers are whole and not negative; + - * / and parentheses, the usual precedence, a sign before a number or
    parenthesis, in plain text or LaTeX. No powers, no `//`, no decimal points, no product without a sign.
    """
    if len(text) > MAX_LENGTH or _MIXED.search(text):
        return None
    text = _TIMES.sub("*", plain(text)).strip("$ ")
    if len(text) > MAX_LENGTH or not _TOKENS.fullmatch(text):
        return None
    tokens = _TOKEN.findall(text)
    depth = max(accumulate((token == "(") - (token == ")") for token in tokens))
    if depth > MAX_DEPTH or _TWO_SIGNS.search("".join(tokens)):
        return None
    numbers = tuple(int(token) for token in tokens if token.isdigit())
    # With blanks between, `**` and `//` are two operators in a row
    written = re.sub(r"\d+", lambda number: str(int(number[0])), " ".join(tokens))
    try:
        value = _value(ast.parse(written, mode="eval").body)
    except SyntaxError:
        return None
    return None if value is None else Expression(value, numbers)


def _value(node: ast.expr) -> Fraction | None:
    """Compute a tree of numbers and operators, None where impossible."""
    match node:
        case ast.Constant(int(number)):
            return Fraction(number)
        case ast.UnaryOp(sign, operand):
            value = _value(operand)
            return -value if value is not None and isinstance(sign, ast.USub) else value
        case ast.BinOp(left, operator, right):
            one, other = _value(left), _value(right)
            return None if one is None or other is None else applied(one, _OPERATORS[type(operator)], other)
    return None


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
    """Return the last answer tag's content outside of thoughts, else a box's."""
    said = visible(completion)
    end = said.rfind("</answer>")
    begin = said.rfind("<answer>", 0, end) if end >= 0 else -1
    found = said[begin + len("<answer>") : end].strip() if begin >= 0 else said
    return boxed_answer(found) or (found if begin >= 0 else "")
