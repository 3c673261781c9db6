"""Parts of the verdict on a formula, one by one, in numbers."""

from decimal import Decimal
from fractions import Fraction

import pytest

from covey_graders.math.computed import is_respelled
from covey_graders.math.equal import same_formula, same_spelling
from covey_graders.math.formulas.values import _arcsine, _power, _root
from covey_graders.math.judge import _in_parts, compare, is_no_answer, precision_of


@pytest.mark.parametrize(
    ("gold", "expected"),
    [("3.1415927410125732", Fraction(1, 2**23)), ("3.141592653589793", Fraction(1, 10**14)), ("0.5", Fraction(0))],
)
def test_a_float_is_as_precise_as_its_type(gold: str, expected: Fraction) -> None:
    assert precision_of(gold) == expected


def test_odd_roots_of_negative_numbers_are_real_and_even_ones_are_not() -> None:
    assert _root(Fraction(-8), 3) == -2
    with pytest.raises(ValueError, match="not real"):
        _root(Fraction(-4), 2)


def test_the_arcsine_keeps_the_sign_at_the_ends() -> None:
    assert [round(_arcsine(Fraction(x)), 9) for x in (-1, 1)] == [Decimal("-1.570796327"), Decimal("1.570796327")]


def test_powers_are_exact_up_to_8000_bits() -> None:
    assert _power(Fraction(2), Fraction(8000)) == 2**8000
    assert isinstance(_power(Fraction(2), Fraction(8001)), Decimal)


def test_boxes_are_one_list_only_where_the_gold_has_as_many_members() -> None:
    boxes = "\\boxed{1}, \\boxed{2}"
    assert [_in_parts(boxes, gold) for gold in ("2, 1", "1, 2, 3", "1")] == [["1, 2"], [], []]


def test_either_of_two_equal_measures_may_be_the_wanted_one() -> None:
    assert [compare("#### 2 hours (120 minutes)", gold) for gold in ("2", "120", "3")] == [True, True, False]


def test_a_number_of_the_question_counts_in_the_spelling_that_is_asked_for() -> None:
    assert is_respelled("0.5", "0.5", "Write 0.5 as a decimal.")
    assert not is_respelled("0.5", "1/2", "Write 0.5 as a fraction.")


def test_nothing_is_the_spelling_of_nothing_and_no_placeholder_is_an_answer() -> None:
    assert not same_spelling("", "")
    for gold in ("none", "N/A", "", "nan", "?"):
        assert is_no_answer(gold)
        assert not compare(f"#### {gold}", gold)


def test_a_date_is_no_fraction() -> None:
    assert [same_formula(text, "12/25/2023") for text in ("12/25/2023", "24/50/2023")] == [True, False]
