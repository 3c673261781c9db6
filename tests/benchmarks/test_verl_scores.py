"""How verl reads and spells answers."""

import json
from pathlib import Path

import pytest

from benchmarks.judges.verl import dapo_normalised, equals_as_dapo, equals_as_verl, verl_normalised


@pytest.mark.parametrize(
    ("written", "spelled"),
    [
        ("\\frac12", "\\frac{1}{2}"),
        ("\\dfrac1{72}", "\\frac{1}{72}"),
        ("\\tfrac{3}{4}", "\\frac{3}{4}"),
        ("3/4", "\\frac{3}{4}"),
        ("-3/4", "\\frac{-3}{4}"),
        ("03/4", "03/4"),
        ("3/4/5", "3/4/5"),
        ("x/4", "x/4"),
        ("0.5", "\\frac{1}{2}"),
        (".5", "\\frac{1}{2}"),
        ("\\sqrt3", "\\sqrt{3}"),
        ("x=5", "5"),
        ("abc=5", "abc=5"),
        ("y = 2 = 3", "y=2=3"),
        ("12\\text{ cm}", "12"),
        ("12\\text{cm}", "12\\text{cm}"),
        ("60^\\circ", "60"),
        ("60^{\\circ}", "60"),
        ("35\\%", "35"),
        ("\\$5", "5"),
        ("\\left(3,\\! 4\\right)", "(3,4)"),
        ("\\frac1", "\\frac1"),
        ("", ""),
    ],
)
def test_verl_spells_an_answer_so(written: str, spelled: str) -> None:
    assert verl_normalised(written) == spelled


@pytest.mark.parametrize("text", ["1\\text{ a}\\text{ b}", "2\\sqrt", "\\frac"])
def test_what_verl_cannot_take_apart_is_compared_as_it_stands(text: str) -> None:
    with pytest.raises(ValueError):
        verl_normalised(text)
    assert equals_as_verl(f"\\boxed{{{text}}}", text)
    assert not equals_as_verl(f"\\boxed{{ {text}}}", text)


@pytest.mark.parametrize(
    ("completion", "is_right"),
    [
        ("\\boxed{7} no \\boxed{8}", True),
        ("\\boxed{8} no \\boxed{7}", False),
        ("\\boxed{\\boxed{8}}", True),
        ("$\\boxed 8$ and \\boxed{7}", True),
        ("\\fbox{8}", False),
        ("\\boxed{8", False),
        ("\\boxed", False),
        ("8", False),
        ("", False),
    ],
)
def test_verl_reads_the_last_box_and_a_box_with_a_blank_before_all_others(completion: str, is_right: bool) -> None:
    assert equals_as_verl(completion, "8") == is_right


@pytest.mark.parametrize(
    ("written", "spelled"),
    [
        ("x = \\$1,250", "1250"),
        ("the 12 square units", "the12"),
        ("\\text{no}", "no"),
        ("\\frac12", "\\frac{1}{2}"),
        ("$\\sqrt3$ or so", "\\sqrt{3}"),
        ("\\boxed{42}", "42"),
        ("1.5,2", "1.5,2"),
        ("[INVALID]", "[INVALID]"),
    ],
)
def test_dapo_spells_an_answer_so(written: str, spelled: str) -> None:
    assert dapo_normalised(written) == spelled


def test_dapo_takes_the_last_answer_of_the_last_300_characters() -> None:
    assert equals_as_dapo("Answer: 41\nso ANSWER : 42", "42")
    assert not equals_as_dapo("Answer: 42\nAnswer: 41", "42")
    assert not equals_as_dapo("Answer: 42" + " " * 300, "42")
    assert not equals_as_dapo("42", "42")


@pytest.mark.shared
@pytest.mark.parametrize(
    ("column", "equals"), [("verl_math_boxed", equals_as_verl), ("verl_math_dapo", equals_as_dapo)]
)
def test_all_138_scores_equal_those_of_verl(shared: Path, column: str, equals: object) -> None:
    assert callable(equals)
    rows = [json.loads(line) for line in (shared / "data" / "math_answers.jsonl").read_text().splitlines()]
    different = [r["id"] for r in rows if equals(r["completion"], r["gold"]) != (r["external"][column] == 1.0)]
    assert (len(rows), different) == (138, [])
