import json
import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from covey import tracker
from covey.config import OutputConfig
from covey.tracker import Aside, JsonLines, Many, RolloutLog, make_trackers, spread
from covey.types import Group, Prompt, Reward, Rollout


class Remembering:
    """A tracker that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float], str]] = []
        self.closed = 0

    def log(self, step: int, metrics: Mapping[str, float], kind: str = "train") -> None:
        self.rows.append((step, dict(metrics), kind))

    def close(self) -> None:
        self.closed += 1


class Broken:
    """A tracker whose service is down."""

    def __init__(self) -> None:
        self.calls = 0

    def log(self, step: int, metrics: Mapping[str, float], kind: str = "train") -> None:
        self.calls += 1
        raise ConnectionError("no route to host")

    def close(self) -> None:
        raise ConnectionError("no route to host")


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def group_of(prompt_id: str, *rewards: float) -> Group:
    rollouts = tuple(
        Rollout((5, 8), (8, 2), (True, True), (-0.1, -0.2), Reward(r, {"correct": r}), f"says {r}", "stop", 3)
        for r in rewards
    )
    return Group(Prompt(prompt_id, "arithmetic", f"text of {prompt_id}", {}), rollouts, ())


def test_every_row_can_be_read_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.log(1, {"reward_mean": 0.5, "tokens": 12})
    assert rows_of(tmp_path / "metrics.jsonl") == [{"step": 1, "kind": "train", "reward_mean": 0.5, "tokens": 12}]
    lines.log(1, {"accuracy": 1.0}, kind="evaluate")
    assert rows_of(tmp_path / "metrics.jsonl")[1] == {"step": 1, "kind": "evaluate", "accuracy": 1.0}
    lines.close()


def test_numbers_json_cannot_hold_stay_visible_and_readable(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.log(1, {"loss": math.nan, "kl": math.inf, "gap": -math.inf})
    lines.close()
    assert rows_of(tmp_path / "metrics.jsonl") == [
        {"step": 1, "kind": "train", "loss": "nan", "kl": "inf", "gap": "-inf"}
    ]


def test_a_second_run_of_the_same_folder_adds_to_its_metrics(tmp_path: Path) -> None:
    for step in (1, 2):
        lines = JsonLines(tmp_path / "metrics.jsonl")
        lines.log(step, {})
        lines.close()
    assert [row["step"] for row in rows_of(tmp_path / "metrics.jsonl")] == [1, 2]


def test_many_trackers_all_get_every_row() -> None:
    first, second = Remembering(), Remembering()
    many = Many([first, second])
    many.log(4, {"kl": 0.1}, kind="cold_start")
    many.close()
    assert first.rows == second.rows == [(4, {"kl": 0.1}, "cold_start")]
    assert (first.closed, second.closed) == (1, 1)


def test_a_service_that_fails_is_reported_once_and_never_stops_the_run(caplog: pytest.LogCaptureFixture) -> None:
    broken = Broken()
    aside = Aside("wandb", lambda: broken, deadline=60)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            aside.log(step, {"kl": 0.1})
        aside.close()
    assert broken.calls == 1
    assert [record.message for record in caplog.records] == [
        "wandb stopped logging (no route to host); metrics.jsonl goes on"
    ]


def test_a_service_that_cannot_start_leaves_the_local_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def down(*arguments: object) -> tracker.Tracker:
        raise ConnectionError("no route to host")

    monkeypatch.setitem(tracker.SERVICES, "wandb", down)
    made = make_trackers(OutputConfig(trackers=["wandb"]), tmp_path, {}, deadline=60)
    made.log(1, {"kl": 0.5})
    made.close()
    assert rows_of(tmp_path / "metrics.jsonl") == [{"step": 1, "kind": "train", "kl": 0.5}]
    assert "wandb could not start (no route to host)" in caplog.text


@pytest.mark.parametrize(("name", "module"), [("wandb", "wandb"), ("tensorboard", "torch.utils.tensorboard.writer")])
def test_a_missing_extra_is_one_line_that_names_its_install(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"pip install 'covey\[{name}\]'"):
        make_trackers(OutputConfig(trackers=[name]), tmp_path, {}, deadline=60)


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='no tracker "neptune"; there are tensorboard, wandb'):
        make_trackers(OutputConfig(trackers=["neptune"]), tmp_path, {}, deadline=60)


def test_tensorboard_holds_the_numbers_under_kind_and_name(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    made = make_trackers(OutputConfig(trackers=["tensorboard"]), tmp_path, {}, deadline=60)
    made.log(3, {"reward_mean": 0.5})
    made.log(3, {"accuracy": 0.25}, kind="evaluate")
    made.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward_mean")] == [(3, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("evaluate/accuracy")] == [(3, 0.25)]


def test_wandb_offline_writes_its_run_into_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    made = make_trackers(OutputConfig(trackers=["wandb"]), tmp_path, {"seed": 3}, deadline=60)
    made.log(1, {"reward_mean": 0.5})
    made.close()
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 1
    assert rows_of(tmp_path / "metrics.jsonl") == [{"step": 1, "kind": "train", "reward_mean": 0.5}]


def test_a_rollout_row_says_what_was_asked_answered_and_earned(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "rollouts.jsonl", rows_per_step=8, max_rows=100)
    log.log(7, [group_of("train-1", 1.0)], [0.5])
    log.close()
    assert rows_of(tmp_path / "rollouts.jsonl") == [
        {
            "step": 7,
            "prompt_id": "train-1",
            "prompt": "text of train-1",
            "completion": "says 1.0",
            "reward": 1.0,
            "parts": {"correct": 1.0},
            "advantage": 0.5,
            "finish_reason": "stop",
            "policy_version": 3,
        }
    ]


def test_rollouts_are_spread_over_the_groups_of_a_step(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "rollouts.jsonl", rows_per_step=2, max_rows=100)
    log.log(1, [group_of("a", 0.0, 1.0), group_of("b", 0.0, 1.0)], [-1.0, 1.0, -1.0, 1.0])
    log.close()
    assert [row["prompt_id"] for row in rows_of(tmp_path / "rollouts.jsonl")] == ["a", "b"]


def test_the_file_of_rollouts_is_bounded_over_restarts_too(tmp_path: Path) -> None:
    for step in range(3):
        log = RolloutLog(tmp_path / "rollouts.jsonl", rows_per_step=2, max_rows=3)
        log.log(step, [group_of("a", 0.0, 1.0)], [-1.0, 1.0])
        log.close()
    assert [row["step"] for row in rows_of(tmp_path / "rollouts.jsonl")] == [0, 0, 1]


def test_advantages_must_fit_the_rollouts(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "rollouts.jsonl", rows_per_step=2, max_rows=3)
    with pytest.raises(ValueError):
        log.log(1, [group_of("a", 0.0, 1.0)], [1.0])


def test_spread_indices_start_at_the_first_and_never_exceed_what_there_is() -> None:
    assert spread(10, 3) == [0, 3, 6]
    assert spread(2, 8) == [0, 1]
    assert spread(5, 0) == spread(0, 5) == spread(5, -1) == []
