"""Reward functions from a user's own module, and rows that show how it is done."""

import asyncio
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from covey.environments.reward_functions.environment import (
    RewardFunction,
    RewardFunctions,
    RewardSettings,
    reward_functions,
)
from covey.system.workers.pool import WorkerSettings
from covey.types import Reward

HERE = RewardSettings(in_process=True)
ROW = {"prompt": "2+2=", "answer": 4}
CHAT = {"prompt": [{"role": "user", "content": "2+2?"}], "answer": 4}


def length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(text)) for text in completions]


USER_MODULE = """
    import asyncio

    def exact(prompts, completions, answer, **kwargs):
        return [float(text == str(right)) for text, right in zip(completions, answer, strict=True)]

    async def judge(completions, **kwargs):
        await asyncio.sleep(0.01)
        return [0.5 for _ in completions]

    class Length:
        def __call__(self, completions, **kwargs):
            return [len(text) for text in completions]

    length = Length()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_rewards.py").write_text(textwrap.dedent(USER_MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "users_rewards", raising=False)
    return "users_rewards"


def test_functions_of_the_current_directory_run_in_workers(module: str) -> None:
    functions = reward_functions([f"{module}:exact", f"{module}:judge", f"{module}:length"])
    made = RewardFunctions({"train": [ROW], "test": []}, functions, RewardSettings(WorkerSettings(timeout=10.0)))
    scores = asyncio.run(made.score(made.prompts("train")[0], ["4", "55"]))
    made.close()
    assert scores == [
        Reward(2.5, {"exact": 1.0, "judge": 0.5, "Length": 1.0}),
        Reward(2.5, {"exact": 0.0, "judge": 0.5, "Length": 2.0}),
    ]


def test_rows_with_completions_show_how_it_is_done() -> None:
    chat = {"prompt": CHAT["prompt"], "completion": [{"role": "assistant", "content": "four"}]}
    rows = {"train": [{"prompt": "a", "completion": "b"}, {"prompt": "c"}, chat], "test": [ROW]}
    made = RewardFunctions(rows, reward_functions([length]), HERE)
    assert [(prompt.id, text) for prompt, text in made.demonstrations("train")] == [
        ("train-0", "b"),
        ("train-2", "four"),
    ]
    with pytest.raises(ValueError, match="needs rows with a column 'completion', got none"):
        made.demonstrations("test")


def test_prompts_keep_their_order_and_have_unique_ids() -> None:
    rows = {"train": [ROW, ROW], "test": [CHAT]}
    made = RewardFunctions(rows, [RewardFunction("length", length)], HERE, prompt_column="prompt")
    ids = [prompt.id for split in ("train", "test") for prompt in made.prompts(split)]
    assert ids == ["train-0", "train-1", "test-0"]


def test_messages_of_a_data_frame_are_an_array_of_them() -> None:
    rows = {"train": [{"prompt": np.array(CHAT["prompt"], dtype=object)}], "test": []}
    made = RewardFunctions(rows, reward_functions([length]), HERE)
    assert made.prompts("train")[0].text == ({"role": "user", "content": "2+2?"},)
