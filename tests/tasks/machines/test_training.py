"""A short run of the real command: physics included, from nothing to machines that are sound."""

import json
from pathlib import Path

import pytest

from covey.cli.main import main

from ...support.small import logging_as_it_was


@pytest.mark.slow
def test_a_policy_made_from_nothing_learns_to_build_sound_machines_that_drive(tmp_path: Path) -> None:
    words = [
        *("recipe=machines_nano", "num_steps=20", "groups_per_step=1", "group_size=48", "cold_start.num_steps=30"),
        *("environment.placed_reward=1.0", "evaluation.num_prompts=1", "evaluation.num_samples=1", "evaluation.k=[1]"),
        *(f"cold_start.cache_dir={tmp_path}", f"hydra.run.dir={tmp_path}/run", "output.progress=false"),
    ]
    with logging_as_it_was():
        assert main(["train", *words]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "train"]
    valid = [step["reward/machine_valid"] for step in steps]
    assert sum(valid[-3:]) > sum(valid[:3]) + 0.3
    assert max(step["environment/score_max"] for step in steps) > 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["environment"]["scores"] == {"small_car": "car_paper"}
    assert "mujoco-4" in summary["environment"]["physics_version"]
