"""The pages of environments: conversations turn by turn, programs with the verdicts of their tests, all of it text."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covey_report.logs.read import RunFiles, cut, read_run
from covey_report.page.content import content
from covey_report.page.environments import MOTION_BYTES, conversations_of, environment_of, machines_of
from covey_report.page.make import make_report
from covey_sandbox.types import Report, TestResult
from covey_tasks.code.environment import reward_of
from covey_tasks.machines.design.stages import Problem
from covey_tasks.machines.design.types import Tree
from covey_tasks.machines.physics.simulate import record
from covey_tasks.machines.prompts import write_answer

from ..support.small import rows
from ..tasks.machines.designs import CAR, ROTOR_CATAPULT, machine
from .test_report import HOSTILE, data_of, hostile_run

Row = dict[str, Any]


def hostile_turns(row: Row) -> Row:
    """A traced group whose answers are conversations in which everybody is hostile."""
    call = {"role": "assistant", "content": None, "tool_calls": [{HOSTILE: HOSTILE}]}
    said = {"role": HOSTILE, "name": HOSTILE, "content": HOSTILE}
    turns = [{"num_tokens": 1, "reward": 0.5, "state": HOSTILE, "is_void": True, "info": {HOSTILE: HOSTILE}}] * 2
    episode = {"completion": [call, said, call | {"content": HOSTILE}], "stop_reason": HOSTILE, "turns": turns}
    return row | {"rollouts": [one | episode for one in row["rollouts"]]}


def hostile_program(row: Row) -> Row:
    """An answer to a problem whose tests, and what the sandbox says of them, are hostile."""
    tests = [{"args": [HOSTILE], "kwargs": {HOSTILE: HOSTILE}, "expected": HOSTILE}, {HOSTILE: HOSTILE}]
    columns = {"problem": {"entry_point": HOSTILE, "tests": tests, "examples": HOSTILE}}
    return row | {"columns": columns, "verdicts": [HOSTILE, "wrong"], "first_failure": HOSTILE}


def changed(folder: Path, name: str, environment: str, change: Callable[[Row], Row]) -> Path:
    """The run with every row of a file changed, as if it were of another environment."""
    lines = [json.dumps(change(row)) + "\n" for row in rows(folder / name)]
    (folder / name).write_text("".join(lines))
    (folder / "config.yaml").write_text(f"num_steps: 1\nenvironment: {{name: {environment}}}\n")
    return folder


HOSTILE_PAGES = {
    "conversations": ("traces.jsonl", "custom", hostile_turns),
    "programs": ("evaluations.jsonl", "code", hostile_program),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", HOSTILE_PAGES)
def test_what_stands_on_the_pages_of_environments_cannot_be_markup(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = make_report([changed(hostile_run(tmp_path, monkeypatch), *HOSTILE_PAGES[kind])])
    assert "<img" not in page.read_text(encoding="utf-8")
    (run,) = data_of(page)["runs"]
    assert run["environment"]["kind"] == kind
    assert HOSTILE in json.dumps(run, ensure_ascii=False)


@pytest.mark.long
def test_a_traced_conversation_keeps_its_turns_their_rewards_and_why_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = changed(hostile_run(tmp_path, monkeypatch), *HOSTILE_PAGES["conversations"])
    first = content([read_run(folder)], ["run"])["runs"][0]["traces"][0]["rollouts"][0]
    assert [turn["role"] for turn in first["text"]] == ["assistant", HOSTILE, "assistant"]
    assert first["text"][0]["calls"] == json.dumps([{HOSTILE: HOSTILE}], ensure_ascii=False)
    assert [(turn["num"], turn["reward"], turn["void"]) for turn in first["turns"]] == [(1, 0.5, True)] * 2
    assert first["stop"] == HOSTILE


def test_answers_of_one_turn_have_no_page_of_conversations() -> None:
    def run(completion: Any) -> RunFiles:
        return RunFiles(Path("run"), traces=[{"step": 1, "rollouts": [{"completion": completion}]}])

    assert conversations_of(run("text")) is None
    assert conversations_of(run([{"role": "assistant", "content": "text"}])) is None
    assert conversations_of(run([{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}])) is not None


def test_a_message_that_only_calls_a_tool_is_shown_by_its_call() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    assert cut([call, "no message"]) == [{"role": "assistant", "content": "", "calls": '[{"name": "add"}]'}]


def program_page(**columns: Any) -> Row:
    row = {"step": 3, "greedy": True, "prompt_id": "p", "prompt": "double", "completion": "def f(n): ..."}
    own = {"reward": 1.0, "verdicts": ["passed", "wrong"], "first_failure": "f(3) gave 5"}
    run = RunFiles(Path("run"), {"environment.name": "code"}, answers=[row | own | {"columns": columns}])
    found = environment_of(run)
    assert found is not None
    item: Row = found["items"][0]
    return item


def test_the_page_of_programs_shows_each_test_with_its_verdict() -> None:
    tests = [{"args": [2], "expected": 4}, {"args": [3], "kwargs": {"k": "a"}, "expected": [6]}]
    item = program_page(problem={"entry_point": "double", "tests": tests})
    assert item["entry"] == "double"
    assert item["cases"] == [("2", "4"), ("3, k='a'", "[6]")]
    assert item["verdicts"] == ["passed", "wrong"]
    assert item["failure"] == "f(3) gave 5"
    assert item["tests"] == {}


def test_tests_that_were_cut_in_the_log_are_shown_as_the_text_they_are() -> None:
    item = program_page(tests="assert f(1) == 2…")
    assert item["cases"] == []
    assert item["tests"] == {"tests": "assert f(1) == 2…"}


def test_the_judge_notes_the_verdict_of_every_test_and_the_first_failure() -> None:
    results = (
        TestResult(True, "passed", ""),
        TestResult(False, "wrong", "f(3) gave 5"),
        TestResult(False, "error", "x"),
    )
    noted = reward_of(Report(results, (), 0.1), 0.5).extra
    assert noted == {
        "verdicts": ["passed", "wrong", "error"],
        "first_failure": "f(3) gave 5",
        "feedback": "f(3) gave 5",
    }
    assert reward_of(Report(results[:1], (), 0.1), 0.5).extra == {"verdicts": ["passed"]}


# ------------------------------------------------------------------------------------------------ machines


def run_of_machines(folder: Path, *trees: Tree) -> RunFiles:
    """A folder whose rollouts are these machines, the first with the highest score."""
    written = [write_answer(tree, Problem("car", 48), "tree") for tree in trees]
    kept = [
        {"step": 1, "prompt": [], "completion": text, "parts": {"score": 9.0 - place}}
        for place, text in enumerate(written)
    ]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    return RunFiles(folder, {"environment.name": "machines"})


@pytest.mark.long
def test_the_best_machines_are_simulated_again_and_move_as_far_as_they_did(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    page = machines_of(run_of_machines(tmp_path, CAR, ROTOR_CATAPULT))
    assert [item["score"] for item in page["items"]] == [9.0, 8.0]
    for item, tree, world in zip(page["items"], (CAR, ROTOR_CATAPULT), ("car", "catapult"), strict=True):
        motion, recording = item["motion"], record(machine(tree), world)
        moments, num_bodies = motion["moments"], recording.positions_TB3.shape[1]
        assert motion["bodies"] == num_bodies == len(item["pivots"])
        assert {len(row) for row in moments} == {9 * num_bodies}
        assert {solid["body"] for solid in item["solids"]} <= set(range(num_bodies))
        assert len(json.dumps(motion)) <= MOTION_BYTES
        # The same place and turn at a moment in the middle, within what rounding leaves
        middle = len(moments) // 2
        look = round(middle * motion["seconds"] / 0.02)
        shown = [value / 100 for value in moments[middle][: 3 * num_bodies]]
        assert shown == pytest.approx(recording.positions_TB3[look].ravel(), abs=0.0051)
        axes = [value / 1000 for value in moments[middle][3 * num_bodies :]]
        assert axes == pytest.approx(recording.rotations_TB33[look, :, :, :2].ravel(), abs=0.00051)


def test_a_machine_that_cannot_be_simulated_here_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "covey_tasks.machines.physics.simulate", None)
    (item,) = machines_of(run_of_machines(tmp_path, CAR))["items"]
    assert item["motion"] is None
    assert len(item["solids"]) >= len(CAR)


def test_a_run_without_machines_says_so_on_their_page(tmp_path: Path) -> None:
    assert machines_of(RunFiles(tmp_path))["items"] == []
    (tmp_path / "rollouts.jsonl").write_text('{"step": 1, "parts": 3}\nno json\n')
    assert machines_of(RunFiles(tmp_path))["items"] == []
