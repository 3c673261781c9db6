"""What `covey status` says of a run that trains, and of one that has ended."""

import json
import os
from pathlib import Path

import pytest

from covey.cli.main import main
from covey.config.auto_adjust import add_correction
from covey.loop import train
from covey.run.checkpoints.resume import run_lock

from ...support.fake_ray import fake_ray
from ...support.small import scripted, small_config, use

STATUS = {
    "time": "2026-11-22T09:41:44.123+00:00",
    "trainer": {"step": 3, "state": "training", "version": 3, "groups_finished": 2, "groups_pending": 6},
    "samplers": [
        {"sampler": 0, "pid": 17, "state": "sampling", "version": 3, "groups_under_way": 4, "tokens": 99, "restarts": 1}
    ],
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "status.json").write_text(json.dumps(STATUS))
    return tmp_path


def test_a_run_that_trains_is_told_as_it_is_now(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_lock(run):
        assert main(["status", str(run)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "step 4" in said
    assert "has ended" not in said


def test_a_run_that_has_ended_is_not_told_as_one_that_trains(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "this run has ended after 3 steps; its last word was at 2026-11-22" in said
    assert "training" not in said
    assert not (run / "run.lock").exists(), "who looks leaves nothing"
    (run / "run.lock").write_text("last owner")
    assert main(["status", str(run)]) == 0
    assert (run / "run.lock").read_text() == "last owner"


@pytest.mark.long
def test_a_run_over_samplers_that_was_trained_to_its_end_is_told_as_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, scripted())
    config, _ = add_correction(
        small_config(num_steps=3, source="ray", max_staleness=1, devices__sampler=2, preflight__enabled=False)
    )
    with fake_ray():
        train(config, tmp_path)
    capsys.readouterr()
    assert main(["status", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "this run has ended after 3 steps; its last word was at " in said
    assert said.count("ended") == 1 + 3, "the trainer and two samplers"
    assert not {"sampling", "training", "waiting", "starting"} & set(said.split())


@pytest.mark.parametrize("content", ["", "[]", '{"time": "now"}', '{"time": "now", "trainer": {}, "samplers": []}'])
def test_a_status_that_no_run_writes_is_one_line(run: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    (run / "status.json").write_text(content)
    assert main(["status", str(run)]) == 2
    said = capsys.readouterr().err
    assert f"{run / 'status.json'} does not hold what a run writes there" in said
    assert said.count("\n") == 1


def test_a_folder_is_named_as_it_is_called(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "lr[bold]=:100:"
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 0\n")
    (folder / "status.json").write_text(json.dumps(STATUS))
    assert main(["status", str(folder)]) == 0
    assert str(folder) in capsys.readouterr().out


def test_latest_is_the_run_that_was_begun_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status", "latest"]) == 2
    assert capsys.readouterr().err == (
        "covey: latest is the run below outputs or multirun that was begun last, and there is none; name a run folder\n"
    )
    for when, name in ((200, "outputs/today/b"), (300, "multirun/today/0"), (100, "outputs/today/c")):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("seed: 0\n")
        os.utime(folder / "config.yaml", (when, when))
        (folder / "status.json").write_text(json.dumps(STATUS))
    assert main(["status", "latest"]) == 0
    assert "multirun/today/0" in capsys.readouterr().out
    (tmp_path / "latest").symlink_to("outputs/today/b")
    assert main(["status", "latest"]) == 0
    assert capsys.readouterr().out.rstrip().endswith(", latest"), "a folder of that name is meant where there is one"
