"""While a run trains, findings are said once, change nothing, and end the run where that is asked."""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import process_time
from types import SimpleNamespace
from typing import Any

import pytest

from covey.config.schema import Config, DoctorConfig, OutputConfig
from covey.loop import train
from covey.run.checkpoints.fingerprint import of_prompts
from covey.run.evaluate import Estimate, Evaluation
from covey.run.records.callbacks import Callbacks, StopTraining, make_callbacks
from covey.run.records.rollout_log import verdict_row
from covey.types import Prompt
from covey_report.doctor.live import Doctor

from ..support.small import rows, scripted, small_config, use, varied

NOTHING = Estimate(0.5, 0.4, 0.6)


def step_of(doctor: Doctor, step: int, **numbers: float) -> None:
    doctor.on_step(step, {"zero_std_fraction": 0.1, "all_wrong_fraction": 0.0, **numbers})


def evaluated(accuracy: float, number: int = 100) -> Evaluation:
    correct = tuple(float(place < number * accuracy) for place in range(number))
    return Evaluation(
        accuracy=Estimate(accuracy, accuracy - 0.05, accuracy + 0.05),
        reward_mean=NOTHING,
        pass_at_k={},
        num_prompts=number,
        num_samples=1,
        num_unscored=0,
        correct_greedy=correct,
        mean_reward=correct,
        reward_parts={},
        mean_parts={},
    )


def run_of_100(ids: Sequence[str]) -> Any:
    """All that the doctor looks at of a run of 100 steps."""
    prompts = [Prompt(name, "sums", name, {}) for name in ids]
    return SimpleNamespace(config=SimpleNamespace(num_steps=100), test_prompts=prompts)


def test_a_finding_is_said_once_and_again_only_when_it_is_worse(caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    doctor = Doctor(Config(), said.append)
    for step in range(1, 31):
        step_of(doctor, step, zero_std_fraction=0.7)
    assert [line.split(":")[0] for line in said] == ["doctor, watch"]
    assert "D1 no signal from the first step on: the rewards of 70 %" in said[0]
    for step in range(31, 81):
        step_of(doctor, step, zero_std_fraction=1.0)
    assert [line.split(":")[0] for line in said] == ["doctor, watch", "doctor, sick"]
    logging.getLogger("asyncio").error("a task of another test")
    assert caplog.records == []
    # Without messages at the terminal it is a warning
    silent = Doctor(Config(output=OutputConfig(progress=False)), said.append)
    for step in range(1, 31):
        step_of(silent, step, zero_std_fraction=0.7)
    assert [record.getMessage() for record in caplog.records] == said[:1]
    assert len(said) == 2


def test_losses_on_held_out_prompts_are_said_after_the_evaluation_that_shows_them(tmp_path: Path) -> None:
    said: list[str] = []
    doctor = Doctor(Config(), said.append)
    doctor.on_start(run_of_100([f"held-out/{place}" for place in range(100)]), tmp_path)
    doctor.on_evaluation(0, evaluated(0.6))
    assert said == []
    doctor.on_evaluation(10, evaluated(0.2))
    assert [line.split()[2] for line in said] == ["D35", "D21"]


def test_held_out_prompts_without_a_verdict_are_not_taken_for_lost(tmp_path: Path) -> None:
    said: list[str] = []
    doctor = Doctor(Config(), said.append)
    doctor.on_start(run_of_100([f"held-out/{place}" for place in range(100)]), tmp_path)
    solved = evaluated(0.6)
    unjudged = replace(solved, correct_greedy=(math.nan,) * 40 + solved.correct_greedy[40:])
    doctor.on_evaluation(0, solved)
    doctor.on_evaluation(10, unjudged)
    assert said == []


def test_of_evaluations_between_the_first_and_the_newest_a_mark_a_prompt_is_kept(tmp_path: Path) -> None:
    doctor = Doctor(Config(), lambda line: None)
    doctor.on_start(run_of_100(["held-out/0"]), tmp_path)
    for step in range(200):
        doctor.on_evaluation(step, evaluated(0.5))
    kept = doctor._log.verdicts
    assert [row["step"] for row in kept] == list(range(200))
    assert all(row.keys() == {"step", "prompts", "ids", "right"} for row in kept[1:-1])
    assert len({id(row["prompts"]) for row in kept}) == len({id(row["ids"]) for row in kept}) == 1


def test_a_loss_of_accuracy_on_few_prompts_is_uncertain(tmp_path: Path) -> None:
    said: list[str] = []
    doctor = Doctor(Config(), said.append)
    doctor.on_start(run_of_100([f"held-out/{place}" for place in range(10)]), tmp_path)
    doctor.on_evaluation(0, evaluated(0.6, 10))
    doctor.on_evaluation(10, evaluated(0.2, 10))
    assert said == []


def test_the_named_finding_ends_the_run_and_another_does_not() -> None:
    for stop_on, ends in ((["D1"], True), (["sick"], True), (["D4"], False), ([], False)):
        config = Config(doctor=DoctorConfig(stop_on=stop_on))
        callbacks = Callbacks(make_callbacks(config, lambda line: None))
        for step in range(1, 21):
            callbacks.step(step, {"zero_std_fraction": 1.0, "all_wrong_fraction": 0.2})
        assert (callbacks.reason is not None) == ends
        assert callbacks.reason is None or callbacks.reason.startswith("doctor.stop_on has D1: D1 no signal")


def test_a_watch_finding_does_not_end_a_run_set_to_stop_on_critical() -> None:
    doctor = Doctor(Config(doctor=DoctorConfig(stop_on=["sick"])), lambda line: None)
    for step in range(1, 41):
        step_of(doctor, step, zero_std_fraction=0.7)
    for step in range(41, 60):
        step_of(doctor, step, zero_std_fraction=1.0)
    with pytest.raises(StopTraining):
        step_of(doctor, 60, zero_std_fraction=1.0)


def test_nothing_watches_where_it_is_off() -> None:
    assert make_callbacks(Config(doctor=DoctorConfig(enabled=False)), print) == []


def test_a_resumed_run_keeps_its_counts_and_repeats_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    numbers = {"kind": "train", "zero_std_fraction": 1.0, "all_wrong_fraction": 0.2}
    lines = [json.dumps({"step": step, **numbers}) for step in range(1, 31)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    doctor = Doctor(Config(), said.append)
    doctor.on_start(run_of_100(()), tmp_path)
    for step in range(26, 61):  # resumed after step 25
        step_of(doctor, step, zero_std_fraction=1.0, entropy=0.5 if step < 40 else 3.0)
    assert [line.split()[2] for line in said] == ["D5"]


def test_losses_on_held_out_prompts_are_found_over_a_resume(tmp_path: Path) -> None:
    said: list[str] = []
    ids = [f"held-out/{place}" for place in range(100)]
    prompts = [name for _, name in of_prompts([Prompt(name, "sums", name, {}) for name in ids])]
    (tmp_path / "verdicts.jsonl").write_text(json.dumps(verdict_row(0, evaluated(0.6), prompts, ids)) + "\n")
    first = {"step": 0, "kind": "evaluate", "accuracy": 0.6, "reward_mean": 0.6}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(first) + "\n")
    doctor = Doctor(Config(), said.append)
    doctor.on_start(run_of_100(ids), tmp_path)
    doctor.on_evaluation(10, evaluated(0.2))
    assert [line.split()[2] for line in said] == ["D35", "D21"]
    assert "of 60 held-out prompts solved (before step 1), 40 are lost" in said[1]


@pytest.mark.long
def test_a_run_whose_answers_are_all_cut_ends_with_the_evaluation_that_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted(varied))
    config = small_config(
        num_steps=9, doctor__enabled=True, doctor__stop_on=["D8"], sampling__max_tokens=1, evaluation__every=6
    )
    train(config, tmp_path / "run")
    metrics = rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in metrics if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    summary: dict[str, Any] = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 6)


def test_looking_costs_less_than_two_milliseconds_a_step() -> None:
    columns = [f"number_{place}" for place in range(30)] + ["entropy", "grad_norm", "mismatch", "sampled_reward_mean"]
    doctor = Doctor(Config(num_steps=400), lambda line: None)
    costs = []
    for step in range(1, 401):
        row: dict[str, float | None] = {name: 0.5 + 0.01 * (step * place % 7) for place, name in enumerate(columns)}
        started = process_time()
        doctor.on_step(step, row)
        costs.append(process_time() - started)
    # A step of the demonstration takes 0.25 s and more.
    assert median(costs) < 0.0005
    assert sum(costs) / len(costs) < 0.0025
