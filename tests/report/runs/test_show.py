"""`covey show`: the result of a run again, its best and worst answers, runs side by side."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey.run.checkpoints.resume import run_lock
from covey_report.runs.show import last_answers

from ...support.processes import in_a_fork

SUMMARY = {
    "status": "completed",
    "steps": 30,
    "skipped_steps": 0,
    "dropped_groups": 0,
    "confidence": 0.95,
    "seconds": 61.0,
    "phases": {"sampling": {"seconds": 61.0, "share": 1.0}},
    "tokens": 1000,
    "tokens_per_second": 16.4,
    "peak_memory_bytes": 1 << 30,
    "environment": {},
}


def look(accuracy: float, reward: float) -> dict[str, Any]:
    def near(value: float) -> dict[str, float]:
        return {"value": value, "low": value - 0.1, "high": value + 0.1}

    facts = {"pass_at_k": {}, "num_prompts": 100, "num_samples": 8, "parts": {}, "reward_parts": {}}
    return {"accuracy": near(accuracy), "reward_mean": near(reward), **facts}


def answer(step: int, name: str, reward: float, **more: Any) -> dict[str, Any]:
    asked = {"prompt_id": name, "prompt": f"{name}?", "columns": {}, "completion": f"of {name}", "num_tokens": 3}
    return {"step": step, **asked, "reward": reward, "parts": {}, "finish_reason": "stop", **more}


def evaluated(step: int, name: str, reward: float, greedy: bool = True) -> dict[str, Any]:
    return answer(step, name, reward, greedy=greedy, correct=reward >= 1)


def write_run(folder: Path, **files: Sequence[Mapping[str, Any]]) -> Path:
    """A run folder with these files of rows."""
    folder.mkdir()
    (folder / "config.yaml").touch()
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(name="run")
def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder named run below the working directory, of a run with two evaluations."""
    monkeypatch.chdir(tmp_path)
    last = [
        evaluated(30, name, reward) for name, reward in zip("abcdefgh", (1, 0.5, 0, 1, 0.25, 1, 0.75, 1), strict=True)
    ]
    first = [evaluated(0, "z", 0.0)]
    folder = write_run(Path("run"), evaluations=[*first, *last, evaluated(30, "i", -1.0, greedy=False)])
    content = SUMMARY | {"before": look(0.2, 0.3), "after": look(0.5, 0.6)}
    gains = {
        "accuracy": {"value": 0.3, "low": 0.1, "high": 0.4},
        "reward_mean": {"value": 0.3, "low": 0.2, "high": 0.4},
    }
    content |= {"gain": gains | {"parts": {}, "reward_parts": {}}}
    (folder / "summary.json").write_text(json.dumps(content))
    return folder


def test_a_run_is_shown_with_its_table_its_best_and_its_worst_answers(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "run", "--answers", "2"]) == 0
    out = capsys.readouterr().out
    (accuracy,) = [line.split("%")[1].split() for line in out.splitlines() if line.startswith("accuracy")]
    assert accuracy == ["20.0", "[10.0,", "30.0]", "50.0", "[40.0,", "60.0]", "+30.0", "[10.0,", "40.0]"]
    asked = [line.strip() for line in out.splitlines() if line.startswith("  prompt")]
    assert asked == ["prompt  a?", "prompt  d?", "prompt  i?", "prompt  c?"]
    assert "best answers (of 8 greedy and 1 sampled kept, step 30)" in out
    assert "step 30, c: reward 0.000, greedy, wrong, 3 tokens" in out
    assert "step 30, i: reward -1.000, sampled, wrong, 3 tokens" in out
    assert out.splitlines()[-1] == "run folder: run"


def test_settings_that_a_resume_changed_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = {"after_step": 24, "changes": {"optimizer.lr": {"from": 0.0002, "to": 0.001}}}
    (run / "changes.jsonl").write_text(json.dumps(change) + "\n")
    assert main(["show", "run"]) == 0
    assert "optimizer.lr 0.0002 -> 0.001 from step 25" in capsys.readouterr().out.splitlines()


def test_answers_that_are_right_are_never_among_the_worst(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    right = [evaluated(4, name, 1.0) for name in "abcdefgh"]
    write_run(Path("good"), evaluations=right)
    write_run(Path("mixed"), evaluations=[*right, evaluated(4, "s", 0.5, greedy=False)])
    write_run(Path("even"), rollouts=[answer(7, name, 0.5) for name in "abcdefgh"])
    for name, shown in (("good", []), ("mixed", ["s?"]), ("even", [])):
        assert main(["show", name, "--answers=2"]) == 0
        out = capsys.readouterr().out
        asked = [line.split()[1] for line in out.splitlines() if line.startswith("  prompt")]
        assert asked == ["a?", "b?", *shown]
        assert ("no answer is wrong (of 8 greedy and 0 sampled kept, step 4)" in out) == (name == "good")


def test_answers_without_a_reward_are_neither_best_nor_worst_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    taught = [answer(7, name, 0.0) | {"reward": None} for name in "xyz"]
    write_run(
        Path("both"),
        rollouts=[*taught, *(answer(7, name, -value) for name, value in zip("abc", (1, 2, 3), strict=True))],
    )
    write_run(Path("taught"), rollouts=taught)
    for name, shown in (("both", ["a?", "c?"]), ("taught", ["x?"])):
        assert main(["show", name, "--answers=1"]) == 0
        asked = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("  prompt")]
        assert asked == shown


def test_no_answer_is_shown_twice(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--answers=5", "run"]) == 0
    asked = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("  prompt")]
    assert asked == ["a?", "d?", "f?", "h?", "g?", "i?", "c?", "e?", "b?"]


def test_a_run_without_a_summary_shows_how_far_it_got_and_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = [{"step": 7, "kind": "train", "time": "2026-11-22T09:41:44.123+00:00", "sampled_reward_mean": 0.5}]
    rollouts = [answer(6, "x", 1.0), answer(7, "y", 0.0, advantage=-1.0, dropped=None)]
    folder = write_run(Path("run"), metrics=steps, rollouts=rollouts)
    with (folder / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 8, "torn')
    assert main(["show", "run"]) == 0
    out = capsys.readouterr().out
    ended = "the run was killed; no checkpoint was saved; remove run and start again"
    assert f"step 7, 2026-11-22T09:41:44.123+00:00: reward 0.5; {ended}\n" in out
    assert "step 7, y: reward 0.000, advantage -1.00, 3 tokens" in out
    assert "x?" not in out
    assert [row["prompt_id"] for row in last_answers(folder)] == ["y"]
    with run_lock(folder):
        assert main(["show", "run"]) == 0
    assert ": reward 0.5; the run continues\n" in capsys.readouterr().out


def test_a_run_killed_in_its_first_step_is_not_shown_as_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("run"))
    assert main(["show", "run"]) == 0
    ended = "the run was killed; no checkpoint was saved; remove run and start again"
    assert f"no step is finished yet; {ended}\n" in capsys.readouterr().out


def test_a_killed_run_whose_lock_is_still_there_is_not_shown_as_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_run(Path("run"))
    killed = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with run_lock(folder):
        (folder / "run.lock").write_text(json.dumps({"pid": killed.pid}))
        assert main(["show", "run"]) == 0
        assert "no step is finished yet; the run continues\n" in capsys.readouterr().out
        killed.kill()
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # ended, and not let go
        assert main(["show", "run"]) == 0
    killed.wait()
    assert "no step is finished yet; the run was killed;" in capsys.readouterr().out


def test_several_runs_stand_side_by_side(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("other"))
    assert main(["show", "run", "other"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "run: completed, 30 steps",
        "  accuracy, %    20.0 ->   50.0  gain +30.0 [10.0, 40.0]",
        "  mean reward   0.300 ->  0.600  gain +0.300 [0.200, 0.400]",
        "other: no summary",
        "runs of the same settings and seed",
        "settings that differ:",
        "  none",
    ]


def test_the_folder_of_a_sweep_stands_for_its_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("multirun").mkdir()
    for number, name in enumerate(("third", "second", "first")):
        os.utime(write_run(Path("multirun") / name) / "config.yaml", (1, 9 - number))
    for words in (["show", "multirun"], ["doctor", "multirun"], ["report", "multirun", "--text"]):
        assert main(words) == 0
        said = capsys.readouterr().out
        assert said.index("first") < said.index("second") < said.index("third")
    assert main(["status", "multirun"]) == main(["rollouts", "multirun"]) == 2
    several = "takes one run folder, got multirun/first multirun/second multirun/third"
    assert capsys.readouterr().err == f"covey: covey status {several}\ncovey: covey rollouts {several}\n"


def test_runs_side_by_side_are_told_apart_by_what_they_differ_in(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(Path("other"))
    for name, rate in (("run", 0.1), ("other", 0.2)):
        (Path(name) / "config.yaml").write_text(f"seed: 0\noptimizer: {{lr: {rate}, name: sgd}}\n")
    assert main(["show", "run", "other"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [said[0], *said[3:]] == [
        "run (optimizer.lr=0.1): completed, 30 steps",
        "other (optimizer.lr=0.2): no summary",
        "other against run: nothing in common",
        "settings that differ:",
        "  optimizer.lr: 0.1 | 0.2",
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "covey show needs a run folder, such as covey show outputs/DATE/TIME"),
        (["run", "nowhere"], "there is no folder nowhere"),
        (["run", "run/config.yaml"], "run/config.yaml is no run folder (it has no config.yaml)"),
        (["run", "--best", "3"], 'no flag "--best"; flags: --answers'),
        (["run", "--answers"], "--answers needs a number"),
        (["run", "--answers", "many"], "--answers must be a whole number >= 0, got many"),
    ],
)
def test_words_that_name_no_run_are_one_line(
    words: list[str], line: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *words]) == 2
    assert capsys.readouterr().err == f"covey: {line}\n"


def test_looking_at_a_run_does_not_wait_for_torch() -> None:
    code = "import sys, covey_report.runs.show; print({'torch', 'transformers', 'hydra'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"


def test_what_only_one_run_sets_is_said_of_it_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, settings in (("run", "loss_options: {}"), ("other", "loss_options: {eps_low: 0.2}")):
        Path(name).mkdir(exist_ok=True)
        Path(name, "config.yaml").write_text(f"algorithm:\n  {settings}\n")
    assert main(["show", "run", "other"]) == 0
    shown = capsys.readouterr().out
    assert "run: completed" in shown
    assert "other (algorithm.loss_options.eps_low=0.2): " in shown


@pytest.mark.parametrize("words", [["show", "run"], ["show", "run", "run"], ["config"], ["--help"]])
def test_a_reader_who_closes_the_pipe_is_no_error(run: Path, words: list[str]) -> None:
    def shown() -> tuple[int, str]:
        read, write = os.pipe()
        os.close(read)
        os.dup2(write, 1)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), StringIO()  # noqa: SIM115 - the fork's own
        code = main(words)
        sys.stdout.flush()
        return code, sys.stderr.getvalue()

    assert in_a_fork(shown) == (0, "")


ODD = ("[]", "3", "null", "{}", '{"step": "x"}', '{"step": null, "kind": "train"}', "[" * 100_000, "\\0")


@pytest.mark.parametrize("text", ODD)
@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "evaluations.jsonl", "rollouts.jsonl"])
def test_what_a_run_does_not_write_is_one_line(
    run: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in ("evaluations.jsonl", "rollouts.jsonl", "summary.json"):
        (run / file).unlink(missing_ok=True)
    (run / name).write_text(f"{text}\n")
    assert main(["show", "run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("covey: run/")
    assert (error.count("\n"), error.count("Traceback")) == (1, 0)
    assert len(error) < 300


@pytest.mark.parametrize("command", [["show", "run"], ["report", "run", "--text"]])
def test_no_name_in_a_run_begins_a_line_of_its_own(
    run: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    forged = "x\nWARNING: forged \x1b[31m"
    summary = json.loads((run / "summary.json").read_text())
    summary["phases"] = {forged: {"seconds": 1.0, "share": 0.5}, **summary["phases"]}
    summary |= {"status": forged, "reward_hacking": forged}
    (run / "summary.json").write_text(json.dumps(summary))
    update = {"step": 1, "kind": "train", "groups": [{"prompt_id": forged, "rewards": [0.0, 1.0]}]}
    (run / "updates.jsonl").write_text(json.dumps(update) + "\n")
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "WARNING: forged" in printed
    assert not [line for line in printed.splitlines() if line.startswith("WARNING")]
    assert "\x1b[31m" not in printed


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["summary.json", "versions.json"])
def test_a_pipe_or_a_link_in_their_place_is_not_waited_for_or_followed(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, put in enumerate((os.mkfifo, lambda path: path.symlink_to("/etc/passwd"))):
        folder = write_run(Path(f"run{number}"))
        put(folder / name)
        status = main(["show", str(folder)])
        printed = capsys.readouterr()
        assert "root:" not in printed.out + printed.err
        assert (status, printed.err.count("\n")) == ((2, 1) if name == "summary.json" else (0, 0)), printed.err


def test_a_failed_run_is_shown_with_its_reason(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = SUMMARY | {"status": "failed", "steps": 0, "before": None, "after": None, "gain": None}
    (run / "summary.json").write_text(json.dumps(failed))
    (run / "covey.log").write_text("INFO: the run ended here: the disk is full\n")
    assert main(["show", "run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "sick, D36 ended early: the run ended before the first step was done: the disk is full" in shown
    assert main(["doctor", "run"]) == 4
    advice = "once the cause is gone: no checkpoint was saved; remove run and start again"
    assert advice in capsys.readouterr().out
