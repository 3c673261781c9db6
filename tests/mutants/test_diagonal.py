"""Of a matrix of cases every value runs for each change, and the whole matrix at night."""

from itertools import product

from ..support.diagonal import diagonal

LARGE = [{"a": a, "b": b, "c": c} for a, b, c in product(range(4), range(3), range(2))]


def test_the_diagonal_of_a_matrix_has_every_value_in_few_cases() -> None:
    chosen = [LARGE[place] for place in diagonal(LARGE)]
    assert len(chosen) == 4
    assert all({case[axis] for case in chosen} == {case[axis] for case in LARGE} for axis in "abc")


def test_a_diagonal_of_pairs_has_any_two_values_together() -> None:
    chosen = [LARGE[place] for place in diagonal(LARGE, 2)]
    assert 12 <= len(chosen) <= 14
    pairs = [{(case[a], case[b]) for case in chosen} for a, b in ("ab", "bc", "ac")]
    assert list(map(len, pairs)) == [12, 6, 8]


def test_a_table_of_cases_keeps_them_all() -> None:
    table = [{"text": place, "value": place} for place in range(5)]
    assert diagonal(table) == [*range(5)]
