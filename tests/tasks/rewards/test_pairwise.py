"""Pairwise rewards: win rates from a judge, its habits, and the advantage they come to."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from covey.algorithm.credit.advantages import group_center, group_zscore
from covey.algorithm.credit.scores import scores
from covey.environments.reward_functions.environment import RewardFunctions, RewardSettings, reward_functions
from covey.rewards import Pairwise
from covey.types import Failure

from ...golden.cases import check, read_cases


def larger(prompt: Any, first: str, second: str, **columns: Any) -> float:
    return (float(first) > float(second)) + 0.5 * (float(first) == float(second))


def bradley_terry(prompt: Any, first: str, second: str, **columns: Any) -> float:
    return 1 / (1 + math.exp((float(second) - float(first)) / 0.5))


async def larger_later(prompt: Any, first: str, second: str, **columns: Any) -> float:
    await asyncio.sleep(0)
    return larger(prompt, first, second)


def first_is_best(prompt: Any, first: str, second: str, **columns: Any) -> float:
    return 1.0


@pytest.mark.parametrize("judge", [larger, larger_later])
def test_the_reward_is_the_share_of_siblings_that_were_beaten(judge: Callable[..., Any]) -> None:
    rewards = Pairwise(judge)(prompts=["p"] * 4, completions=["3", "1", "2", "3"])
    assert rewards == pytest.approx([2.5 / 3, 0.0, 1 / 3, 2.5 / 3])


def test_groups_are_runs_of_equal_prompts_and_do_not_meet() -> None:
    prompts = ["a", "a", [{"role": "user", "content": "b"}], [{"role": "user", "content": "b"}], "a"]
    assert Pairwise(larger)(prompts=prompts, completions=["1", "2", "9", "8", "5"]) == [0.0, 1.0, 1.0, 0.0, 0.5]


def test_a_judge_that_prefers_what_it_reads_first_decides_nothing_and_is_found_out() -> None:
    logged: dict[str, float] = {}
    rewards = Pairwise(first_is_best)(["p"] * 3, ["a", "b", "c"], log_metric=logged.__setitem__)
    assert rewards == [0.5, 0.5, 0.5]
    assert logged == {"first_wins": 1.0}


def test_one_order_asks_half_as_often() -> None:
    asked = []

    def judge(prompt: Any, first: str, second: str, **columns: Any) -> float:
        asked.append(first + second)
        return larger(prompt, first, second)

    assert Pairwise(judge, both_orders=False)(["p"] * 3, ["2", "1", "3"]) == [0.5, 0.0, 1.0]
    assert asked == ["21", "23", "13"]
    asked.clear()
    Pairwise(judge)(["p"] * 3, ["2", "1", "3"])
    assert asked == ["21", "23", "12", "13", "32", "31"]


def test_a_judge_gets_the_prompt_both_texts_and_the_columns_of_the_row() -> None:
    seen = []

    def judge(prompt: Any, first: str, second: str, **columns: Any) -> float:
        seen.append((prompt, first, second, columns))
        return 1.0

    chat = [[{"role": "assistant", "content": text}] for text in ("x", "y")]
    Pairwise(judge, both_orders=False)(["p"] * 2, chat, rubric=["be kind"] * 2, completion_ids=[[1], [2]])
    assert seen == [("p", "x", "y", {"rubric": "be kind"})]


@pytest.mark.parametrize("outcome", [1.5, -0.1, float("nan"), None, "1"])
def test_an_outcome_that_is_no_probability_is_refused(outcome: Any) -> None:
    with pytest.raises(ValueError, match=r"^a judge must return a probability from 0 to 1, got "):
        Pairwise(lambda prompt, first, second: outcome)(["p", "p"], ["a", "b"])


def test_a_failing_judge_fails_the_group_without_half_points() -> None:
    def away(prompt: Any, first: str, second: str, **columns: Any) -> float:
        raise ConnectionError("no judge")

    settings = RewardSettings(in_process=True, max_failure_rate=1.0)
    made = RewardFunctions({"train": [{"prompt": "?"}], "test": []}, reward_functions([Pairwise(away)]), settings)
    found = asyncio.run(made.score(made.prompts("train")[0], ["a", "b"]))
    assert all(isinstance(judged, Failure) and "ConnectionError: no judge" in judged.reason for judged in found)


FORMS = {"win_rate": larger, "bradley_terry": bradley_terry}
POSTS = {"none": group_center, "group_zscore": group_zscore}


def test_with_a_group_baseline_it_is_the_pairwise_advantage() -> None:
    checked = 0
    for case in read_cases("adv_pairwise"):
        params, labels, values = case.params, case.inputs["groups"], case.inputs.get("rewards", [math.nan])
        are_runs = labels == sorted(labels, key=labels.index)
        if params["form"] not in FORMS or any(map(math.isnan, values)) or not are_runs:
            continue
        rewards = Pairwise(FORMS[params["form"]])(labels, [str(value) for value in values])
        options = {name: params[name] for name in ("ddof", "eps") if name in params}
        check(POSTS[params["post"]](scores(rewards, labels), **options), case, "advantages")
        checked += 1
    assert checked >= 15
