"""What `covey status` says of a run that trains, and of one that has ended."""

import json
from pathlib import Path

import pytest

from covey.cli.main import main
from covey.run.checkpoints.resume import run_lock

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
    assert "this run has ended; its last word was at 2026-11-22" in " ".join(capsys.readouterr().out.split())
    assert not (run / "run.lock").exists(), "who looks leaves nothing"
    (run / "run.lock").write_text("last owner")
    assert main(["status", str(run)]) == 0
    assert (run / "run.lock").read_text() == "last owner"
