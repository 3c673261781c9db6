"""Files of a run that are damaged, and terminals that are none: one line, whole lines, and no character that acts."""

import json
from pathlib import Path

import pytest

from covey.cli.main import main
from covey.system.jsonl import encode_row

from .test_health import trl_folder, trl_row


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Path:
    """A run of two steps and a rollout each, as far as these verbs read it."""
    (tmp_path / "config.yaml").write_text("num_steps: 2\n")
    own = {"prompt": "?", "completion": "a", "columns": {}, "parts": {"value": 1.0}, "reward": 1.0, "advantage": None}
    kept = [{"step": step, "prompt_id": f"p{step}", **own} for step in (1, 2)]
    steps = [{"step": step, "kind": "train", "sampled_reward_mean": 0.5} for step in (1, 2)]
    for name, content in (("rollouts", kept), ("metrics", steps)):
        (tmp_path / f"{name}.jsonl").write_bytes(b"".join(map(encode_row, content)))
    return tmp_path


@pytest.mark.parametrize("damage", [b"\0" * 40, b"a: [", b"\xff\xff", b"{a: &a [*a]}: 1"])
@pytest.mark.parametrize("verb", ["report", "doctor", "watch"])
def test_settings_that_no_run_writes_are_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], verb: str, damage: bytes
) -> None:
    (run / "config.yaml").write_bytes(damage)
    assert main([verb, str(run)]) == 2
    said = capsys.readouterr().err
    assert f"{run / 'config.yaml'} does not hold what a run writes there" in said
    assert said.count("\n") == 1


def test_a_watched_run_is_as_wide_in_a_pipe_as_a_report(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    changes = [{"step": step, "kind": "train", "completion_length_mean": 10.0 * step} for step in (1, 2)]
    (run / "metrics.jsonl").write_bytes(b"".join(map(encode_row, changes)))
    (run / "summary.json").write_bytes(encode_row({"status": "failed", "steps": 2}))
    (run / "covey.log").write_text(f"INFO: the run ended here: {'reason ' * 9}")
    assert main(["report", str(run), "--text"]) == 0
    report = capsys.readouterr().out
    assert main(["watch", str(run)]) == 0
    watched = capsys.readouterr().out
    assert [line.rstrip() for line in watched.splitlines()] == [line.rstrip() for line in report.rstrip().splitlines()]
    assert max(map(len, report.splitlines())) > 80  # rich's width where there is no terminal


def test_what_the_doctor_says_to_scripts_is_ascii(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trl_folder(tmp_path / "\u202e日", [trl_row(step) for step in range(1, 31)])
    main(["doctor", "--json", str(folder)])
    said = capsys.readouterr().out
    assert said.isascii()
    assert json.loads(said)[0]["run"] == "\u202e日"
