"""Tasks and designs of one's own: what a row asks, what it shows, and what is wrong with it in one line."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from covey.config.schema import Config
from covey.types import Reward
from covey_tasks.machines.design.stages import Problem
from covey_tasks.machines.environment import Machines, build_machines
from covey_tasks.machines.prompts import read_answer
from covey_tasks.machines.rows import example_of, problem_of, read_examples
from covey_tasks.machines.settings import MachinesConfig

HOW = MachinesConfig()
CAR = [
    {"type": 0, "id": 0, "parent": -1, "face_id": -1},
    {"type": 63, "id": 1, "parent": 0, "face_id": 0},
    {"type": 2, "id": 2, "parent": 1, "face_id": 1},
    {"type": 2, "id": 3, "parent": 1, "face_id": 4},
]
COMPACT_CAR = "Ba0Wb1Wb4"
BASE = CAR[:2]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def built(data: str | None, **settings: Any) -> Machines:
    made = MachinesConfig(**({"num_workers": 1} | settings))
    config = Config(environment=made)
    config.data.path = data
    found = build_machines(made, config)
    assert isinstance(found, Machines)
    return found


def test_a_row_asks_in_the_users_words_under_the_stages_score_and_budget(tmp_path: Path) -> None:
    rows = [{"prompt": f"Build a cart with {n} wheels.", "budget": 8} for n in range(2, 12)]
    machines = built(write(tmp_path / "tasks.jsonl", [*rows, {"prompt": "Throw far.", "stage": "catapult"}]))
    try:
        prompts = [*machines.prompts("train"), *machines.prompts("test")]
        assert len(prompts) == 11
        said = {str(prompt.text[-1]["content"]) for prompt in prompts if isinstance(prompt.text, tuple)}
        assert "Build a cart with 2 wheels.\nUse at most 8 blocks, the starting block among them." in said
        assert "Throw far.\nUse at most 48 blocks, the starting block among them." in said
        asked = next(prompt for prompt in prompts if "wheels" in str(prompt.text))
        (found,) = asyncio.run(machines.score(asked, [f"```json\n{json.dumps(CAR)}\n```"]))
        assert isinstance(found, Reward)
        assert found.parts["machine_valid"] == 1
        assert set(machines.facts()["scores"].values()) == {"car_paper", "catapult_strict"}
    finally:
        machines.close()


def test_designs_that_are_made_up_answer_the_tasks_of_the_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"Task {n}:", "stage": "small_car"} for n in range(6)]
    machines = built(write(tmp_path / "tasks.jsonl", rows), form="compact", num_demonstrations=12)
    try:
        shown = {prompt.text for prompt, _ in machines.demonstrations("train")}
        assert shown == {prompt.text for prompt in machines.prompts("train")}
        assert all(str(text).startswith("Task ") for text in shown)
    finally:
        machines.close()


def test_a_file_of_designs_is_what_a_cold_start_learns_from(tmp_path: Path) -> None:
    answer = f"Wheels.\n```json\n{json.dumps(CAR)}\n```"
    rows = [{"machine": CAR, "prompt": "A cart."}, {"completion": answer}]
    machines = built(None, demonstrations=write(tmp_path / "designs.jsonl", rows), num_train=2, num_test=1)
    try:
        (first, text), (second, completion) = machines.demonstrations("train")
        assert str(first.text[-1]).count("A cart.") == 1
        assert "how far forward" in str(second.text[-1])
        assert completion == answer
        assert read_answer(str(text), Problem("car", 48), "tree") == read_answer(answer, Problem("car", 48), "tree")
    finally:
        machines.close()


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"prompt": 7}, "column 'prompt' must be text, got 7"),
        ({"prompt": " "}, "column 'prompt' must be text, got ' '"),
        ({"prompt": "?", "stage": "boat"}, "column 'stage' must be one of valid, small_car, .*, got 'boat'"),
        ({"prompt": "?", "budget": 80}, "column 'budget' must be a whole number from 2 to 48, got 80"),
        ({"prompt": "?", "budget": True}, "column 'budget' must be a whole number from 2 to 48, got True"),
        ({"prompt": "?", "stage": "arm"}, r"column 'given' \(a list of blocks\) must be there for arm"),
        ({"prompt": "?", "given": CAR}, r"column 'given' \(a list of blocks\) is not for car"),
        ({"prompt": "?", "stage": "arm", "given": [{"a": 1}]}, "column 'given': block 0: fields must be exactly"),
        (
            {"prompt": "?", "stage": "arm", "given": [*CAR[:3], {**CAR[3], "face_id": 2}]},
            r"column 'given': block 2 \(Powered Wheel\) and block 3 \(Powered Wheel\) overlap",
        ),
    ],
)
def test_what_is_wrong_with_a_task_is_said_with_its_column(row: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}"):
        problem_of(row, HOW)


def test_a_row_without_a_stage_needs_a_single_one_in_the_settings() -> None:
    both = MachinesConfig(stages=["car", "catapult"])
    with pytest.raises(ValueError, match=r"^has no column 'stage', and environment.stages=\['car', 'catapult'\]"):
        problem_of({"prompt": "?"}, both)
    assert problem_of({"prompt": "?", "stage": "catapult"}, both).stage == "catapult"


def test_the_begun_machine_of_a_row_is_what_an_answer_must_begin_with() -> None:
    problem = problem_of({"prompt": "Finish it.", "stage": "arm", "given": BASE}, HOW)
    assert len(problem.given) == 2


def test_what_the_settings_allow_bounds_a_row() -> None:
    small = MachinesConfig(max_blocks=12)
    assert problem_of({"prompt": "?"}, small).budget == 12
    with pytest.raises(ValueError, match=r"^column 'budget' must be a whole number from 2 to 12, got 13"):
        problem_of({"prompt": "?", "budget": 13}, small)
    throws = MachinesConfig(stages=["car", "catapult"], score="catapult_repo")
    assert problem_of({"prompt": "?", "stage": "catapult"}, throws).stage == "catapult"
    with pytest.raises(ValueError, match=r"^column 'stage' is car: environment\.score of car must be one of"):
        problem_of({"prompt": "?", "stage": "car"}, throws)


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"prompt": "?"}, "must have a column 'machine' or 'completion', got none of them .has: prompt."),
        ({"machine": CAR, "completion": "x"}, "must have a column 'machine' or 'completion', got both"),
        ({"machine": 3}, "column 'machine' must be a list of blocks or its JSON, got 3"),
        ({"machine": "[}"}, "column 'machine': not valid JSON"),
        ({"machine": [*CAR, {**CAR[3], "id": 4}]}, "column 'machine': block 4: face 4 of block 1 is already occupied"),
        ({"machine": CAR, "budget": 3}, "column 'machine': 4 blocks, at most 3"),
        ({"machine": CAR[:2], "stage": "valid"}, "column 'machine': 2 blocks, stage valid asks for 3"),
        (
            {"machine": [CAR[0], {**CAR[1], "type": 1}], "stage": "arm", "given": BASE},
            "column 'machine': the first 2 blocks must be those that are given",
        ),
        ({"completion": "I would rather not."}, "column 'completion': not valid JSON"),
        ({"completion": None}, "column 'completion' must be text, got None"),
    ],
)
def test_a_design_that_is_no_machine_is_refused_with_its_column(row: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}"):
        example_of(row, HOW)


def test_the_line_of_a_broken_row_stands_before_what_is_wrong(tmp_path: Path) -> None:
    path = write(tmp_path / "designs.jsonl", [{"machine": CAR}, {"machine": CAR[:1] * 2}])
    with pytest.raises(ValueError, match=r"^.*designs.jsonl line 2 column 'machine': block 1: id is 0"):
        read_examples(path, HOW)
    path = write(tmp_path / "tasks.jsonl", [{"prompt": "a"}, {"prompt": "b", "budget": 0}])
    with pytest.raises(ValueError, match=r"^.*tasks.jsonl line 2 column 'budget' must be .*; data.bad_rows=skip"):
        built(path)
    with pytest.raises(ValueError, match=r"^environment.demonstrations=nowhere.jsonl is no file$"):
        read_examples("nowhere.jsonl", HOW)


def test_a_compact_completion_is_read_in_its_form() -> None:
    found = example_of({"completion": COMPACT_CAR}, MachinesConfig(form="compact"))
    assert found.text == COMPACT_CAR
