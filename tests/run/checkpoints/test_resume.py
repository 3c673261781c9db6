"""Which run is gone on with, with which settings, and what is said about it."""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.cli.main import main
from covey.config.compose import to_yaml
from covey.config.schema import Config
from covey.loop import train
from covey.run import trust
from covey.run.checkpoints.checkpoint import SETTINGS
from covey.run.checkpoints.manifest import MANIFEST, render
from covey.run.checkpoints.resume import (
    changed_facts,
    check_same_prompts,
    check_same_reference,
    check_same_run,
    check_unfinished,
    is_journalled,
    log_setting_changes,
    truncate_jsonl,
)
from covey.run.checkpoints.saved_settings import find_run, settings_of
from covey.run.folder import newer_trainings
from covey.run.records.record import RunRecorder
from covey.run.records.step_metrics import StepResult
from covey.run.versions import versions
from covey_report.logs.read import read_run
from covey_report.page.content import verdict

from ...support.small import logging_as_it_was, rewrite, rows, scripted, small_config, use, words


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "cache"))
    with logging_as_it_was():
        yield


def begun(name: str, command: str, at: float = 0.0) -> Path:
    """The folder of a run that was killed before its first checkpoint; `at` is the second it was begun."""
    folder = Path("outputs") / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(Config()))
    os.utime(folder / "config.yaml", (at, at))
    (folder / "versions.json").write_text(json.dumps({"command": command}))
    return folder


def saved(folder: Path) -> Path:
    """The same with a checkpoint, as far as finding it goes."""
    (folder / "checkpoints" / "step-000001").mkdir(parents=True)
    (folder / "checkpoints" / "step-000001" / "manifest.json").write_text("{}")
    return folder


def test_newer_runs_are_train_runs_by_time_not_by_name() -> None:
    older, run = begun("z/z/z", "covey train", 1), begun("2026-01-02/10-00-00", "covey train", 2)
    newer = begun("mine", "covey train seed=3", 3)
    begun("2026-01-02/12-00-00", "covey evaluate model.name=policy", 4)
    program = begun("2026-01-02/13-00-00", "train_json.py --seed 3", 4.5)
    (begun("2026-01-03/10-00-00", "covey train", 5) / "versions.json").unlink()
    assert newer_trainings(run, Path("outputs")) == [newer, program]
    assert newer_trainings(older, Path("outputs")) == [run, newer, program]


@pytest.mark.parametrize("name", ["mine", "2026-01-01/10-00-00", "a/b/c/d"])
def test_the_latest_run_is_the_one_begun_last_wherever_it_lies(name: str) -> None:
    saved(begun("2026-01-02/10-00-00", "covey train", 1))
    saved(begun("z/z", "covey train", 2))
    latest = saved(begun(name, "covey train", 3))
    begun("2026-01-02/12-00-00", "covey train", 4)
    assert find_run("latest", Path("outputs")) == latest


@pytest.mark.parametrize("latest", ["latest", "'latest'"])
def test_resume_latest_names_the_newer_runs_it_passes_over(latest: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = words(environment__num_train=16, environment__num_test=8, num_steps=1)
    assert main(["train", *small, "hydra.run.dir=outputs/2026-01-01/10-00-00"]) == 0
    passed_over = begun("2026-01-02/10-00-00", "covey train", time.time() + 60)
    capsys.readouterr()
    assert main(["train", f"resume={latest}", "num_steps=2", "resume_changes=[num_steps]"]) == 0
    assert capsys.readouterr().err == (
        f"WARNING: resume=latest skips {passed_over}, which is newer and has no checkpoint\n"
    )
    assert main(["train", f"resume={latest}"]) == 2  # finished
    warned, refused = capsys.readouterr().err.splitlines()
    assert warned == f"WARNING: resume=latest skips {passed_over}, which is newer and has no checkpoint"
    assert "is finished (2 of 2 steps)" in refused
    folder = Path("outputs/2026-01-01/10-00-00")
    assert f"skips {passed_over}" in (folder / "covey.log").read_text()
    assert [row["step"] for row in rows(folder / "metrics.jsonl", "train")] == [1, 2]


def test_a_row_without_its_end_goes_and_an_evaluation_that_is_done_again(tmp_path: Path) -> None:
    file, kept, looked = tmp_path / "metrics.jsonl", '{"step": 2}\n', '{"step": 2, "kind": "evaluate"}\n'
    for evaluated, left in ((True, kept + looked), (False, kept)):
        # Another row would be put behind what has no end, and true is no number of a step
        file.write_text(f'{kept}{looked}{{"step": true}}\n{{"step": 1}}')
        truncate_jsonl(file, 2, evaluated=evaluated)
        assert file.read_text() == left


def test_a_run_whose_last_evaluation_is_missing_is_not_finished(tmp_path: Path) -> None:
    config = Config(num_steps=2)
    for facts in ({}, {"score": 0.5}):
        checkpoint = tmp_path / "step-000002"
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / MANIFEST).write_text(render(2, facts, {}))
        with pytest.raises(ValueError, match="is finished") if facts else nullcontext():
            check_unfinished(config, tmp_path, checkpoint)


@pytest.mark.parametrize(("is_whole", "ending"), [(True, "is finished (3 of 3 steps)"), (False, "ranks are started")])
def test_a_finished_run_is_refused_before_ranks_are_started_for_it(
    is_whole: bool, ending: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = begun("old", "covey train")
    config = small_config(num_steps=3, source="ray", devices__trainer=2)
    (folder / "config.yaml").write_text(to_yaml(config))
    text = render(3, {"score": 0.5}, {} if is_whole else {"state.pt": {"bytes": 9, "sha256": "0"}})
    checkpoint = folder / "checkpoints" / "step-000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / MANIFEST).write_text(text)

    def started(*given: Any) -> None:
        raise ValueError("ranks are started")

    monkeypatch.setattr("covey.cluster.trainers.connect", started)
    with pytest.raises(ValueError, match=re.escape(ending)):
        train(replace(config, resume=str(folder)), folder)
    if is_whole:
        assert main(["train", f"resume={folder}", "trust_run=true"]) == 2
        assert ending in capsys.readouterr().err


def test_a_typed_budget_takes_the_place_of_the_runs_and_two_are_refused() -> None:
    folder = begun("2026-01-01/10-00-00", "covey train")
    (folder / "config.yaml").write_text(to_yaml(Config(num_epochs=2.0)))
    found = settings_of(folder, ["num_steps=7", "resume_changes=[num_steps]"])
    assert (found.num_steps, found.num_epochs, found.total_rollouts) == (7, None, None)
    with pytest.raises(ValueError, match=r"^num_steps and num_epochs say twice how long the run is"):
        settings_of(folder, ["num_steps=7", "num_epochs=1.0", "resume_changes=[num_steps]"])


def test_resume_changes_names_settings() -> None:
    folder = begun("2026-01-01/10-00-00", "covey train")
    typed = ["optimizer.lr=0.5", "resume_changes=[optimizer,optimzer.lr]"]
    with pytest.raises(ValueError, match=r"^resume_changes names no setting: optimzer\.lr$"):
        settings_of(folder, typed)
    assert settings_of(folder, [typed[0], "resume_changes=[optimizer]"]).optimizer.lr == 0.5
    with pytest.raises(ValueError, match=r"^algorithm\.advantage_clip=2\.0 differs from"):
        settings_of(folder, ["algorithm.advantage_clip=2.0", "resume_changes=[algorithm.advantage]"])


def test_rows_may_hold_characters_that_look_like_the_end_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    written = [{"step": step, "completion": "a\x85b\u2028c\u2029d\x1ce\r"} for step in (1, 2, 3)]
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in written), newline="\n")
    truncate_jsonl(file, 2)
    assert rows(file) == written[:2]


def test_a_changed_setting_stays_changed_when_the_run_is_resumed_again(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("outputs/2026-01-01/10-00-00")
    small = words(environment__num_train=16, environment__num_test=8, num_steps=1)
    assert main(["train", *small, f"hydra.run.dir={folder}"]) == 0
    assert (
        main(
            ["train", f"resume={folder}", "num_steps=2", "optimizer.lr=0.25", "resume_changes=[num_steps,optimizer.lr]"]
        )
        == 0
    )
    capsys.readouterr()

    assert main(["train", f"resume={folder}"]) == 2
    finished = (
        "is finished (2 of 2 steps): there is nothing to resume; num_steps=N resume_changes=[num_steps] trains on"
    )
    assert finished in capsys.readouterr().err
    assert main(["train", f"resume={folder}", "num_steps=3", "resume_changes=[num_steps]"]) == 0
    assert [row["learning_rate"] for row in rows(folder / "metrics.jsonl", "train")][1:] == [0.25, 0.25]
    assert [row["after_step"] for row in rows(folder / "changes.jsonl")] == [1, 2]
    assert rows(folder / "changes.jsonl")[1]["changes"] == {"num_steps": {"from": 2, "to": 3}}
    assert "optimizer.lr was" in (folder / "covey.log").read_text()
    known = json.loads((folder / "versions.json").read_text())
    assert len(known["earlier_commands"]) == 2  # without the one that was refused
    with pytest.raises(ValueError, match=r"^optimizer\.lr=0\.5 differs from optimizer\.lr=0\.25 of "):
        settings_of(folder, ["optimizer.lr=0.5"])


def test_a_change_that_is_refused_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("outputs/2026-01-01/10-00-00")
    small = words(environment__num_train=16, environment__num_test=8, num_steps=2)
    assert main(["train", *small, f"hydra.run.dir={folder}"]) == 0
    assert main(["train", f"resume={folder}", "num_steps=1", "resume_changes=[num_steps]"]) == 2
    assert "is finished (2 of 1 steps)" in capsys.readouterr().err
    assert main(["train", f"resume={folder}", "recipe=arithmetic"]) == 2
    assert '"recipe=arithmetic" cannot change a run; resume takes' in capsys.readouterr().err
    assert not (folder / "changes.jsonl").exists()


ROWS = (
    *words(num_steps=1),
    *("environment=reward_functions", "environment.in_process=true", "rewards=[lengths:short]", "data.path=rows.jsonl"),
    *("preflight.enabled=false", "output.progress=false"),
)


def rows_run(num_rows: int = 40, *typed: str) -> Path:
    """A finished run over rows of a file, with a reward of the user's."""
    write_rows(num_rows)
    Path("lengths.py").write_text(
        "def short(completions, **columns):\n    return [1 / len(c + '.') for c in completions]\n"
    )
    folder = Path("outputs/rows")
    assert main(["train", *ROWS, *typed, f"hydra.run.dir={folder}"]) == 0
    return folder


def write_rows(num_rows: int, word: str = "number") -> None:
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"{word} {n}: "}) + "\n" for n in range(num_rows)))


@pytest.mark.long
def test_a_failed_resume_leaves_the_run_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    folder = rows_run()
    before = (folder / "summary.json").read_text()
    changed = ["num_steps=2", "rewards=[nomod:f]", "resume_changes=[num_steps,rewards]"]
    assert main(["train", f"resume={folder}", *changed]) == 2
    assert "nomod" in capsys.readouterr().err
    assert not (folder / "changes.jsonl").exists()
    assert (folder / "summary.json").read_text() == before
    assert main(["train", f"resume={folder}", "num_steps=2", "resume_changes=[num_steps]"]) == 0
    assert rows(folder / "changes.jsonl")[0]["changes"] == {"num_steps": {"from": 1, "to": 2}}
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2


@pytest.mark.long
def test_a_resumed_run_is_not_reported_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = rows_run()
    log_step, said = RunRecorder.log_step, list[str]()

    def look(record: RunRecorder, step: int, stepped: StepResult) -> None:
        log_step(record, step, stepped)
        record.settle()
        said.append(verdict(read_run(folder))["text"].partition(",")[0])

    monkeypatch.setattr(RunRecorder, "log_step", look)
    assert main(["train", f"resume={folder}", "num_steps=3", "resume_changes=[num_steps]"]) == 0
    assert [text.partition(" of ")[0] for text in said] == ["Under way: step 2", "Under way: step 3"]
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"


def test_a_resume_with_fewer_rows_compares_prompts_of_both_evaluations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = rows_run(40, "evaluation.num_prompts=4")
    write_rows(20)
    changed = ["num_steps=2", "resume_changes=[num_steps,data.path]"]
    assert main(["train", f"resume={folder}", *changed]) == 0
    content = json.loads((folder / "summary.json").read_text())
    assert (content["before"]["num_prompts"], content["after"]["num_prompts"]) == (4, 2)
    print(content["gain"])
    assert "gain computed on the 1 prompts common to both evaluations (4 and 2)" in capsys.readouterr().err


def test_a_run_resumes_with_other_prompts_only_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    folder = rows_run()
    write_rows(40, "figure")
    more = ["num_steps=2", "resume_changes=[num_steps]"]
    assert main(["train", f"resume={folder}", *more]) == 2
    assert capsys.readouterr().err == (
        "covey: the prompts of data.path=rows.jsonl are not those that outputs/rows was trained on; "
        "pass resume_changes=[data.path] to resume anyway (the run will not be bit-for-bit reproducible)\n"
    )
    assert not (folder / "changes.jsonl").exists()
    more = ["num_steps=2", "resume_changes=[num_steps,data.path]"]
    assert main(["train", f"resume={folder}", *more]) == 0
    assert "no prompt is in both evaluations" in capsys.readouterr().err
    assert json.loads((folder / "summary.json").read_text())["gain"] is None
    (folder / "checkpoints/step-000002/manifest.json").unlink()  # as if it had been killed before it was whole
    assert main(["train", f"resume={folder}"]) == 0


def test_a_checkpoint_that_does_not_say_which_prompts_it_had_is_gone_on_with() -> None:
    folder = rows_run()
    manifest = folder / "checkpoints/step-000001/manifest.json"
    rewrite(manifest, lambda old: {"prompts": None})
    write_rows(40, "figure")
    assert main(["train", f"resume={folder}", "num_steps=2", "resume_changes=[num_steps]"]) == 0


def test_prompts_are_compared_with_those_that_the_run_had_last(tmp_path: Path) -> None:
    lines = [{"after_step": step, "changes": {}, "prompts": name} for step, name in ((1, "first"), (2, "last"))]
    (tmp_path / "changes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    check_same_prompts(Config(), tmp_path, tmp_path, "last")
    with pytest.raises(ValueError, match=r"are not those that .* was trained on"):
        check_same_prompts(Config(), tmp_path, tmp_path, "first")


def with_facts(folder: Path, **facts: Any) -> Path:
    """A checkpoint as far as its manifest goes."""
    (folder / "step-000002").mkdir(parents=True, exist_ok=True)
    (folder / "step-000002" / MANIFEST).write_text(render(2, facts, {}))
    return folder / "step-000002"


def test_another_reference_is_refused_where_both_are_known(tmp_path: Path) -> None:
    for then, now in (("", "b"), ("a", ""), ("a", "a")):
        check_same_reference(Config(), with_facts(tmp_path, reference=then), now)
    with pytest.raises(ValueError, match=r"^the reference of this run was a, and changed settings would make it b"):
        check_same_reference(Config(), with_facts(tmp_path, reference="a"), "b")


def test_another_number_of_threads_or_processes_is_told(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    checkpoint = with_facts(tmp_path, versions=versions(), num_ranks=3, num_threads=threads + 1)
    told = ["processes was 3 and is 1", f"threads was {threads + 1} and is {threads}"]
    assert changed_facts(checkpoint, {}) == told
    assert changed_facts(with_facts(tmp_path, versions=versions(), num_ranks=1, num_threads=threads), {}) == []


def test_a_checkpoint_with_a_setting_that_the_run_was_given_later_is_its_own() -> None:
    run = begun("run", "covey train")
    checkpoint = with_facts(run / "checkpoints")
    (checkpoint / SETTINGS).write_text(to_yaml(Config(seed=4)))
    for to, refusal in ((3, pytest.raises(ValueError, match="was saved with seed=4 and is of")), (4, nullcontext())):
        line = {"after_step": 1, "changes": {"seed": {"from": 0, "to": to}}}
        (run / "changes.jsonl").write_text(json.dumps(line) + "\n")
        with refusal:
            check_same_run(Config(), run, checkpoint)


def test_a_run_begins_again_with_its_journal_only_with_its_own_settings() -> None:
    run = begun("run", "covey train")
    assert not is_journalled(Config(), run)
    (run / "journal").mkdir()
    (run / "journal" / "step-000000.0.log").touch()
    assert is_journalled(Config(), run)
    assert not is_journalled(Config(seed=4), run)


@pytest.mark.parametrize("own", [True, False])
def test_a_change_of_settings_seals_no_folder_of_another_user(own: bool) -> None:
    run = begun("run", "covey train")
    if own:
        trust.seal(run)
    said: list[str] = []
    log_setting_changes(Config(seed=4), run, with_facts(run / "checkpoints"), "", said.append)
    assert said == ["seed 0 -> 4 from step 3"]
    assert rows(run / "changes.jsonl")[0]["changes"] == {"seed": {"from": 0, "to": 4}}
    assert trust.is_own(run) == own


# ------------------------------------------------------------------------------------------------ from a program


def test_a_folder_takes_one_run_which_the_command_resumes() -> None:
    config = small_config(environment__num_train=16, environment__num_test=8)
    train(config, "outputs/twice")
    folder = Path("outputs/twice")
    before = (folder / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match=r"^outputs/twice already holds a run \(config\.yaml\); resume="):
        train(config, folder)
    assert (folder / "metrics.jsonl").read_text() == before
    assert "torch" in json.loads((folder / "versions.json").read_text())
    assert main(["train", "resume=outputs/twice", "num_steps=3", "resume_changes=[num_steps]"]) == 0
    assert [row["step"] for row in rows(folder / "metrics.jsonl", "train")] == [1, 2, 3]


def finished(name: str, **changes: Any) -> Path:
    """A run of two steps and two checkpoints, without an evaluation to speak of."""
    settings = {"output__save_every": 1, "preflight__enabled": False, "evaluation__num_prompts": 1, **changes}
    train(small_config(**settings), name)
    return Path(name)


def goes_on(folder: Path, **changes: Any) -> list[int]:
    """The steps of the run, once it was resumed."""
    finished(str(folder), resume=str(folder), **changes)
    return [row["step"] for row in rows(folder / "metrics.jsonl", "train")]


@pytest.mark.long
def test_a_program_changes_only_the_settings_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, scripted())
    folder = finished("run", num_epochs=0.5)  # of six prompts two steps
    shutil.rmtree(folder / "checkpoints" / "step-000002")
    refused = r"^optimizer\.lr=0\.5 differs from optimizer\.lr=0\.01 of run; pass resume_changes=\[optimizer\.lr\] to"
    with pytest.raises(ValueError, match=refused):
        goes_on(folder, num_epochs=0.5, optimizer__lr=0.5)
    assert goes_on(folder, num_epochs=0.5) == [1, 2]
    named = ["num_epochs", "optimizer"]
    assert goes_on(folder, num_epochs=1.0, optimizer__lr=0.5, resume_changes=named) == [1, 2, 3]
    assert list(rows(folder / "changes.jsonl")[0]["changes"]) == ["num_steps", "num_epochs", "optimizer.lr"]


@pytest.mark.long
def test_a_checkpoint_of_another_run_is_refused_by_what_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, scripted())
    own, other = finished("own"), finished("other", seed=1)
    for folder in (own, other):
        assert goes_on(folder, seed=int(folder == other), num_steps=3, resume_changes=["num_steps"]) == [1, 2, 3]
    shutil.rmtree(own / "checkpoints" / "step-000003")
    shutil.copytree(other / "checkpoints" / "step-000003", own / "checkpoints" / "step-000003")
    more = {"num_steps": 4, "resume_changes": ["num_steps"]}
    refused = r"^own/checkpoints/step-000003 was saved with seed=1 and is of another run: this one began with seed=0; "
    with pytest.raises(ValueError, match=refused):
        goes_on(own, **more)
    assert goes_on(own, **more | {"resume_changes": ["num_steps", "seed"]}) == [1, 2, 3, 4]
    # A copy of the whole run is the run
    shutil.copytree(other, "copy")
    assert goes_on(Path("copy"), seed=1, **more) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "row", ["[]", "3", "null", '"step"', "{}", '{"step": null}', '{"step": "1"}', '{"step": [1]}', "[" * 100_000]
)
def test_rows_that_no_run_writes_are_dropped_like_torn_ones(tmp_path: Path, row: str) -> None:
    file = tmp_path / "rollouts.jsonl"
    file.write_text(f'{{"step": 1}}\n{row}\n{{"step": 2}}\n{{"step": 3}}\n')
    truncate_jsonl(file, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'
