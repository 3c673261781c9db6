"""The preflight asks the grader a few wrong answers, and says where one is paid."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from covey.environments.arithmetic import Arithmetic
from covey.environments.reward_functions.environment import RewardFunctions, RewardSettings, reward_functions

from ..support.small import scripted
from .looked_at import Build, Golden, finding, subjects


@pytest.fixture(name="build")
def _build() -> Iterator[Build]:
    with subjects() as build:
        yield build


def test_a_sound_grader_pays_no_wrong_answer(build: Build) -> None:
    found = finding(build(Arithmetic(levels=[1, 2])), "wrong answers")
    assert found.values["num_paid"] == 0
    assert found.values["num_cases"] >= 6


def test_a_grader_that_pays_wrong_answers_is_told_and_the_run_begins(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    lenient = Golden(lambda prompt, text: float("12" in text), lambda prompt: "12")
    with caplog.at_level(logging.WARNING):
        found = finding(build(lenient), "wrong answers")
    assert found.passed
    assert found.values["num_paid"] >= 2
    assert "covey audit shows all" in caplog.text


def test_without_right_answers_nothing_is_asked(build: Build) -> None:
    assert not finding(build(scripted()), "wrong answers").applies


def by_length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def by_mention(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(gold in text) for text, gold in zip(completions, answer, strict=True)]


@pytest.mark.parametrize(("function", "is_told"), [(by_length, True), (by_mention, False)])
def test_a_reward_that_no_right_answer_changes_is_told(
    function: Callable[..., Any], is_told: bool, build: Build
) -> None:
    rows = [{"prompt": f"{n}+2=", "answer": str(n + 2)} for n in range(8)]
    settings = RewardSettings(in_process=True)
    environment = RewardFunctions({"train": rows, "test": rows[:1]}, reward_functions([function]), settings)
    found = finding(build(environment), "wrong answers")
    assert found.values["num_paid"] >= 1
    assert ("perhaps the reward does not read it" in found.figure) is is_told
