"""From settings to an environment."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from covey.config.schema import Config
from covey.environments.base import SPLITS, adapt
from covey.environments.data.settings import DataConfig
from covey.environments.reward_functions.settings import RewardFunctionsConfig
from covey.environments.settings import ArithmeticConfig
from covey.types import Prompt
from covey_tasks.code.settings import CodeConfig
from covey_tasks.ifeval.settings import IfevalConfig
from covey_tasks.math.settings import CountdownConfig, Gsm8kConfig, MathConfig

QUESTIONS = {
    "train": {"question": "6 * 7?", "answer": "#### 42", "prompt": "6*7="},
    "test": {"question": "6 * 8?", "answer": "#### 48", "prompt": "6*8="},
}


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    for split, question in QUESTIONS.items():
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(question))
    return DataConfig(path=str(tmp_path))


def test_arithmetic_is_built_from_its_settings() -> None:
    settings = ArithmeticConfig(levels=[1], num_train=20, num_test=5, problem_seed=1)
    environment = settings.build(Config(), print)
    assert (len(environment.prompts("train")), len(environment.prompts("test"))) == (20, 5)


def test_gsm8k_reads_its_rows_from_data(data: DataConfig) -> None:
    environment = Gsm8kConfig(scheme="torchrl").build(Config(data=data), print)
    assert environment.prompts("train")[0].columns["gold"] == "42"


def test_reward_functions_take_their_rows_and_functions_from_the_top(data: DataConfig) -> None:
    config = Config(data=data, rewards=["sentence_end", "sentence_end"], reward_weights=[1.0, 0.5])
    environment = RewardFunctionsConfig(in_process=True).build(config, print)
    assert environment.prompts("test")[0].text == "6*8="
    with pytest.raises(ValueError, match="needs rewards="):
        RewardFunctionsConfig().build(Config(data=data), print)


def test_rows_that_lack_the_prompt_column_are_named(data: DataConfig) -> None:
    data.prompt_column = "text"
    config = Config(data=data, rewards=["sentence_end"])
    with pytest.raises(ValueError, match=r"train\.jsonl line 1 has no column 'text'"):
        RewardFunctionsConfig().build(config, print)


CODE = {"prompt": "Double it.", "entry_point": "f", "tests": "assert f(1) == 2"}
IFEVAL = {"prompt": "No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


@pytest.mark.parametrize(
    ("settings", "row", "broken", "problem"),
    [
        (CodeConfig(), CODE, {"tests": "assert f(1) =="}, "tests are not Python code"),
        (CodeConfig(), CODE, {"test_setup_code": 3}, "cannot be read (TypeError: sequence item 1: expected str "),
        (
            CodeConfig(),
            CODE,
            {"tests": [{"args": [1], "expected": 1, "tol": 3}]},
            'tol of a test must be {"rel": r, "abs": a}, got 3',
        ),
        (Gsm8kConfig(), {"question": "?", "answer": "#### 1"}, {"answer": "1"}, "answer must end in one '#### N'"),
        (Gsm8kConfig(), {"question": "?", "answer": "#### 1"}, {"answer": 1}, "column 'answer' must be text, got 1"),
        (
            Gsm8kConfig(),
            {"question": "?", "answer": "#### 1"},
            {"question": 3},
            "column 'question' must be text, got 3",
        ),
        (CodeConfig(), CODE, {"entry_point": 3}, "column 'entry_point' must name a function, got 3"),
        (MathConfig(), {"problem": "?", "answer": "1"}, {"problem": 3}, "column 'problem' must be text, got 3"),
        (MathConfig(), {"problem": "?", "answer": "1"}, {"answer": ""}, "column 'answer' is empty"),
        (CountdownConfig(), {"target": 3}, {"nums": "12"}, "nums must be a list of whole numbers"),
        (IfevalConfig(), IFEVAL, {"kwargs": []}, "a prompt needs at least one instruction, and kwargs for each"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line_or_skipped(
    settings: Any, row: dict[str, Any], broken: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    asked = ("prompt", "question", "problem")
    numbered = [row | dict.fromkeys(asked, f"No. {n}") | {"nums": [n, 2]} for n in range(4)]

    def built(rows: list[dict[str, Any]], bad_rows: str = "error") -> dict[str, list[Any]]:
        path.write_text("\n".join(map(json.dumps, rows)))
        made = settings.build(Config(data=DataConfig(path=str(path), bad_rows=bad_rows)), print)
        adapt(made).close()
        return {split: [(prompt.id, prompt.text) for prompt in made.prompts(split)] for split in SPLITS}

    with_broken = [*numbered[:2], numbered[2] | broken, numbered[3]]
    with pytest.raises(ValueError, match=re.escape(f"{path} line 3 {problem}")):
        built(with_broken)
    kept = built(with_broken, "skip")
    assert sorted(map(len, kept.values())) == [1, 2]
    assert kept == built([*numbered[:2], numbered[3]])


CHAT = [{"role": "user", "content": "6 * 7?"}]
ANSWER = {"role": "assistant", "content": "42"}


def prompts_of(rows: list[dict[str, Any]], folder: Path, **settings: Any) -> list[Prompt]:
    """The prompts of both splits of a file with these rows."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config(data=DataConfig(path=str(path), **settings), rewards=["sentence_end"])
    environment = RewardFunctionsConfig(in_process=True).build(config, print)
    return [*environment.prompts("train"), *environment.prompts("test")]


WITH_ANSWERS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"{n} + 1?"}, {**ANSWER, "content": f"{n + 1}"}]} for n in range(4)
]


def test_a_conversation_that_ends_with_the_answer_is_refused_by_its_line(tmp_path: Path) -> None:
    rows = [{"messages": CHAT}, *WITH_ANSWERS]
    with pytest.raises(ValueError) as refusal:
        prompts_of(rows, tmp_path, prompt_column="messages")
    assert str(refusal.value) == (
        f"{tmp_path}/rows.jsonl line 2 has a prompt that ends with the assistant's message (data.answer_column=NAME "
        "moves it into a column, data.prefill=true has the policy continue it); data.bad_rows=skip leaves such rows "
        "out"
    )


def test_the_answer_at_the_end_can_be_moved_into_a_column(tmp_path: Path) -> None:
    rows = [*WITH_ANSWERS, {"messages": CHAT}]
    found = prompts_of(rows, tmp_path, prompt_column="messages", answer_column="gold")
    asked = {prompt.text[0]["content"]: prompt for prompt in found}  # type: ignore[index]
    assert {question: prompt.columns["gold"] for question, prompt in asked.items()} == {
        **{f"{n} + 1?": f"{n + 1}" for n in range(4)},
        "6 * 7?": None,
    }
    assert {len(prompt.text) for prompt in found} == {1}


def test_answers_at_the_end_of_prompts_show_a_cold_start_how_it_is_done(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in WITH_ANSWERS))
    data = DataConfig(path=str(path), prompt_column="messages", answer_column="completion")
    environment = RewardFunctionsConfig(in_process=True).build(Config(data=data, rewards=["sentence_end"]), print)
    shown = {prompt.text[0]["content"]: text for prompt, text in environment.demonstrations("train")}  # type: ignore[index]
    assert shown.items() <= {f"{n} + 1?": f"{n + 1}" for n in range(4)}.items()
    assert len(shown) == 3


def test_conversations_that_end_with_an_instruction_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    instruction = {"role": "system", "content": "Say a number."}
    prompts_of([{"prompt": [instruction]}, {"prompt": [instruction, *CHAT]}, {"prompt": "1"}], tmp_path)
    (line,) = caplog.messages
    assert re.fullmatch(
        r"prompts that end with a system message, so that no user asks anything: 1, first: \w+-\d", line
    )


def test_equal_questions_with_other_answers_at_their_end_stay_in_one_split(tmp_path: Path) -> None:
    rows = [{"prompt": [*CHAT, {**ANSWER, "content": str(n)}]} for n in range(8)] + [{"prompt": "6 * 8?"}] * 2
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(path=str(path), answer_column="gold", test_fraction=0.2)
    environment = RewardFunctionsConfig(in_process=True).build(Config(data=data, rewards=["sentence_end"]), print)
    assert [len(environment.prompts(split)) for split in ("train", "test")] == [8, 2]


def test_a_prefill_stays_in_place_and_an_unneeded_row_setting_is_refused(tmp_path: Path) -> None:
    begun = [{"prompt": [*CHAT, {**ANSWER, "content": f"<think>{n}"}]} for n in range(4)]
    assert {prompt.text[-1]["role"] for prompt in prompts_of(begun, tmp_path, prefill=True)} == {"assistant"}  # type: ignore[index]
    plain = [{"prompt": f"{n} + 1?"} for n in range(4)]
    for settings in ({"prefill": True}, {"answer_column": "gold"}):
        with pytest.raises(ValueError, match="needs a conversation that ends with the assistant's message, got none"):
            prompts_of(plain, tmp_path, **settings)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": ""}, "has an empty prompt"),
        ({"prompt": None}, "column 'prompt' is null"),
        ({"prompt": [{"role": "human", "content": "?"}]}, "has a prompt with the unknown role 'human' (known: system,"),
        ({"prompt": [ANSWER]}, "has a prompt in which nobody speaks before the assistant's last message"),
        (
            {"prompt": [*CHAT, ANSWER], "gold": "1"},
            "has an answer at the end of its prompt and one in column 'gold'; na",
        ),
    ],
)
def test_what_is_no_prompt_is_named_by_its_line_or_skipped(row: dict[str, Any], problem: str, tmp_path: Path) -> None:
    rows = [{"prompt": "1"}, {"prompt": "2"}, row, {"prompt": [*CHAT, ANSWER]}]
    with pytest.raises(ValueError, match=re.escape(f"rows.jsonl line 3 {problem}")) as refusal:
        prompts_of(rows, tmp_path, answer_column="gold")
    assert str(refusal.value).endswith("; data.bad_rows=skip leaves such rows out")
    assert len(prompts_of(rows, tmp_path, answer_column="gold", bad_rows="skip")) == 3


def test_tool_messages_and_parts_of_text_and_nulls_of_tables_are_taken(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    messages = [*CHAT, call, {"role": "tool", "content": "42", "name": None}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "6 * "}, {"type": "text", "text": "8?"}]}]
    first, second = sorted(
        prompts_of([{"prompt": messages}, {"prompt": parts}], tmp_path), key=lambda prompt: -len(prompt.text)
    )
    assert first.text == (*CHAT, {**call, "content": ""}, {"role": "tool", "content": "42"})
    assert second.text == tuple(parts)


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, covey.environments; print({'torch', 'numpy', 'datasets'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
