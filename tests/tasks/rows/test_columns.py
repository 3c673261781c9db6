"""Columns of other people's rows: within others, as messages, as JSON text, and verl's."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from covey.config.schema import Config
from covey.environments.base import SPLITS, Environment
from covey.environments.data.columns import value_in
from covey.environments.data.rows import RowSettings, load_rows
from covey.environments.data.settings import DataConfig
from covey.environments.reward_functions.rows import PromptFormat
from covey_tasks.code.settings import CodeConfig
from covey_tasks.columns import as_question, text_in
from covey_tasks.ifeval.prompts import prompt_of
from covey_tasks.math.mathematics import gold_answers
from covey_tasks.math.settings import Gsm8kConfig, MathConfig

VERL: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is {} + 4?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "9"},
    "extra_info": {"split": "train", "index": 0, "answer": "5 + 4 = 9\n#### 9"},
}


def write(path: Path, *changes: dict[str, Any], count: int = 4) -> str:
    """Rows of verl's that ask different questions."""
    asked = [[{**message, "content": message["content"].format(i)} for message in VERL["prompt"]] for i in range(count)]
    lines = [json.dumps({**VERL, "prompt": prompt, **change}) for prompt in asked for change in changes or ({},)]
    path.write_text("\n".join(lines))
    return str(path)


def built(name: str, path: str, **settings: Any) -> Environment:
    kind = {"gsm8k": Gsm8kConfig, "math": MathConfig, "code": CodeConfig}[name]
    return kind(**settings).build(Config(data=DataConfig(path=path)), print)


def first(environment: Environment) -> Any:
    return environment.prompts("train")[0]


def asked(environment: Environment) -> str:
    return str(first(environment).text[-1]["content"])


def test_a_path_of_dots_leads_into_other_columns() -> None:
    row = {"a": {"b": {"c": 1}}, "a.b": "whole", "text": '{"b": [2]}', "none": None}
    assert value_in(row, "a.b.c") == 1
    assert value_in(row, "a.b") == "whole"
    assert value_in(row, "text.b") == [2]
    assert [value_in(row, name) for name in ("none", "none.b", "a.x", "x.y")] == [None] * 4


def test_messages_that_ask_one_question_are_its_text() -> None:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 * 7?"}
    assert text_in({"p": [system, user]}, "p") == "Be brief.\n\n6 * 7?"
    for other in ([user, {"role": "assistant", "content": "42"}], [], [{"role": "user"}], ["6 * 7?"]):
        with pytest.raises(ValueError, match="column 'p' must be text, got"):
            text_in({"p": other}, "p")


@pytest.mark.parametrize("truth", ["9", 9, "#### 9"])
def test_verls_rows_are_word_problems(tmp_path: Path, truth: Any) -> None:
    path = write(tmp_path / "rows.jsonl", {"reward_model": {"ground_truth": truth}})
    environment = built("gsm8k", path)
    assert first(environment).columns["gold"] == "9"
    assert asked(environment).startswith("What is ")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"problem_column": "prompt", "answer_column": "reward_model.ground_truth"},
        {"problem_column": "prompt", "answer_column": "answer"},
        {"problem_column": "prompt", "answer_column": "none", "solution_column": "extra_info.boxed"},
    ],
)
def test_verls_rows_are_problems_of_mathematics(tmp_path: Path, settings: dict[str, Any]) -> None:
    boxed = {"boxed": "It is \\boxed{9}."}
    environment = built("math", write(tmp_path / "rows.jsonl", {"extra_info": boxed}), **settings)
    assert first(environment).columns["gold"] == "9"
    assert first(environment).columns[settings.get("problem_column", "problem")] == asked(environment)


def test_a_nested_copy_in_json_text_is_read_as_the_mapping_it_was(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"reward_model": json.dumps(VERL["reward_model"])})
    assert first(built("math", path)).columns["gold"] == "9"


def test_verls_rows_are_programs_where_their_truth_is_tests(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"reward_model": {"ground_truth": ["assert add(1) == 5"]}})
    assert first(built("code", path)).columns["problem"].entry_point == "add"


def test_a_column_of_the_rows_own_is_not_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"answer": "7"}, count=2)
    assert {prompt.columns["gold"] for split in SPLITS for prompt in built("math", path).prompts(split)} == {"7"}


def test_null_answers_are_called_null(tmp_path: Path) -> None:
    row = {"problem": "1?", "answer": None, "solution": None}
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for _ in range(3)))
    with pytest.raises(ValueError, match="line 1 column 'answer' is empty and column 'solution' is empty; data"):
        built("math", str(tmp_path / "rows.jsonl"))


def test_repeated_prompts_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": f"{i % 20}?", "n": i} for i in range(25)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    load_rows(str(tmp_path / "rows.jsonl"), RowSettings(prompt_columns=("prompt",)))
    load_rows({"train": rows, "test": [{"prompt": "?"}]}, RowSettings(prompt_columns=("prompt",)))
    assert caplog.messages == ["split train: 5 of 25 rows repeat the prompt of another one, 20 prompts differ"] * 2


@pytest.mark.parametrize("kwargs", ["[{}]", ["{}"], [{}], "[null]"])
def test_lists_in_json_text_are_lists(kwargs: Any) -> None:
    row = {"prompt": "No commas.", "instruction_id_list": '["punctuation:no_comma"]', "kwargs": kwargs}
    assert prompt_of(row).columns["kwargs"] == [{}]


def test_what_is_no_list_is_said() -> None:
    row = {"prompt": "No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": "{}"}
    with pytest.raises(ValueError, match="column 'kwargs' must be a list"):
        prompt_of(row)


# ------------------------------------------------------------------------------------------------ multiple choice

CHOICES: dict[str, tuple[dict[str, Any], str]] = {
    "MMLU": ({"choices": ["3", "4", "5"], "answer": 1}, "(B) 4"),
    "MMLU as CSV": ({"choices": "['Rome', 'Paris']", "answer": "1"}, "(B) Paris"),
    "MMLU-Pro": ({"options": list("rstuvwxyz"), "answer": "I", "answer_index": 8}, "(I) z"),
    "ARC": ({"choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"}, "(B) y"),
    "HellaSwag": ({"endings": ["runs", "flies"], "label": "0"}, "(A) runs"),
    "MedQA": ({"options": {"A": "x", "B": "y"}, "answer": "y", "answer_idx": "B"}, "(B) y"),
    "MedQA, list": ({"options": [{"key": "A", "value": "x"}, {"key": "B", "value": "y"}], "answer": "B"}, "(B) y"),
    "AQuA": ({"options": ["A)21", "B)21.5"], "correct": "B"}, "(B) 21.5"),
    "MathQA": ({"options": "a ) rs . 400 , b ) rs . 300 , c ) none", "correct": "b"}, "(B) rs . 300"),
    "PIQA": ({"sol1": "blow", "sol2": "heat", "label": 0}, "(A) blow"),
    "Winogrande": ({"option1": "Ann", "option2": "Eva", "answer": "2"}, "(B) Eva"),
    "SocialIQA": ({"answerA": "x", "answerB": "y", "answerC": "z", "label": "1"}, "(A) x"),
    "CosmosQA": ({"answer0": "x", "answer1": "y", "label": 1}, "(B) y"),
    "MedMCQA": ({"opa": "x", "opb": "y", "opc": "z", "cop": 2}, "(C) z"),
    "CMMLU": ({"A": "x", "B": "y", "answer": "B"}, "(B) y"),
    "Belebele": ({"mc_answer1": "x", "mc_answer2": "y", "correct_answer_num": "2"}, "(B) y"),
    "LogiQA": ({"options": ["x", "y"], "correct_option": 1}, "(B) y"),
    "GPQA": ({"Correct Answer": "42", "Incorrect Answer 1": "1", "Incorrect Answer 2": "2"}, "(C) 42"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_stand_under_the_question_and_the_answer_is_one_of_them(name: str) -> None:
    row, answer = CHOICES[name]
    read = as_question({"question": "Which?", **row}, "question", "answer")
    assert read["answer"] == answer
    assert f"\n{answer}" in read["question"]
    assert read["question"].startswith("Which?\n(A) ")


def test_a_row_without_choices_stays_and_one_without_the_right_one_has_none() -> None:
    assert as_question({"question": "Which?", "answer": "4"}, "question", "answer")["answer"] == "4"
    assert as_question({"question": "Q", "options": ["x", "y"], "label": "-1"}, "question", "answer")["answer"] is None


def test_an_answer_to_a_row_of_choices_is_judged_by_letter_or_text(tmp_path: Path) -> None:
    rows = [{"question": f"Which {n}?", "choices": ["Rome", "Paris"], "answer": 1} for n in range(4)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    config = Config(
        environment=MathConfig(problem_column="question"), data=DataConfig(path=str(tmp_path / "rows.json"))
    )
    environment = config.environment.build(config, print)
    prompt = environment.prompts("train")[0]
    said = ["The answer is (B).", "\\boxed{Paris}", "B", "A", "(A) Rome\n(B) Paris", "Both."]
    assert [reward.value for reward in asyncio.run(environment.score(prompt, said))] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


# ------------------------------------------------------------------------------------------------ passages and turns


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"passage": "The sea is blue."}, "The sea is blue.\n\nWhich?"),
        ({"Body": "The sea is blue."}, "The sea is blue.\n\nWhich?"),
        (
            {"context": {"title": ["A", "B"], "sentences": [["One.", " Two."], ["Three."]]}},
            "A: One. Two.\nB: Three.\n\nWhich?",
        ),
        ({"narrative": "N.", "choices": "['x', 'y']"}, "N.\n\nWhich?\n(A) x\n(B) y"),
        ({"context": "Whi"}, "Which?"),
        ({"passage": None}, "Which?"),
        ({"A": 3, "B": 4}, "Which?"),
        ({"facts": "It is x."}, "Which?"),
    ],
)
def test_a_passage_stands_before_the_question(row: dict[str, Any], asked: str) -> None:
    assert as_question({"question": "Which?", **row, "answer": "x"}, "question", "answer")["question"] == asked


@pytest.mark.parametrize(
    ("answer", "golds"),
    [
        ({"value": "Ann", "aliases": ["Anna", "Annie"]}, ["Ann", "Anna", "Annie"]),
        ({"text": ["blue", "azure"], "answer_start": [1, 2]}, ["blue", "azure"]),
        ({"spans": ["23"], "types": ["number"]}, ["23"]),
    ],
)
def test_a_mapping_of_an_answer_holds_all_that_are_accepted(answer: Any, golds: list[str]) -> None:
    assert gold_answers({"answer": answer}, MathConfig()) == golds


TURNS: dict[str, list[dict[str, Any]]] = {
    "ORZ": [{"from": "human", "value": "{}?"}, {"from": "assistant", "ground_truth": {"value": "12"}}],
    "OpenThoughts": [{"from": "user", "value": "{}?"}, {"from": "gpt", "value": "So \\boxed{12}."}],
    "OpenAI": [{"role": "user", "content": "{}?"}, {"role": "assistant", "content": "So \\boxed{12}."}],
}


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("form", ["column", "row", "table"])
def test_turns_are_a_question_and_its_answer(tmp_path: Path, name: str, form: str) -> None:
    rows = [json.loads(json.dumps(TURNS[name]).replace("{}", str(n))) for n in range(4)]
    forms = {"row": rows, "table": [dict(enumerate(turns)) for turns in rows]}
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps(row) for row in forms.get(form, [{"conversations": turns} for turns in rows]))
    )
    if name == "OpenAI" and form != "column":
        with pytest.raises(ValueError, match=r"is not an object with columns|is a table of columns"):
            built("math", str(tmp_path / "rows.jsonl"))
        return
    environment = built("math", str(tmp_path / "rows.jsonl"))
    assert asked(environment) in ("0?", "1?", "2?", "3?")
    assert first(environment).columns["gold"] == "12"


def test_turns_of_others_are_a_prompt() -> None:
    turns = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "6 * 7?"}]
    assert PromptFormat("turns").read({"turns": turns})["turns"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "6 * 7?"},
    ]
