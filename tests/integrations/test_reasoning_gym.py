"""Data sets of reasoning_gym, by a fake of their form."""

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from covey.types import Failure, Reward
from covey_integrations import reasoning_gym
from covey_integrations.reasoning_gym import WITHOUT_GOLD, ReasoningGym, answer_in

from ..support.tools import run


class Sums:
    """As a data set of reasoning_gym."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return {"question": f"{index % 5}+1=", "answer": str(index % 5 + 1), "metadata": {}}

    def score_answer(self, answer: str | None, entry: Mapping[str, Any]) -> float:
        if answer == "boom":
            raise RuntimeError("no such number")
        return {entry["answer"]: 1.0, "nan": float("nan")}.get(str(answer), 0.05)


def made(name: str = "sums", **settings: Any) -> ReasoningGym:
    return ReasoningGym(Sums(), name, {"train": 4, "test": 5}, **settings)


def test_splits_share_no_question() -> None:
    environment = made()
    train, test = environment.prompts("train"), environment.prompts("test")
    assert [prompt.columns["entry"]["question"] for prompt in train] == ["0+1=", "1+1=", "2+1=", "3+1="]
    assert [prompt.columns["entry"]["question"] for prompt in test] == ["4+1="]
    assert train[0].text == (
        {"role": "system", "content": "Give the answer between <answer> and </answer>."},
        {"role": "user", "content": "0+1="},
    )


def test_the_data_set_judges_what_stands_in_the_tags() -> None:
    environment = made()
    prompt = environment.prompts("train")[2]
    texts = ["<answer>9</answer> no, <answer> 3 </answer>", "3", "4", ""]
    verdicts = run(environment.score(prompt, texts))
    assert [verdict.value for verdict in verdicts if isinstance(verdict, Reward)] == [1.0, 1.0, 0.05, 0.05]


def test_an_answer_that_its_judge_breaks_on_is_worth_nothing() -> None:
    environment = made()
    verdicts = run(environment.score(environment.prompts("train")[0], ["boom", "nan"]))
    assert verdicts == [Reward(0.0, {"unreadable": 1.0})] * 2


def test_a_judge_that_hangs_fails_the_answer_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym, "SECONDS", 0.05)
    gate = threading.Event()

    class Hangs(Sums):
        def score_answer(self, answer: str | None, entry: Mapping[str, Any]) -> float:
            gate.wait(30)
            return 1.0

    environment = ReasoningGym(Hangs(), "sums", {"train": 4, "test": 5})
    verdicts = run(environment.score(environment.prompts("train")[0], ["1"]))
    gate.set()
    assert verdicts == [Failure("sums.score_answer took longer than 0.05 s")]


def test_gold_is_the_answer_where_the_data_set_accepts_it() -> None:
    prompt = made().prompts("train")[0]
    assert made().gold(prompt) == "<answer>1</answer>"
    assert run(made().score(prompt, ["<answer>1</answer>"])) == [Reward(1.0, {"unreadable": 0.0})]
    assert sorted(WITHOUT_GOLD) == ["boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"]
    assert {made(name).gold(prompt) for name in WITHOUT_GOLD} == {None}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        *(("", ""), ("<answer>", "<answer>"), ("<answer>a\nb</answer> c", "a\nb"), (" x ", "x")),
        *(("<think><answer>a</answer>?</think> b", "b"), ("<answer>a</answer><think><answer>b</answer>", "a")),
        ("<think><answer>a</answer>", ""),
    ],
)
def test_the_last_tags_hold_the_answer(text: str, answer: str) -> None:
    assert answer_in(text) == answer
