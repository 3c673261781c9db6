"""The same prompts before and after, and of several runs: which answers are compared, and of how many."""

from pathlib import Path
from typing import Any

import pytest

from covey.report.content import comparison, pairs_of
from covey.report.curves import prompts_of
from covey.report.read import RunFiles


def test_prompts_are_paired_by_their_id_and_those_that_were_lost_come_first() -> None:
    def answer(step: int, name: str, correct: bool) -> dict[str, Any]:
        own = {"prompt_id": name, "prompt": name, "completion": str(step), "reward": float(correct)}
        return {"step": step, "greedy": True, "correct": correct, **own}

    before = [answer(0, "a", True), answer(0, "b", False), answer(0, "c", True), answer(0, "gone", True)]
    run = RunFiles(Path("run"), answers=[*before, answer(5, "c", False), answer(5, "b", True), answer(5, "a", True)])
    found = pairs_of(run, 10_000)
    assert found["steps"] == [0, 5]
    assert found["counts"] == {"lost": 1, "gained": 1, "stayed wrong": 0, "stayed right": 1}
    assert [(row["id"], row["kind"]) for row in found["rows"]] == [
        ("c", "lost"),
        ("b", "gained"),
        ("a", "stayed right"),
    ]
    many = [
        answer(step, f"{right}{n}", right == (step == 0))
        for step in (0, 5)
        for n in range(9)
        for right in (True, False)
    ]
    kinds = [row["kind"] for row in pairs_of(RunFiles(Path("run"), answers=many), 10_000)["rows"]]
    assert kinds == ["lost"] * 9 + ["gained"] * 9


def test_runs_are_compared_prompt_by_prompt_and_by_the_settings_that_differ() -> None:
    def run(right: int, seed: int) -> RunFiles:
        answers = [
            {"step": step, "greedy": True, "prompt_id": str(k), "correct": k < right, "reward": float(k < right)}
            for step, right in ((0, 10), (9, right))
            for k in range(100)
        ]
        return RunFiles(Path("run"), {"seed": seed, "num_steps": 9}, answers=answers)

    found = comparison([run(40, 0), run(60, 1)])
    assert found["settings"] == [("seed", ["0", "1"])]
    (one,) = found["gains"]
    value, low, high = one["accuracy"]
    assert (one["num_prompts"], value) == (100, 0.2)
    assert 0.1 < low < 0.2 < high < 0.3


def test_prompts_of_equal_names_that_ask_for_something_else_are_not_compared() -> None:
    def answer(step: int, prompt: str, correct: bool) -> dict[str, Any]:
        own = {"prompt": prompt, "correct": correct, "reward": float(correct), "completion": "1"}
        return {"step": step, "greedy": True, "prompt_id": "test-0", **own}

    ends = [RunFiles(Path("run"), answers=[answer(9, prompt, prompt == "1+1=")]) for prompt in ("1+1=", "2+2=")]
    assert comparison(ends)["gains"][0]["num_prompts"] == 0
    resumed = RunFiles(Path("run"), answers=[answer(0, "1+1=", False), answer(9, "2+2=", True)])
    assert pairs_of(resumed, 10_000)["rows"] == []


@pytest.mark.parametrize(("kept", "number"), [([True, True, False], 2), ([True, True], 512)])
def test_the_interval_of_a_run_under_way_is_over_all_the_prompts_it_looks_at(kept: list[bool], number: int) -> None:
    answers = [{"step": 0, "greedy": greedy} for greedy in kept]
    run = RunFiles(Path("run"), {"evaluation.num_prompts": 512}, answers=answers)
    assert prompts_of(run) == number
