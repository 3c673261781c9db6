"""Made-up rows in the form of GSM8K and MATH: right, different, and read by the environments of those names."""

import asyncio
import re
from collections.abc import Sequence

import pytest

from covey.config.schema import Config
from covey.environments.base import Environment
from covey.environments.data.settings import DataConfig
from covey.types import Prompt, Reward
from covey_graders.math.judge import compare
from covey_tasks.math.countdown.environment import Countdown
from covey_tasks.math.generated import MATHEMATICS, WORD_PROBLEMS, mathematics, word_problems
from covey_tasks.math.gsm8k import GSM8K
from covey_tasks.math.mathematics import Mathematics
from covey_tasks.math.settings import CountdownConfig, Gsm8kConfig, MathConfig


@pytest.mark.parametrize(("make", "question"), [(word_problems, "question"), (mathematics, "problem")])
def test_rows_are_different_and_the_same_every_time(make: object, question: str) -> None:
    assert callable(make)
    splits = make()
    texts = [row[question] for rows in splits.values() for row in rows]
    assert (len(splits["train"]), len(splits["test"]), len(set(texts))) == (4096, 512, 4608)
    assert make() == splits


@pytest.mark.parametrize(
    ("environment", "kinds"),
    [(GSM8K(word_problems()), WORD_PROBLEMS), (Mathematics(mathematics()), MATHEMATICS)],
    ids=["gsm8k", "math"],
)
def test_every_worked_solution_scores_full_marks_and_every_level_is_there(environment: object, kinds: list) -> None:
    shown = environment.demonstrations("test")
    assert asyncio.run(values(environment, shown)) == {1.0}
    assert {environment.difficulty(prompt) for prompt, _ in shown} == {kind["level"] for kind in kinds}


async def values(environment: object, shown: Sequence[tuple[Prompt, str]]) -> set[float]:
    assert isinstance(environment, GSM8K | Mathematics)
    verdicts = [(await environment.score(prompt, [text]))[0] for prompt, text in shown]
    return {verdict.value for verdict in verdicts if isinstance(verdict, Reward)}


def test_word_problems_say_their_own_numbers_in_every_step() -> None:
    for row in word_problems()["test"]:
        steps, _, answer = row["answer"].partition("\n#### ")
        for step in steps.splitlines():
            left, _, right = step.partition("=")
            assert eval(left) == int(right)
        assert steps.endswith(f"={answer}")
        first, *rest = re.findall(r"\d+", row["question"])
        assert steps.startswith(first)
        assert all(number in steps for number in rest)


@pytest.mark.parametrize(("make", "question"), [(word_problems, "question"), (mathematics, "problem")])
def test_no_answer_is_a_number_of_its_question(make: object, question: str) -> None:
    assert callable(make)
    rows = [row for split in make().values() for row in split]
    copied = [row for row in rows if row["answer"].rpartition("#### ")[2] in re.findall(r"\d+", row[question])]
    assert copied == []


# ------------------------------------------------------------------------------------------------ builders


def built(settings: object, data: DataConfig | None = None) -> Environment:
    assert isinstance(settings, Gsm8kConfig | MathConfig | CountdownConfig)
    return settings.build(Config(environment=settings, data=data or DataConfig()), print)


@pytest.mark.long
def test_made_up_rows_are_named_by_data_path() -> None:
    words = built(Gsm8kConfig(instruction=""), DataConfig("covey_tasks.math.generated:word_problems"))
    algebra = built(MathConfig(scheme="values"), DataConfig("covey_tasks.math.generated:mathematics"))
    assert isinstance(words, GSM8K)
    assert isinstance(algebra, Mathematics)
    assert len(words.prompts("train")[0].text) == 1
    assert len(algebra.prompts("train")[0].text) == 2


def test_countdown_is_made_up_or_read_from_rows() -> None:
    made = built(CountdownConfig(num_numbers=[2, 4], num_train=30, num_test=10, operators=["+"], answer_form="plain"))
    assert isinstance(made, Countdown)
    assert [len(made.prompts(split)) for split in ("train", "test")] == [30, 10]
    assert {made.difficulty(prompt) for prompt in made.prompts("train")} == {2, 4}
    read = built(CountdownConfig(), DataConfig(f"{__name__}:targets"))
    assert read.prompts("test")[0].columns == {"nums": [4, 2], "target": 6, "solution": None, "level": 2}


def targets() -> dict[str, list[dict]]:
    return {split: [{"nums": [first, 2], "target": first + 2}] for split, first in (("train", 3), ("test", 4))}


@pytest.mark.long
def test_no_generated_row_is_solved_by_its_numbers_with_their_signs() -> None:
    for row in word_problems()["test"]:
        first, *steps = row["answer"].partition("\n#### ")[0].split("\n")
        sums = first.partition("=")[0] + "".join(step.partition("=")[0].lstrip("0123456789") for step in steps)
        assert compare(f"#### {sums}", row["answer"].rpartition(" ")[2]) is False
    for row in mathematics()["test"]:
        steps = row["solution"].partition("\n")[0]
        undone, _, done = steps.partition("=")
        assert boxed(row["answer"].replace(done, undone, 1), row) is False
        for formula in row["problem"].split("$")[1::2]:
            assert boxed(formula, row) is False


def boxed(formula: str, row: dict[str, str]) -> bool:
    return compare(f"\\boxed{{{formula}}}", row["answer"], row["problem"])
