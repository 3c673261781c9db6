"""`covey rollouts`: episodes turn by turn, of the step, the prompt and the end that was asked for."""

import json
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.run.records.answer_text import episode_text


def row(step: int, prompt_id: str, reward: float, **more: Any) -> dict[str, Any]:
    turns = [
        {"num_tokens": 3, "reward": 0.0, "state": "a", "is_void": True, "info": {"tried": 1}},
        {"num_tokens": 3, "reward": 0.25, "state": "b", "is_void": False},
    ]
    said = [
        {"role": "assistant", "content": "15;"},
        {"role": "tool", "name": "less\x1b[31m", "content": ">"},
        {"role": "assistant", "content": "17;"},
    ]
    plain = {"step": step, "time": "t", "environment": "guess", "prompt_id": prompt_id, "prompt": "?", "columns": {}}
    plain |= {"completion": said, "num_tokens": 6, "reward": reward, "parts": {"won": 1.0}, "finish_reason": "stop"}
    return plain | {"stop_reason": "completed", "turns": turns, "policy_version": 0, "advantage": 0.5} | more


def written(folder: Path, rows: list[dict[str, Any]], name: str = "rollouts.jsonl") -> None:
    (folder / name).write_text("".join(json.dumps(each) + "\n" for each in rows))


def test_an_episode_is_shown_turn_by_turn_without_control_characters() -> None:
    assert episode_text(row(3, "train-1", 1.25)).splitlines() == [
        "step 3, train-1: reward 1.250 (won 1), advantage +0.50, 2 turns of 0 0.25, completed, 6 tokens",
        "  prompt  ?",
        '  policy  15;   (void, {"tried": 1})',
        "  tool less\\x1b[31m >",
        "  policy  17;   (+0.25)",
    ]


@pytest.mark.parametrize(
    ("flags", "ids"),
    [
        ([], ["b", "a"]),
        (["--worst"], ["a", "b"]),
        (["--number", "1"], ["b"]),
        (["--step", "1"], ["c"]),
        (["--prompt", "c"], ["c"]),
        (["--evaluation"], ["e"]),
    ],
)
def test_the_last_step_is_shown_from_the_best_unless_others_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], ids: list[str]
) -> None:
    written(tmp_path, [row(1, "c", 0.0), row(2, "a", 0.0), row(2, "b", 1.0)])
    written(tmp_path, [row(2, "e", 0.0)], "evaluations.jsonl")
    assert main(["rollouts", str(tmp_path), *flags]) == 0
    shown = [line.split(":")[0].split(", ")[1] for line in capsys.readouterr().out.splitlines() if "reward" in line]
    assert shown == ids


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "covey rollouts needs a run folder, such as covey rollouts outputs/DATE/TIME"),
        (["{run}", "--step", "two"], "--step must be a whole number >= 0, got two"),
        (["{run}", "--step", "7"], "nothing is kept at step 7; there are steps 1 to 2"),
        (["{run}", "--prompt", "z"], "nothing is kept of prompt z; there are no rollouts"),
        (["{run}", "--wurst"], 'no flag "--wurst"; flags: --step, --prompt, --number, --evaluation, --worst'),
        (["{run}/nowhere"], "covey: there is no folder"),
        (["{run}/empty"], "rollouts.jsonl is not there"),
    ],
)
def test_words_that_name_nothing_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    written(tmp_path, [row(1, "c", 0.0), row(2, "a", 0.0)])
    (tmp_path / "empty").mkdir()
    assert main(["rollouts", *(word.format(run=tmp_path) for word in words)]) == 2
    assert line in capsys.readouterr().err


@pytest.mark.parametrize("name", ["step", "prompt_id", "reward"])
def test_a_row_that_no_run_writes_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    good = row(1, "c", 0.0)
    written(tmp_path, [good, {key: value for key, value in good.items() if key != name}])
    assert main(["rollouts", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"rollouts.jsonl does not hold what a run writes there (KeyError: '{name}')" in said
    assert said.count("\n") == 1
