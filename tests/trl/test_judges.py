"""covey's environments as judges of TRL and verl: who is judged by what, and what happens without a verdict."""

import asyncio
import json
import logging
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from covey.environments.arithmetic import Arithmetic
from covey.environments.base import Split
from covey.environments.reward_functions.environment import RewardFunctions, RewardSettings, reward_functions
from covey.rewards import compute_score, for_trl, trl_rows
from covey.types import Failure, Prompt, Reward
from covey_sandbox import Limits
from covey_tasks import data_sources
from covey_tasks.code.environment import Code, code_limits
from covey_tasks.math.gsm8k import GSM8K
from tests.support.scripted import Scripted

SUMS = Arithmetic(levels=(1,), num_train=8, num_test=2)
WORDS = GSM8K({"train": [{"question": "6*7?", "answer": "6*7=42\n#### 42"}], "test": []})


def as_trl(reward: Any, rows: Sequence[dict], completions: Sequence[Any], **more: Any) -> list[float | None]:
    """The call TRL's trainer makes."""
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    hooks = {"trainer_state": None, "log_extra": None, "log_metric": more.pop("log_metric", None)}
    values: list[float | None] = reward(
        prompts=[row["prompt"] for row in rows], completions=list(completions), **columns, **more, **hooks
    )
    return values


def test_every_row_is_judged_by_the_prompt_it_came_from() -> None:
    rows = trl_rows(SUMS)
    answers = [str(prompt.columns["answer"]) for prompt in SUMS.prompts("train")]
    assert set(rows[0]) == {"prompt", "prompt_id"}
    assert as_trl(for_trl(SUMS), rows, answers) == [1.0] * 8
    assert as_trl(for_trl(SUMS), rows, [f"{answer}0" for answer in answers]) == [0.0] * 8
    assert as_trl(for_trl(SUMS), trl_rows(SUMS, "test")[:1], ["no"]) == [0.0]


def test_conversations_stay_conversations() -> None:
    (row,) = trl_rows(WORDS)
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    given = [[{"role": "assistant", "content": text}] for text in ("so\n#### 42", "so\n#### 41", "none")]
    assert as_trl(for_trl(WORDS), [row] * 3, given) == [1.0, 0.1, 0.0]


def test_completions_of_one_prompt_are_judged_in_one_call() -> None:
    calls: list[tuple[str, int]] = []

    class Compares:
        def prompts(self, split: Split) -> list[Prompt]:
            return [Prompt(f"{split}-{n}", "compares", "same text", {}) for n in range(2)]

        async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[Reward | Failure]:
            calls.append((prompt.id, len(completions)))
            return [Reward(float(len(text)), {}) for text in completions]

    first, second = trl_rows(Compares())
    assert as_trl(for_trl(Compares()), [first] * 2 + [second] * 3, ["a", "b", "cc", "d", "e"]) == [1, 1, 2, 1, 1]
    assert calls == [("train-0", 2), ("train-1", 3)]


def test_sampled_tokens_reach_an_environment_that_reads_them() -> None:
    rewards = reward_functions([{"function": "soft_overlong", "args": {"max_length": 4, "cache": 2}}])
    asked = {"train": [{"prompt": "?"}, {"prompt": "!"}], "test": []}
    made = RewardFunctions(asked, rewards, RewardSettings(in_process=True))
    first, second = trl_rows(made)
    for rows in ([first] * 2, [first, second]):
        assert as_trl(for_trl(made), rows, ["a", "b"], completion_ids=[[1], [1, 2, 3]]) == [0.0, -0.5]
    made.close()


def test_what_could_not_be_judged_is_none_and_said(caplog: pytest.LogCaptureFixture) -> None:
    broken = Scripted({"train": ["?"], "test": []}, lambda prompt, text: Failure("judge away") if text == "b" else 1.0)
    logged: dict[str, float] = {}
    with caplog.at_level(logging.WARNING):
        assert as_trl(for_trl(broken), trl_rows(broken) * 3, "abb", log_metric=logged.__setitem__) == [1.0, None, None]
    assert caplog.messages == ["scripted could not judge a completion: judge away"] * 2
    assert logged == {"scripted/unscored": 2.0}


def test_what_could_not_be_judged_is_an_error_in_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Scripted({"train": ["?"], "test": []}, lambda prompt, text: Failure("judge away"))
    judged = (broken, broken.prompts("train")[0])
    monkeypatch.setitem(data_sources.DATA_SOURCES, "away", lambda: lambda truth: judged)
    with pytest.raises(RuntimeError, match=r"^away could not judge a completion: judge away$"):
        compute_score("away", "4", "4")


def test_the_weight_of_some_of_the_tests_and_the_limits_are_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey_sandbox.Sandbox", lambda: SimpleNamespace(describe=dict))
    limits = {"timeout": 7.0, "total_seconds": 60.0, "cpu_seconds": 9, "memory_bytes": 1 << 30}
    made, _ = data_sources.judge_of("code", {"partial_weight": 0.2, **limits})(PROGRAM)
    assert isinstance(made, Code)
    assert made.settings.partial_weight == 0.2
    assert code_limits(made.settings) == Limits(7.0, 60.0, 9, 1 << 30)


def test_it_works_inside_an_event_loop() -> None:
    async def notebook() -> list[float | None]:
        return as_trl(for_trl(SUMS), trl_rows(SUMS)[:1], ["no"])

    assert asyncio.run(notebook()) == [0.0]


def test_rows_of_ones_own_are_judged_by_their_column() -> None:
    rows = [{"prompt": "?", "answer": "6*7=42\n#### 42"}, {"prompt": "?", "answer": "#### 7"}]
    reward = for_trl("openai/gsm8k", format_reward=0.2)
    assert reward.__name__ == "gsm8k"
    assert as_trl(reward, rows, ["\\boxed{42}", "\n#### 42"]) == [1.0, 0.2]
    assert as_trl(for_trl("arithmetic", gold="sum"), [{"prompt": "2+2=", "sum": 4}], ["4"]) == [1.0]


@pytest.mark.parametrize("judge", [SUMS, "arithmetic"])
def test_a_bridge_can_be_sent_to_another_process(judge: Any) -> None:
    """TRL's asynchronous trainer does that with all rewards."""
    reward = pickle.loads(pickle.dumps(for_trl(judge)))
    prompt = SUMS.prompts("train")[0]
    row = {**trl_rows(SUMS)[0], "answer": prompt.columns["answer"]}
    assert as_trl(reward, [row], [str(prompt.columns["answer"])]) == [1.0]


def test_rows_that_lead_nowhere_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^rows need a prompt_id of the environment \(trl_rows makes them\), got x$"):
        as_trl(for_trl(SUMS), [{"prompt": "?", "prompt_id": "x"}], ["1"])
    with pytest.raises(ValueError, match=r"^rows have no column 'answer' with the right answer \(has: gold\)$"):
        as_trl(for_trl("gsm8k"), [{"prompt": "?", "gold": "1"}], ["1"])
    with pytest.raises(ValueError, match=r"^for_trl takes settings beside the name of a data source, got scheme$"):
        for_trl(SUMS, scheme="trl")


def test_scores_go_by_the_name_of_the_data_source() -> None:
    assert compute_score("arithmetic", " 12 ", "12", {"split": "train", "index": 3}) == 1.0
    assert compute_score("openai/gsm8k", "so \\boxed{42}", "42") == 1.0
    assert compute_score("openai/gsm8k", "so \\boxed{42}", "42", None, scheme="verl_strict") == 0.0
    assert compute_score("openai/gsm8k", "#### 1,042", "1042", None, scheme="verl_strict") == 1.0


TESTS = ["assert double(2) == 4", "assert double(3) == 6"]
PROGRAM = {"prompt": "Double a number.", "entry_point": "double", "tests": TESTS}
COUNTDOWN = {"target": 22, "numbers": [3, 5, 7]}


@pytest.mark.parametrize(
    ("source", "truth", "right", "wrong", "rewards"),
    [
        ("math", "\\frac{1}{2}", "\\boxed{0.5}", "\\boxed{2}", (1.0, 0.1)),
        ("HuggingFaceH4/MATH-500", "(1, 2)", "it is \\boxed{(1,2)}", "(1, 2)!", (1.0, 0.0)),
        (
            "countdown",
            {"target": 22, "numbers": [3, 5, 7]},
            "<answer>3*5+7</answer>",
            "<answer>22</answer>",
            (1.0, 0.1),
        ),
        (
            "ifeval",
            {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
            "so it is",
            "so, it is",
            (1.0, 0.0),
        ),
        ("code", PROGRAM, "def double(n): return 2 * n", "def double(n): return 4", (1.0, 0.25)),
    ],
)
def test_every_environment_judges_for_verl(
    source: str, truth: Any, right: str, wrong: str, rewards: tuple[float, float]
) -> None:
    given = truth if isinstance(truth, str) else json.dumps(truth)
    assert (compute_score(source, right, truth), compute_score(source, wrong, given)) == rewards


def test_a_ground_truth_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^the ground truth must be a mapping, or one as text, got '\[1\]'$"):
        compute_score("countdown", "1", "[1]")
    with pytest.raises(ValueError, match=r"^the ground truth must be a mapping, or one as text, got '3, 4 -> 7'$"):
        compute_score("countdown", "<answer>3+4</answer>", "3, 4 -> 7")


@pytest.mark.parametrize(("source", "text"), [("math", "\\boxed{None}"), ("gsm8k", "#### 5"), ("countdown", "3+4")])
def test_nothing_is_judged_against_a_ground_truth_that_is_missing(source: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{source} cannot judge without a right answer: the ground truth is None$"):
        compute_score(source, text, None)
    with pytest.raises(ValueError, match="the ground truth is None"):
        for_trl(source)([""], [text], answer=[None])


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ("openai/gsm8", {}, "no data source 'openai/gsm8'; did you mean openai/gsm8k?; there is arithmetic, "),
        ("code", {"timeout": 30}, "total_seconds must be >= timeout=30.0, got 20.0"),
        ("gsm8k", {"schem": "trl"}, "settings must be among scheme, format_reward for gsm8k, got schem"),
        ("gsm8k", {"scheme": "mine"}, "scheme must be one of covey, values, verl_strict, "),
    ],
)
def test_a_source_or_setting_that_does_not_exist_is_one_line(source: str, settings: dict, message: str) -> None:
    with pytest.raises(ValueError) as error:
        compute_score(source, "1", "1", None, **settings)
    assert str(error.value).startswith(message)
