"""How verl and TorchRL read and spell answers."""

import json
import time
from pathlib import Path

import pytest

from covey.environments.math.schemes import (
    boxed_answer,
    dapo_normalised,
    first_block,
    torchrl_reward,
    verl_dapo_reward,
    verl_normalised,
    verl_reward,
)


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
    assert verl_reward(f"\\boxed{{{text}}}", text).value == 1.0
    assert verl_reward(f"\\boxed{{ {text}}}", text).value == 0.0


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("\\boxed{7} no \\boxed{8}", 1.0),
        ("\\boxed{8} no \\boxed{7}", 0.0),
        ("\\boxed{\\boxed{8}}", 1.0),
        ("$\\boxed 8$ and \\boxed{7}", 1.0),
        ("\\fbox{8}", 0.0),
        ("\\boxed{8", 0.0),
        ("\\boxed", 0.0),
        ("8", 0.0),
        ("", 0.0),
    ],
)
def test_verl_reads_the_last_box_and_a_box_with_a_blank_before_all_others(completion: str, value: float) -> None:
    assert verl_reward(completion, "8").value == value


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


def test_dapo_takes_the_last_answer_of_the_last_300_characters_and_gives_one_or_minus_one() -> None:
    assert verl_dapo_reward("Answer: 41\nso ANSWER : 42", "42").value == 1.0
    assert verl_dapo_reward("Answer: 42\nAnswer: 41", "42").value == -1.0
    assert verl_dapo_reward("Answer: 42" + " " * 300, "42").value == -1.0
    assert verl_dapo_reward("42", "42").value == -1.0


def test_torchrl_pays_nothing_for_what_is_right_outside_of_an_answer_block() -> None:
    assert torchrl_reward("<think>2</think> 42", is_right=True).value == 0.0
    assert torchrl_reward("<answer>42</answer>", is_right=True).value == 1.0


def test_the_first_closed_block_counts_whatever_stands_around_it() -> None:
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


@pytest.mark.shared
@pytest.mark.parametrize(("column", "reward"), [("verl_math_boxed", verl_reward), ("verl_math_dapo", verl_dapo_reward)])
def test_all_138_scores_equal_those_of_verl(shared: Path, column: str, reward: object) -> None:
    assert callable(reward)
    rows = [json.loads(line) for line in (shared / "data" / "math_answers.jsonl").read_text().splitlines()]
    different = [r["id"] for r in rows if reward(r["completion"], r["gold"]).value != r["external"][column]]
    assert (len(rows), different) == (138, [])
