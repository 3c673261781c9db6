"""Boxes and blocks of a completion."""

import time

import pytest

from covey_graders.math.layout import boxed_answer
from covey_graders.tags import first_block


def test_the_first_closed_block_counts_amid_any_text() -> None:
    assert first_block("<answer> 1 </answer><answer>2</answer>", "answer") == "1"
    assert first_block("<answer>1<answer>2</answer>", "answer") == "1<answer>2"
    assert first_block("</answer><answer>1", "answer") == ""
    began = time.process_time()
    assert first_block("<answer>" * 200_000, "answer") == ""
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("So $\\boxed{1}$, no, $\\boxed{\\frac{3}{4}}$.", "\\frac{3}{4}"),
        ("So $\\boxed 5$.", "5"),
        ("$\\fbox{\\{1,2\\}}$", "\\{1,2\\}"),
        ("\\boxed{}", None),
        ("\\boxed{1", None),
        ("no box", None),
    ],
)
def test_the_gold_of_a_worked_solution_is_its_last_box(solution: str, answer: str | None) -> None:
    assert boxed_answer(solution) == answer
