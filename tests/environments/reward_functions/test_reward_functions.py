"""Users' reward functions: what they are called with, what they may return, and what happens when they misbehave."""

import asyncio
import functools
import math
import re
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from covey.environments.reward_functions.call import TrainerState
from covey.environments.reward_functions.call import check_values as judged_values
from covey.environments.reward_functions.environment import (
    RewardFailureRate,
    RewardFunctions,
    RewardSettings,
    reward_functions,
)
from covey.environments.reward_functions.settings import RewardFunctionsConfig
from covey.system.section import check_bounds
from covey.system.workers.pool import WorkerSettings
from covey.types import Failure, Reward

HERE = RewardSettings(in_process=True, max_failure_rate=1.0)
ROW = {"prompt": "2+2=", "answer": 4, "note": None}
CHAT = {"prompt": [{"role": "user", "content": "2+2?"}], "answer": 4}


def environment(*functions: Callable[..., Any], row: dict = ROW, **options: Any) -> RewardFunctions:
    rows = {"train": [row], "test": []}
    return RewardFunctions(rows, reward_functions(functions), options.pop("settings", HERE), **options)


def score(made: RewardFunctions, completions: Sequence[str]) -> list[Reward | Failure]:
    return asyncio.run(made.score(made.prompts("train")[0], completions))


def returning(values: Any) -> Callable[..., Any]:
    def fixed(**kwargs: Any) -> Any:
        return values

    return fixed


def reasons(scores: list[Reward | Failure]) -> list[str | None]:
    return [judged.reason if isinstance(judged, Failure) else None for judged in scores]


def length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(text)) for text in completions]


class Refusing:
    """An object that refuses to be asked for what it has not."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)


async def later(completions: list[str], **kwargs: Any) -> list[float]:
    await asyncio.sleep(0)
    return [float(len(text)) for text in completions]


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [self.factor * len(text) for text in completions]


class ScaledLater(Scaled):
    async def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [self.factor * len(text) for text in completions]


def weighted(completions: list[str], factor: float, **kwargs: Any) -> list[float]:
    return [factor * len(text) for text in completions]


class Recorder:
    """Keeps the keyword arguments of its calls."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **kwargs: Any) -> list[float]:
        self.calls.append(kwargs)
        return [0.0] * len(kwargs["completions"])


def test_a_text_prompt_comes_with_text_completions_and_every_column() -> None:
    recorder = Recorder()
    score(environment(recorder), ["4", "5"])
    (call,) = recorder.calls
    assert call.pop("trainer_state") == TrainerState(global_step=0, max_steps=1, epoch=0.0)
    assert callable(call.pop("log_extra"))
    assert callable(call.pop("log_metric"))
    columns = {"answer": [4, 4], "note": [None, None]}
    assert call == {"prompts": ["2+2=", "2+2="], "completions": ["4", "5"], **columns}


def test_a_conversation_comes_with_completions_that_are_messages() -> None:
    recorder = Recorder()
    score(environment(recorder, row=CHAT), ["4"])
    assert recorder.calls[0]["prompts"] == [[{"role": "user", "content": "2+2?"}]]
    assert recorder.calls[0]["completions"] == [[{"role": "assistant", "content": "4"}]]


def test_completion_ids_are_the_sampled_tokens_and_absent_where_they_are_not_known() -> None:
    recorder = Recorder()
    made = environment(recorder)
    asyncio.run(made.score_tokens(made.prompts("train")[0], ["4", "55"], [(52, 2), (53, 53, 2)]))
    assert recorder.calls[0]["completion_ids"] == [[52, 2], [53, 53, 2]]
    score(made, ["4"])
    assert "completion_ids" not in recorder.calls[1]


def test_parts_carry_the_weights_of_their_functions() -> None:
    made = RewardFunctions({"train": [ROW], "test": []}, reward_functions([picky, length], [1.0, 0.5]), HERE)
    assert made.part_weights == {"picky": 1.0, "length": 0.5}


def test_hidden_columns_stay_hidden_and_gaps_are_none() -> None:
    recorder = Recorder()
    rows = {"train": [{"prompt": "a", "completion": "x"}, {"prompt": "b", "hint": "h"}], "test": []}
    made = RewardFunctions(rows, reward_functions([recorder]), HERE)
    score(made, ["4"])
    assert "completion" not in recorder.calls[0]
    assert recorder.calls[0]["hint"] == [None]


def test_columns_are_those_of_all_rows_of_both_splits() -> None:
    recorder = Recorder()
    rows = {"train": [{"prompt": "a"}], "test": [{"prompt": "b", "hint": "h"}]}
    made = RewardFunctions(rows, reward_functions([recorder]), HERE)
    score(made, ["4", "5"])
    assert recorder.calls[0]["hint"] == [None, None]


def strict(completions: list[str], hint: list[str], **columns: Any) -> list[float]:
    return [float(text == wanted.strip()) for text, wanted in zip(completions, hint, strict=True)]


async def strict_later(completions: list[str], hint: list[str], **columns: Any) -> list[float]:
    return strict(completions, hint)


@pytest.mark.parametrize("function", [strict, strict_later])
def test_a_reward_that_raises_for_a_missing_column_does_not_apply(
    function: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    rows = {"train": [{"prompt": "a"}, {"prompt": "b", "hint": " 4 "}], "test": []}
    alone = RewardFunctions(rows, reward_functions([function]), HERE)
    assert score(alone, ["4", "5"]) == [Failure("no reward function applied")] * 2
    made = RewardFunctions(rows, reward_functions([function, length]), HERE)
    for _ in range(2):
        assert score(made, ["4", "55"]) == [Reward(1.0, {"length": 1.0}), Reward(2.0, {"length": 2.0})]
    said = rf'^reward function "{function.__name__}" raised AttributeError: .* \(test_reward_functions.py:\d+\): it'
    told = [text for text in caplog.messages if "raised" in text]
    assert [bool(re.match(said, text)) for text in told] == [True] * 2  # once in each environment
    assert [judged.value for judged in asyncio.run(made.score(made.prompts("train")[1], ["4", "5"]))] == [2.0, 1.0]  # type: ignore[union-attr]


def test_a_function_that_raises_over_a_value_fails() -> None:
    rows = {"train": [{"prompt": "a", "hint": 4}], "test": []}
    (found,) = reasons(score(RewardFunctions(rows, reward_functions([strict]), HERE), ["4"]))
    assert str(found).startswith('reward function "strict" raised AttributeError: ')


def test_a_continued_assistant_message_is_judged_from_its_begin() -> None:
    recorder = Recorder()
    begun = {"prompt": [*CHAT["prompt"], {"role": "assistant", "content": "<think>"}]}  # type: ignore[misc]
    score(environment(recorder, row=begun, prefill=True), ["4"])
    assert recorder.calls[0]["prompts"] == [CHAT["prompt"]]
    assert recorder.calls[0]["completions"] == [[{"role": "assistant", "content": "<think>4"}]]


def test_one_function_cannot_change_what_the_next_one_sees() -> None:
    def vandal(completions: list, completion_ids: list, **kwargs: Any) -> list[float]:
        values = [0.0] * len(completions)
        completions.clear()
        completion_ids[0].clear()
        return values

    def tokens(completion_ids: list, **kwargs: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    made = environment(vandal, length, tokens)
    scores = asyncio.run(made.score_tokens(made.prompts("train")[0], ["abc"], [[7, 2]]))
    assert scores == [Reward(5.0, {"vandal": 0.0, "length": 3.0, "tokens": 2.0})]


def test_every_completion_has_a_column_of_its_own_to_take_apart() -> None:
    lock = threading.Lock()  # nobody can copy it

    def empties(completions: list, tests: list, shared: list, **kwargs: Any) -> list[float]:
        assert all(own is lock for own in shared)
        return [float(sum(own.pop() for _ in range(len(own)))) for own in tests]

    made = environment(empties, row={**ROW, "tests": [1, 2], "shared": lock})
    for _ in range(2):
        assert score(made, ["a", "b"]) == [Reward(3.0, {"empties": 3.0})] * 2


@pytest.mark.parametrize(
    ("function", "name", "value"),
    [
        (length, "length", 3.0),
        (later, "later", 3.0),
        (functools.partial(weighted, factor=2.0), "weighted", 6.0),
        (functools.partial(later), "later", 3.0),
        (Scaled(2.0), "Scaled", 6.0),
        (ScaledLater(2.0), "ScaledLater", 6.0),
    ],
)
def test_all_kinds_of_callables_work_in_process(function: Callable[..., Any], name: str, value: float) -> None:
    assert score(environment(function), ["abc"]) == [Reward(value, {name: value})]


def test_rewards_are_weighted_sums_and_parts_are_not_weighted() -> None:
    functions = reward_functions([length, functools.partial(weighted, factor=10.0)], weights=[0.5, 2.0])
    made = RewardFunctions({"train": [ROW], "test": []}, functions, HERE)
    assert score(made, ["abc"]) == [Reward(0.5 * 3 + 2.0 * 30, {"length": 3.0, "weighted": 30.0})]


def test_two_functions_with_one_name_keep_apart() -> None:
    names = [reward.name for reward in reward_functions([length, length, later, length])]
    assert names == ["length", "length_2", "later", "length_3"]


@pytest.mark.parametrize("in_process", [True, False])
def test_an_object_whose_attributes_raise_is_a_reward_like_any_other(in_process: bool) -> None:
    made = environment(Refusing(), settings=RewardSettings(in_process=in_process))
    assert score(made, ["a", "b"]) == [Reward(1.0, {"Refusing": 1.0})] * 2


def test_none_means_does_not_apply() -> None:
    scores = score(environment(returning([None, 1.0, None]), length), ["a", "bb", "ccc"])
    assert scores[0] == Reward(1.0, {"length": 1.0})
    assert scores[1] == Reward(3.0, {"fixed": 1.0, "length": 2.0})


def test_where_nothing_applies_there_is_no_reward_and_it_is_nobodys_fault() -> None:
    made = environment(returning([None] * 25), settings=RewardSettings(in_process=True, max_failure_rate=0.0))
    assert score(made, ["a"] * 25) == [Failure("no reward function applied")] * 25


NOT_REWARDS = [
    (float("nan"), "returned nan for completion 1"),
    (float("inf"), "returned inf for completion 1"),
    (torch.tensor(float("nan")), "returned nan for completion 1"),
    ("1.0", "returned str '1.0' for completion 1"),
    (1e308, "returned 1e+308, beyond 3.4e+38, for completion 1"),
    (np.float64(-4e38), "returned -4e+38, beyond 3.4e+38, for completion 1"),
    (1j, "returned complex 1j for completion 1"),
    ([1.0], "returned list [1.0] for completion 1"),
    (10**400, "returned int 1000"),
]


@pytest.mark.parametrize(("value", "problem"), NOT_REWARDS, ids=range(len(NOT_REWARDS)))
def test_what_is_not_a_finite_real_number_fails_alone(value: Any, problem: str) -> None:
    scores = score(environment(returning([1.0, value, 2.0])), ["a", "b", "c"])
    assert scores[0] == Reward(1.0, {"fixed": 1.0})
    assert scores[2] == Reward(2.0, {"fixed": 2.0})
    assert judged_values([1.0, value, 2.0], 3)["values"] == [1.0, None, 2.0]
    assert isinstance(scores[1], Failure)
    assert scores[1].reason.startswith(f'reward function "fixed" {problem}')


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ([1.0], "returned 1 values for 3 completions"),
        ([], "returned 0 values for 3 completions"),
        ([1.0] * 4, "returned 4 values for 3 completions"),
        (1.0, "returned float 1.0, not a list of numbers"),
        (None, "returned NoneType None, not a list of numbers"),
        ("abc", "returned str 'abc', not a list of numbers"),
        ({0: 1.0, 1: 1.0, 2: 1.0}, "returned dict {0: 1.0, 1: 1.0, 2: 1.0}, not a list of numbers"),
        (torch.tensor(1.0), "returned Tensor tensor(1.), not a list of numbers"),
    ],
)
def test_a_wrong_number_of_values_is_never_spread(returned: Any, problem: str) -> None:
    scores = score(environment(returning(returned)), ["a", "b", "c"])
    assert reasons(scores) == [f'reward function "fixed" {problem}'] * 3


@pytest.mark.parametrize(
    "returned",
    [
        (1, 2.5),
        np.array([1.0, 2.5]),
        np.array([1.0, 2.5], dtype=np.float32),
        torch.tensor([1.0, 2.5]),
        [torch.tensor(1.0), np.float32(2.5)],
        [Fraction(1), np.float64(2.5)],
        [torch.tensor(True), np.array(2.5)],
        [np.int8(1), np.float16(2.5)],
    ],
)
def test_numbers_of_all_kinds_are_taken(returned: Any) -> None:
    scores = score(environment(returning(returned)), ["a", "b"])
    assert [judged.value for judged in scores if isinstance(judged, Reward)] == [1.0, 2.5]


@pytest.mark.parametrize(
    "returned",
    [
        [True, False],
        [np.bool_(True), np.bool_(False)],
        np.array([True, False]),
        torch.tensor([True, False]),
        [torch.tensor(True), torch.tensor(False)],
    ],
)
def test_what_is_true_is_worth_one_and_what_is_false_nothing(returned: Any) -> None:
    scores = score(environment(returning(returned)), ["a", "b"])
    assert scores == [Reward(1.0, {"fixed": 1.0}), Reward(0.0, {"fixed": 0.0})]
    assert [type(judged.value) for judged in scores if isinstance(judged, Reward)] == [float, float]


def test_a_weighted_sum_beyond_every_number_is_no_reward() -> None:
    made = RewardFunctions({"train": [ROW], "test": []}, reward_functions([returning([1e38])], [1e10]), HERE)
    assert reasons(score(made, ["a"])) == ["the weighted sum of the reward functions is 1e+48"]


def test_a_generator_is_as_good_as_a_list() -> None:
    def lazy(completions: list[str], **kwargs: Any) -> Any:
        return (float(len(text)) for text in completions)

    assert score(environment(lazy), ["abc"]) == [Reward(3.0, {"lazy": 3.0})]


def picky(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0 / len(text) for text in completions]


async def picky_later(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0 / len(text) for text in completions]


@pytest.mark.parametrize("function", [picky, picky_later])
def test_a_completion_that_makes_a_function_raise_fails_alone(function: Callable[..., Any]) -> None:
    scores = score(environment(function), ["a", "", "bb"])
    assert [judged.value for judged in scores if isinstance(judged, Reward)] == [1.0, 0.5]
    first, second, third = reasons(scores)
    place = r"\(test_reward_functions\.py:\d+\)"
    expected = (
        rf'reward function "{function.__name__}" raised ZeroDivisionError: float division by zero {place} for comp'
    )
    assert (first, third) == (None, None)
    assert re.match(expected, str(second))
    # Whatever functions before it say
    _, second = reasons(score(environment(length, function), ["a", ""]))
    assert re.match(expected, str(second))


def test_a_function_that_always_raises_fails_all() -> None:
    def broken(**kwargs: Any) -> list[float]:
        raise SystemExit(2)

    place = f"(test_reward_functions.py:{broken.__code__.co_firstlineno + 1})"
    assert reasons(score(environment(broken, length), ["a", "b"])) == [
        f'reward function "broken" raised SystemExit: 2 {place} for completion 0',
        f'reward function "broken" raised SystemExit: 2 {place} for completion 1',
    ]


def test_too_many_failures_stop_the_run_with_the_last_reason() -> None:
    made = environment(picky, settings=RewardSettings(in_process=True, max_failure_rate=0.1))
    score(made, [""] * 2 + ["a"] * 17)
    with pytest.raises(RewardFailureRate) as error:
        score(made, [""])
    assert str(error.value).startswith(
        "3 of the last 20 rewards failed (max_failure_rate=0.1); "
        'last: reward function "picky" raised ZeroDivisionError: float division by zero (test_reward_functions.py:'
    )


def test_failures_are_counted_among_the_last_thousand() -> None:
    def nothing_of_blank(completions: list[str], **kwargs: Any) -> list[float]:
        return [math.nan if text == "" else 1.0 for text in completions]

    made = environment(nothing_of_blank, settings=RewardSettings(in_process=True, max_failure_rate=0.1))
    score(made, ["a"] * 3000)
    with pytest.raises(RewardFailureRate, match=r"^150 of the last 1000 rewards failed"):
        score(made, [""] * 150)


def test_as_many_failures_as_are_allowed_do_not_stop_the_run() -> None:
    made = environment(picky, settings=RewardSettings(in_process=True, max_failure_rate=0.1))
    scores = score(made, [""] * 2 + ["a"] * 18)
    assert sum(isinstance(judged, Failure) for judged in scores) == 2


def test_logged_metrics_are_averaged_and_handed_out_once() -> None:
    def logging(completions: list[str], log_metric: Callable, log_extra: Callable, **kwargs: Any) -> list[float]:
        log_metric("length", len(completions[0]))
        log_extra("text", completions)
        return [0.0] * len(completions)

    made = environment(logging)
    score(made, ["a"])
    score(made, ["abc"])
    assert made.metrics() == {"length": 2.0}
    assert made.metrics() == {}


def anneal(completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
    return [trainer_state.global_step / trainer_state.max_steps + trainer_state.epoch] * len(completions)


@pytest.mark.parametrize("in_process", [True, False])
def test_functions_know_how_far_training_is(in_process: bool) -> None:
    settings = RewardSettings(WorkerSettings(num_workers=1), in_process)
    made = RewardFunctions({"train": [ROW], "test": []}, reward_functions([anneal]), settings)
    before = score(made, ["a"])
    made.follow(3, 12, 0.5)
    after = score(made, ["a"])
    made.close()
    assert (before, after) == ([Reward(0.0, {"anneal": 0.0})], [Reward(0.75, {"anneal": 0.75})])


def notes(completions: list[str], log_extra: Callable[..., None], **kwargs: Any) -> list[float]:
    log_extra("found", np.array([len(text) for text in completions]))
    log_extra("also", [{"text": text, "at": (float("nan"), None)} for text in completions])
    if any("!" in text for text in completions):
        raise ValueError("loud")
    return [1.0] * len(completions)


@pytest.mark.parametrize("in_process", [True, False])
def test_logged_columns_stay_with_their_completions(in_process: bool) -> None:
    settings = RewardSettings(WorkerSettings(num_workers=1), in_process, max_failure_rate=1.0)
    made = RewardFunctions({"train": [ROW], "test": []}, reward_functions([notes]), settings)
    found = score(made, ["a", "b!", "ccc"])
    made.close()
    assert [judged.extra if isinstance(judged, Reward) else None for judged in found] == [
        {"found": 1, "also": {"text": "a", "at": ["nan", None]}},
        None,
        {"found": 3, "also": {"text": "ccc", "at": ["nan", None]}},
    ]


def test_columns_of_several_functions_stay_beside_one_another() -> None:
    def logs(column: str) -> Callable[..., Any]:
        def logging(completions: list[str], log_extra: Callable[..., None], **kwargs: Any) -> list[float]:
            log_extra(column, completions)
            return [1.0] * len(completions)

        return logging

    (found,) = score(environment(logs("first"), logs("second")), ["a"])
    assert isinstance(found, Reward)
    assert found.extra == {"first": "a", "second": "a"}


def test_an_async_function_that_takes_too_long_fails() -> None:
    async def slow(completions: list[str], **kwargs: Any) -> list[float]:
        await asyncio.sleep(3)
        return [1.0] * len(completions)

    made = environment(slow, settings=RewardSettings(WorkerSettings(timeout=0.05), in_process=True))
    assert reasons(score(made, ["a", "b"])) == ['reward function "slow" took longer than 0.05 s'] * 2


def test_a_dry_run_counts_no_failure() -> None:
    made = environment(returning([math.nan] * 25), settings=RewardSettings(in_process=True, max_failure_rate=0.0))
    judge, prompt = made.dry_run(made.prompts("train")[0])
    for verdicts in (judge.score(prompt, ["a"] * 25), judge.score_tokens(prompt, ["a"] * 25, [[1]] * 25)):
        assert all(isinstance(verdict, Failure) for verdict in asyncio.run(verdicts))


def test_a_logged_column_of_another_length_is_an_error_with_its_place() -> None:
    def short(completions: list[str], log_extra: Callable[..., None], **kwargs: Any) -> list[float]:
        log_extra("found", ["a"] * 3)
        return [1.0] * len(completions)

    (found,) = reasons(score(environment(short), ["a"]))
    raised = "raised ValueError: log_extra('found') needs 1 values, one a completion, got 3 (test_reward_functions.py:"
    assert str(found).startswith(f'reward function "short" {raised}')


def test_weights_must_match_the_functions() -> None:
    with pytest.raises(ValueError, match="reward_weights must have one entry for each of 2 rewards, got 1"):
        reward_functions([length, later], [1.0])
    with pytest.raises(ValueError, match=r"reward_weights must be finite, got \[nan\]"):
        reward_functions([length], [math.nan])
    with pytest.raises(ValueError, match="needs rewards="):
        reward_functions([])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?"}, "train row 0 has no column 'prompt' (has: question)"),
        (
            {"prompt": None},
            "train row 0 has a prompt that must be text or a list of messages with role and content, got None",
        ),
        (
            {"prompt": 3},
            "train row 0 has a prompt that must be text or a list of messages with role and content, got 3",
        ),
        (
            {"prompt": [{"who": "human", "value": "?"}]},
            "train row 0 has a prompt that must be text or a list of messages",
        ),
        ({"prompt": ""}, "train row 0 has an empty prompt"),
        ({"prompt": []}, "train row 0 has an empty prompt"),
        ({"prompt": [{"role": "user", "content": " "}]}, "train row 0 has an empty prompt"),
        ({"prompt": [{"role": "user"}]}, "train row 0 has a prompt in which the user's message has no content"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "train row 0 has a prompt in which the user's message has content that is no text: [{'type': 'image'}]",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"text": 3}]}]},
            "train row 0 has a prompt in which the user's message has content that is no text: [{'text': 3}]",
        ),
        (
            {"prompt": [{"role": "usr", "content": "?"}]},
            "train row 0 has a prompt with the unknown role 'usr' (known: system, developer, user, assistant, tool)",
        ),
        (
            {"prompt": '[{"role": "user", "content": "?"}]'},
            "train row 0 has a prompt of text that spells a list of messages; give the list itself, as in JSON lines",
        ),
        (
            {"prompt": "[{'content': '?', 'role': 'user'}\n {'content': '4', 'role': 'assistant'}]"},
            "train row 0 has a prompt of text that spells a list of messages; give the list itself, as in JSON lines",
        ),
        (
            {"prompt": [*CHAT["prompt"], {"role": "assistant", "content": "4"}]},  # type: ignore[misc]
            "train row 0 has a prompt that ends with the assistant's message (data.answer_column=NAME moves it into a "
            "column, data.prefill=true has the policy continue it)",
        ),
        ({"prompt": '[{"a": ' + "[" * 100_000, "completions": 1}, "columns completions have names"),
        ({"prompt": "?", "completions": 1}, "columns completions have names that reward functions get as arguments"),
    ],
)
def test_rows_that_cannot_be_prompts_are_refused(row: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        environment(length, row=row)
    assert str(error.value).startswith(message)


def test_a_column_may_not_take_the_place_of_an_argument() -> None:
    with pytest.raises(ValueError, match=r"^rows have the column 'answer', which args of weighted set too; rename"):
        environment(functools.partial(weighted, factor=1.0, answer=3))


class Loads:
    """Says how often it was prepared."""

    def __init__(self) -> None:
        self.times = 0

    def prepare(self) -> None:
        self.times += 1

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [float(self.times)] * len(completions)


@pytest.mark.parametrize("in_process", [True, False])
def test_what_has_something_to_load_is_prepared_once_before_it_is_called(in_process: bool) -> None:
    settings = RewardSettings(WorkerSettings(num_workers=1), in_process)
    made = RewardFunctions({"train": [ROW], "test": []}, reward_functions([Loads()]), settings)
    found = [score(made, ["a", "b"]) for _ in range(2)]
    made.close()
    assert found == [[Reward(1.0, {"Loads": 1.0})] * 2] * 2


class Compares:
    needs_whole_groups = True

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        raise RuntimeError("the judge is away")


@pytest.mark.parametrize("function", [Compares(), functools.partial(Compares(), strictly=True)], ids=["plain", "args"])
def test_a_function_that_compares_is_not_asked_again_about_one_completion_alone(function: Callable[..., Any]) -> None:
    found = reasons(score(environment(function), ["a", "b"]))
    assert len(set(found)) == 1
    assert str(found[0]).startswith('reward function "Compares" raised RuntimeError: the judge is away (')
    assert "for completion" not in str(found[0])


def test_an_impossible_failure_rate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_failure_rate must be <= 1, got 1.5"):
        check_bounds(RewardFunctionsConfig(max_failure_rate=1.5))


def test_a_function_that_cannot_be_called_says_what_its_arguments_lack() -> None:
    def needs(completions: list[str], answer: list[int], note: list[None]) -> list[float]:
        return [0.0]

    async def lacks(completions: list[str], allowed: list[str], **columns: Any) -> list[float]:
        return [0.0]

    def fails(completions: list[str], **columns: Any) -> list[float]:
        return [1.0 + completions]  # type: ignore[operator]

    refused = {
        needs: "reward function \"needs\" cannot be called: it takes no argument 'prompts'; give it **columns",
        lacks: "reward function \"lacks\" cannot be called: rows have no column 'allowed' "
        "(besides the prompt they have: answer, note)",
    }
    for function, reason in refused.items():
        with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
            environment(function)
    (found,) = reasons(score(environment(fails), ["x"]))
    assert str(found).startswith('reward function "fails" raised TypeError: ')


def test_a_function_that_takes_text_for_messages_is_told_what_completions_are() -> None:
    def of_chats(completions: list[Any], **columns: Any) -> list[float]:
        return [float(len(chat[-1]["content"])) for chat in completions]

    (found,) = reasons(score(environment(of_chats), ["x"]))
    assert "string indices must be integers" in str(found)
    assert str(found).endswith(
        "completions are text where prompts are text, and messages where prompts are lists of messages"
    )
