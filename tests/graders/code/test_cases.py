"""Test cases of a row's function, as calls."""

from typing import Any

import pytest

from covey_graders.code.cases import case_tests


@pytest.mark.parametrize(
    ("outputs", "also"), [([[3], [4]], [(3,), (4,)]), ([[3], [4, 5]], [(), ()]), ([[3], 4], [(), ()])]
)
def test_answers_are_boxed_only_where_all_are_lists_of_one(outputs: list[Any], also: list[tuple[int, ...]]) -> None:
    cases = [{"input": [number], "output": output} for number, output in enumerate(outputs)]
    assert [one.also for one in case_tests(cases, "f")] == also  # type: ignore[union-attr]
