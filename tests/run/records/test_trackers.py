import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from covey.config.schema import OutputConfig
from covey.run.records import trackers as tracker
from covey.run.records.rollout_log import AnswerRow, answer_row
from covey.run.records.trackers import (
    BackgroundTracker,
    CompositeTracker,
    JsonLines,
    kept_id,
    make_trackers,
    run_name,
    table_cell,
)
from covey.types import Prompt

from ...support.small import rollout, timeless


class Remembering:
    """A tracker that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float], str]] = []
        self.closed = 0

    def log(self, step: int, metrics: Mapping[str, float], kind: str = "train") -> None:
        self.rows.append((step, dict(metrics), kind))

    def answers(self, step: int, rows: Sequence[AnswerRow], kind: str = "train") -> None:
        self.rows.append((step, {"answers": len(rows)}, kind))

    def close(self) -> None:
        self.closed += 1


class Broken:
    """A tracker whose service is down."""

    def __init__(self) -> None:
        self.calls = 0

    def log(self, step: int, metrics: Mapping[str, float], kind: str = "train") -> None:
        self.calls += 1
        raise ConnectionError("no route to host")

    def answers(self, step: int, rows: Sequence[AnswerRow], kind: str = "train") -> None:
        self.log(step, {})

    def close(self) -> None:
        raise ConnectionError("no route to host")


def rows_of(path: Path) -> list[dict]:
    """Without the times of day."""
    return timeless([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])


def answer(**changes: Any) -> AnswerRow:
    """A row of rollouts.jsonl."""
    asked = Prompt("train-1", "sums", "41+7=", {"answer": 48})
    return answer_row(7, asked, rollout(1.0)) | {"advantage": 0.5, "policy_version": 6, "dropped": None} | changes


def test_every_row_can_be_read_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path, 100)
    lines.log(1, {"reward_mean": 0.5, "tokens": 12})
    assert rows_of(tmp_path / "metrics.jsonl") == [{"step": 1, "kind": "train", "reward_mean": 0.5, "tokens": 12}]
    lines.log(1, {"accuracy": 1.0}, kind="evaluate")
    assert rows_of(tmp_path / "metrics.jsonl")[1] == {"step": 1, "kind": "evaluate", "accuracy": 1.0}
    lines.close()


def test_numbers_json_cannot_hold_stay_visible_and_readable(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path, 100)
    lines.log(1, {"loss": math.nan, "kl": math.inf, "gap": -math.inf, "reward_mean": None})
    lines.close()
    assert rows_of(tmp_path / "metrics.jsonl") == [
        {"step": 1, "kind": "train", "loss": "nan", "kl": "inf", "gap": "-inf", "reward_mean": None}
    ]


def test_every_row_says_when_it_was_written(tmp_path: Path) -> None:
    before = datetime.now(UTC)
    lines = JsonLines(tmp_path, 100)
    lines.log(1, {})
    lines.close()
    (row,) = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert before - timedelta(milliseconds=1) <= datetime.fromisoformat(row["time"]) <= datetime.now(UTC)


def test_a_second_run_of_the_same_folder_adds_to_its_metrics(tmp_path: Path) -> None:
    for step in (1, 2):
        lines = JsonLines(tmp_path, 100)
        lines.log(step, {})
        lines.close()
    assert [row["step"] for row in rows_of(tmp_path / "metrics.jsonl")] == [1, 2]


def test_many_trackers_all_get_every_row() -> None:
    first, second = Remembering(), Remembering()
    many = CompositeTracker([first, second])
    many.log(4, {"kl": 0.1})
    many.answers(4, [answer()], kind="evaluate")
    many.close()
    assert first.rows == second.rows == [(4, {"kl": 0.1}, "train"), (4, {"answers": 1}, "evaluate")]
    assert (first.closed, second.closed) == (1, 1)


def test_a_service_that_fails_is_reported_once_and_never_stops_the_run(caplog: pytest.LogCaptureFixture) -> None:
    broken = Broken()
    aside = BackgroundTracker("wandb", lambda: broken, deadline=60)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            aside.log(step, {"kl": 0.1})
        aside.close()
    assert broken.calls == 1
    assert [record.message for record in caplog.records] == [
        "wandb stopped logging (no route to host); metrics.jsonl continues"
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
    made.log(3, {"reward_mean": 0.5, "kl": None})
    made.log(4, {"reward_mean": None})
    made.log(3, {"accuracy": 0.25}, kind="evaluate")
    made.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward_mean")] == [(3, 0.5)]
    assert "train/kl" not in events.Tags()["scalars"]
    assert [(e.step, e.value) for e in events.Scalars("evaluate/accuracy")] == [(3, 0.25)]


def test_wandb_offline_writes_its_run_into_the_run_folder(tmp_path: Path, offline: Any) -> None:
    made = make_trackers(OutputConfig(trackers=["wandb"]), tmp_path, RUN_CONFIG, deadline=60)
    made.log(1, {"reward_mean": 0.5})
    made.close()
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 1
    assert rows_of(tmp_path / "metrics.jsonl") == [{"step": 1, "kind": "train", "reward_mean": 0.5}]


def test_answers_go_to_the_file_of_their_kind(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path, 100)
    lines.answers(7, [answer()])
    lines.answers(8, [answer(step=8), answer(step=8)], kind="evaluate")
    lines.close()
    assert [row["step"] for row in rows_of(tmp_path / "rollouts.jsonl")] == [7]
    assert [row["step"] for row in rows_of(tmp_path / "evaluations.jsonl")] == [8, 8]


def test_tensorboard_shows_answers_as_text_that_is_not_read_as_markup(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plugin_util = pytest.importorskip("tensorboard.plugin_util")
    made = make_trackers(OutputConfig(trackers=["tensorboard"]), tmp_path, {}, deadline=60)
    made.answers(3, [answer(completion="<b>4</b> **8** \x1b[2J"), answer(step=8)])
    made.answers(4, [])
    made.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("train/answers/text_summary")
    page = plugin_util.markdown_to_safe_html(event.tensor_proto.string_val[0])
    assert page.count("<pre><code>") == 2
    assert r"answer  &lt;b&gt;4&lt;/b&gt; **8** \x1b[2J" in page


@pytest.fixture(name="offline")
def _offline(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package wandb, told to stay off the network; each run is described in a file of its folder."""
    module = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_NAME", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return module


RUN_CONFIG = {"environment": {"name": "gsm8k"}, "model": {"name": "Qwen/Qwen2.5-0.5B"}}


def test_wandb_gets_answers_as_a_table(tmp_path: Path, offline: Any) -> None:
    made = make_trackers(OutputConfig(trackers=["wandb"]), tmp_path, RUN_CONFIG, deadline=60)
    talk = [{"role": "assistant", "content": "3"}, {"role": "user", "content": "no \u202e"}]
    made.answers(1, [answer(), answer(completion=talk, advantage=None, dropped="filtered_all_right", found="3")])
    made.answers(2, [])
    made.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/files/media/table/train/answers_*.table.json")
    table = json.loads(file.read_text())
    shown = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["completion"] for row in shown] == ["88", "assistant: 3\nuser: no \\u202e"]
    assert [row["dropped"] for row in shown] == [None, "filtered_all_right"]
    assert [row["found"] for row in shown] == [None, "3"]
    assert [(row["reward"], row["columns"]) for row in shown] == [(1.0, '{"answer": 48}')] * 2


def test_a_resumed_run_continues_its_wandb_run(tmp_path: Path, offline: Any) -> None:
    for step in (1, 2):
        made = make_trackers(OutputConfig(trackers=["wandb"]), tmp_path, RUN_CONFIG, deadline=60)
        made.log(step, {"kl": 0.1})
        made.close()
    kept = (tmp_path / "wandb" / "covey_run_id").read_text()
    runs = list(tmp_path.glob("wandb/offline-run-*"))
    assert len(runs) == 2
    assert all(kept in path.name for path in runs)
    assert kept_id(tmp_path / "elsewhere" / "id") != kept


def test_a_wandb_run_is_named_after_what_it_trains_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_name(RUN_CONFIG, Path("outputs/2026-11-22/09-41-44")) == "gsm8k Qwen2.5-0.5B 2026-11-22/09-41-44"
    assert run_name(RUN_CONFIG, Path("multirun/2026-11-22/09-41-44/0")) == (
        "gsm8k Qwen2.5-0.5B multirun/2026-11-22/09-41-44/0"
    )
    assert run_name(RUN_CONFIG, Path("out")) == "gsm8k Qwen2.5-0.5B out"
    assert run_name(RUN_CONFIG, Path("/data/runs/a")) == "gsm8k Qwen2.5-0.5B runs/a"


@pytest.mark.parametrize(("variables", "name"), [({}, "gsm8k Qwen2.5-0.5B run"), ({"WANDB_NAME": "mine"}, "mine")])
def test_wandbs_own_name_of_a_run_wins_and_a_link_is_said(
    variables: dict[str, str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    class Run:
        url = "https://wandb.example/covey/runs/1"
        offline = disabled = False

        def define_metric(self, *names: str, **named: str) -> None:
            return

        def finish(self) -> None:
            return

    def init(**given: Any) -> Run:
        asked.update(given)
        return Run()

    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.delenv("WANDB_NAME", raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    said: list[str] = []
    make_trackers(OutputConfig(trackers=["wandb"]), Path("run"), RUN_CONFIG, 60, said.append).close()
    assert (asked["name"], asked["resume"]) == (name, "allow")
    assert said == ["W&B: https://wandb.example/covey/runs/1"]


def test_cells_of_tables_are_numbers_or_text_that_does_nothing() -> None:
    assert [table_cell(value) for value in (None, True, 1.5, "a\x1b\n")] == [None, True, 1.5, "a\\x1b\n"]
    assert table_cell({"correct": 1.0}) == '{"correct": 1.0}'
    assert table_cell([1, 2]) == "[1, 2]"
    assert table_cell([{"num_tokens": 3, "reward": 0.5}]) == '[{"num_tokens": 3, "reward": 0.5}]'  # turns of an episode


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_step_that_a_resumed_run_makes_again_is_one_point_in_tensorboard(tmp_path: Path, kind: str) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for steps in ((1, 2, 3), (2, 3, 4)):
        board = tracker.TensorBoard(tmp_path)
        for step in steps:
            if kind == "evaluate":  # the evaluation after a step that stays
                board.log(step - 1, {"accuracy": step / 4}, kind="evaluate")
            board.log(step, {"loss": step / 4})
        board.close()
    read = accumulator.EventAccumulator(str(tmp_path))
    read.Reload()
    points = [(event.step, event.value) for event in read.Scalars("train/loss")]
    assert points == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]


def test_a_board_that_got_no_row_closes(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker.TensorBoard(tmp_path).close()
    assert list(tmp_path.iterdir()) == []
