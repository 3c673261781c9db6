"""Runs of every kind are confirmed: resumed, with changes, asynchronous, LoRA, several ranks, episodes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from covey.config.auto_adjust import add_correction
from covey.config.schema import Config
from covey.environments.reward_functions.settings import RewardFunctionsConfig
from covey.loop import train
from covey_report.verify.command import run_verify

from ....support.fake_ray import fake_ray
from ....support.processes import on_two_ranks
from ....support.small import small_config

USUAL = {
    "num_steps": 5,
    "environment": RewardFunctionsConfig(in_process=True),
    "rewards": ["tests.support.byte_rewards:by_bytes"],
    "output__save_every": 2,
    "output__keep_last": 9,
    "evaluation__every": 3,
    "preflight__enabled": False,
    "sampling__max_tokens": 6,
}
Capture = pytest.CaptureFixture[str]


def usual(folder: Path, **changes: Any) -> Config:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"number {place}: "}) + "\n" for place in range(12)))
    chosen, _ = add_correction(small_config(data__path=str(rows), **USUAL | changes))
    return chosen


def confirmed(folder: Path, capsys: Capture, *words: str) -> str:
    code = run_verify([str(folder), "--seed", "0", *words])
    said = capsys.readouterr().out
    assert code == 0, said
    return said


@pytest.mark.parametrize(
    "changes",
    [
        {"model__lora_rank": 4},
        {"updates_per_batch": 2, "algorithm__kl_coef": 0.1, "algorithm__reference_refresh_every": 2},
        {"algorithm__group_filter": "zero_std", "curriculum__name": "success"},
    ],
    ids=["lora", "reference", "curriculum"],
)
def test_a_run_is_confirmed(changes: dict[str, Any], tmp_path: Path, capsys: Capture) -> None:
    train(usual(tmp_path, **changes), tmp_path / "run")
    assert "the same: 5 steps, 3 evaluations, 3 checkpoints" in confirmed(tmp_path / "run", capsys)


def test_gradients_in_order_of_arrival_are_not_confirmed_and_not_called_forged(tmp_path: Path, capsys: Capture) -> None:
    train(usual(tmp_path, streaming=True, groups_per_step=4), tmp_path / "run")
    code = run_verify([str(tmp_path / "run"), "--seed", "0"])
    said = capsys.readouterr().out
    assert code == 2 or "confirmed" in said
    assert code == 0 or "cannot be verified: what differs is of the size of rounding" in said


def test_a_run_that_was_cut_off_and_resumed_is_confirmed(tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "run"
    train(usual(tmp_path), run)
    for step in (4, 5):
        (run / "checkpoints" / f"step-{step:06d}").rename(tmp_path / f"later-{step}")
    train(usual(tmp_path, resume=str(run)), run)
    assert "the same: 5 steps, 3 evaluations, 3 checkpoints" in confirmed(run, capsys)


def test_steps_after_a_change_of_settings_are_computed_with_the_new_ones(tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "run"
    train(usual(tmp_path, num_steps=3), run)
    more = usual(tmp_path, num_steps=6, optimizer__lr=3e-3, resume=str(run))
    train(replace(more, resume_changes=["num_steps", "optimizer.lr"]), run)
    assert "6 steps drawn of 6 in reach" in confirmed(run, capsys)


@pytest.mark.long
def test_an_asynchronous_run_is_confirmed_by_its_schedule(tmp_path: Path, capsys: Capture) -> None:
    with fake_ray():
        train(usual(tmp_path, source="ray", max_staleness=2, devices__sampler=2, groups_per_step=3), tmp_path / "run")
    said = confirmed(tmp_path / "run", capsys)
    assert "the same: 5 steps, 3 checkpoints" in said
    assert "5 steps to compute from 1 state" in said


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_of_two_ranks_is_confirmed_by_two_ranks(strategy: str, tmp_path: Path, capsys: Capture) -> None:
    def work() -> str:
        train(usual(tmp_path, groups_per_step=4, parallel__strategy=strategy), tmp_path / "run")
        return ""

    (tmp_path / "stores").mkdir()
    on_two_ranks(work, tmp_path / "stores", seconds=200.0)
    assert "the same: 5 steps, 3 evaluations, 3 checkpoints" in confirmed(tmp_path / "run", capsys)
