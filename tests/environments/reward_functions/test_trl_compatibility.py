"""The reward functions that TRL ships run unchanged and give the same floats as when TRL's trainer calls them."""

import asyncio
import inspect
import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from covey.environments.reward_functions.environment import RewardFunctions, RewardSettings, reward_functions
from covey.system.workers.pool import WorkerSettings
from covey.types import Failure, Reward
from covey_graders.math.symbolic import trl_accuracy

trl = pytest.importorskip("trl")
rewards = pytest.importorskip("trl.rewards")

COMPLETIONS = [
    "<think>half</think> \\boxed{\\frac{1}{2}}",
    "<think>a third</think> \\boxed{\\frac{1}{3}}",
    "no tags, 0.5",
    "<think>one <think>two</think> \\boxed{0.5}",
    "",
    "the the the the the the \\boxed{\\frac{1}{2}} the the the",
]
ROW = {"prompt": [{"role": "user", "content": "1/2?"}], "solution": "$\\frac{1}{2}$"}
UNREADABLE = {"prompt": [{"role": "user", "content": "?"}], "solution": ""}


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def by_trl(function: Callable[..., Any], row: dict) -> list[float | None]:
    """The call TRL's trainer makes, on the same completions."""
    count = len(COMPLETIONS)
    returned: list[float | None] = function(
        prompts=[row["prompt"]] * count,
        completions=[[{"role": "assistant", "content": text}] for text in COMPLETIONS],
        completion_ids=[encode(text) for text in COMPLETIONS],
        solution=[row["solution"]] * count,
        trainer_state=None,
        log_extra=lambda column, values: None,
        log_metric=lambda name, value: None,
    )
    return returned


def by_covey(function: Callable[..., Any], row: dict, in_process: bool = True) -> list[Reward | Failure]:
    settings = RewardSettings(WorkerSettings(num_workers=1, timeout=60.0), in_process, max_failure_rate=1.0)
    made = RewardFunctions({"train": [row], "test": []}, reward_functions([function]), settings)
    scores = asyncio.run(
        made.score_tokens(made.prompts("train")[0], COMPLETIONS, [encode(text) for text in COMPLETIONS])
    )
    made.close()
    return scores


FUNCTIONS = {
    "think_format_reward": lambda: rewards.think_format_reward,
    "accuracy_reward": lambda: rewards.accuracy_reward,
    "reasoning_accuracy_reward": lambda: rewards.reasoning_accuracy_reward,
    "soft_overlong_punishment_reward": lambda: rewards.get_soft_overlong_punishment(40, 30),
    "repetition_penalty_reward": lambda: rewards.get_repetition_penalty_reward(3, -1.0),
    "cosine_scaled_reward": lambda: rewards.get_cosine_scaled_reward(60),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_rewards_that_trl_ships_give_the_same_floats(name: str) -> None:
    function = FUNCTIONS[name]()
    expected = by_trl(function, ROW)
    assert len(set(expected)) > 1
    assert by_covey(function, ROW) == [Reward(value, {name: value}) for value in expected if value is not None]


@pytest.mark.parametrize("in_process", [True, False])
def test_columns_that_trls_rewards_log_are_kept_with_their_completions(in_process: bool) -> None:
    logged: dict[str, list[Any]] = {}
    chats = [[{"role": "assistant", "content": text}] for text in COMPLETIONS]
    rewards.accuracy_reward(
        completions=chats,
        solution=[ROW["solution"]] * len(chats),
        log_extra=lambda column, values: logged.update({column: values}),
    )
    assert set(logged) == {"solution", "gold_parsed", "answer_parsed"}
    found = by_covey(rewards.accuracy_reward, ROW, in_process=in_process)
    extras = [score.extra for score in found if isinstance(score, Reward)]
    assert {column: [extra[column] for extra in extras] for column in logged} == logged


def test_a_function_reads_of_the_training_what_trls_trainer_tells_it() -> None:
    state = transformers.TrainerState(global_step=0, max_steps=1, epoch=0.0)
    seen: list[Any] = []

    def reads(completions: list[Any], trainer_state: Any, **columns: Any) -> list[float]:
        seen.append(trainer_state)
        return [1.0] * len(completions)

    by_covey(reads, ROW)
    for name in ("global_step", "max_steps", "epoch"):
        assert operator.attrgetter(name)(seen[0]) == operator.attrgetter(name)(state)


@pytest.mark.long
def test_they_give_the_same_floats_in_a_worker_process() -> None:
    function = FUNCTIONS["cosine_scaled_reward"]()
    expected = by_trl(function, ROW)
    assert [score.value for score in by_covey(function, ROW, in_process=False) if isinstance(score, Reward)] == expected


def test_a_solution_that_trl_skips_gets_no_reward() -> None:
    function = FUNCTIONS["accuracy_reward"]()
    assert by_trl(function, UNREADABLE) == [None] * len(COMPLETIONS)
    assert by_covey(function, UNREADABLE) == [Failure("no reward function applied")] * len(COMPLETIONS)


def test_the_arguments_are_those_of_trls_trainer() -> None:
    """Compared with the names in the trainer's own source, so that a new argument there is noticed here."""
    source = (Path(inspect.getfile(trl)).parent / "trainer" / "grpo_trainer.py").read_text()
    seen: dict[str, Any] = {}

    def recording(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0] * len(kwargs["completions"])

    by_covey(recording, ROW)
    assert set(seen) == {
        *("prompts", "completions", "completion_ids", "solution", "trainer_state", "log_extra", "log_metric")
    }
    for name in ("trainer_state", "log_extra", "log_metric"):
        assert f'reward_kwargs["{name}"]' in source
    assert "prompts=prompts, completions=completions, completion_ids=completion_ids_list, **reward_kwargs" in source


@pytest.mark.long
@pytest.mark.shared
def test_our_copy_of_the_accuracy_reward_equals_the_installed_one(shared: Path) -> None:
    rows = [json.loads(line) for line in (shared / "data" / "math_answers.jsonl").read_text().splitlines()]
    completions = [[{"role": "assistant", "content": row["completion"]}] for row in rows]
    theirs = rewards.accuracy_reward(completions, [f"${row['gold']}$" for row in rows])
    assert [trl_accuracy(row["completion"], row["gold"]) for row in rows] == theirs
