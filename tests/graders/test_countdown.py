"""Countdown: an expression is read without evaluating anything as code."""

from fractions import Fraction

import pytest

from covey_graders.countdown import MAX_DEPTH, Expression, grade, read_expression
from covey_graders.grade import Grade


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("3*5+7", 22, (3, 5, 7)),
        (" ( 3 + 5 ) / 2 ", 4, (3, 5, 2)),
        ("8/(3-8/3)", 24, (8, 3, 8, 3)),
        ("1/3", Fraction(1, 3), (1, 3)),
        ("7-5-3", -1, (7, 5, 3)),
        ("16/4/2", 2, (16, 4, 2)),
        ("2+3*4", 14, (2, 3, 4)),
        ("-3+5", 2, (3, 5)),
        ("3*-(2+5)", -21, (3, 2, 5)),
        ("3\u00d75\u22127\u00f71", 8, (3, 5, 7, 1)),
        ("3\u00b75+7\u22c51\u22172\u22151", 29, (3, 5, 7, 1, 2, 1)),
        ("\uff083\uff0b5\uff09\uff0a7\uff0d1\uff0f1", 55, (3, 5, 7, 1, 1)),
        ("((7))", 7, (7,)),
        (r"3 \times (5+2)", 21, (3, 5, 2)),
        (r"$\frac{8}{3-\frac{8}{3}}$", 24, (8, 3, 8, 3)),
        (r"\(\left(3+5\right)\cdot 2 \div \dfrac{4}{2}\)", 8, (3, 5, 2, 4, 2)),
        ("3 x (5 \u2013 2)", 9, (3, 5, 2)),
        ("123456789", 123456789, (123456789,)),
    ],
)
def test_an_expression_is_read_exactly(text: str, value: Fraction | int, numbers: tuple[int, ...]) -> None:
    assert read_expression(text) == Expression(Fraction(value), numbers)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "+", "3+", "3 5", "3(5)", "(3)(5)", "(3+5", "3+5)", "()", "--3", "3++5+", "3**5", "7//2", "7%2"),
        *("3.5", ".5", "3,5", "3e5", "1_000", "0x10", "3=3", "3*5=15", "abs(3)", "x", "\u0663+1", "1\u00b2", "3+5;"),
        *(r"3\frac{1}{2}", "\u00bd*4", "3\u00bd", r"\sqrt{9}", r"3^{2}", r"3\cdot", r"5\%", r"\frac{1}", r"\text{two}"),
        *("1/0", "1/(2-2)", "1234567890", "__import__('os')", "3+5\x00", "3 + 5 # eight"),
        *("(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1), "1+" * 300 + "1", "9" * 1000),
    ],
)
def test_what_is_not_one_expression_is_not_read(text: str) -> None:
    assert read_expression(text) is None


def test_the_last_tag_is_graded_and_a_form_must_be_there() -> None:
    assert grade("<answer>1+2</answer> no: <answer>2+2</answer>", [2, 2], 4) == Grade(True, True)
    assert grade("<answer>x</answer>", [1], 1) == Grade(False, True)
    assert grade("1", [1], 1) == Grade(False, False)
    assert grade("1", [1], 2, form="plain") == Grade(False, True)
    assert grade("x", [1], 1, form="plain") == Grade(False, False)
