"""The command line, from words to exit codes."""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from covey.cli import main as main_module
from covey.cli.help import group_choices
from covey.cli.main import main
from covey.config.schema import Config
from covey.run import folder as run_folder
from covey.run.records.summary import RunFacts, summary, write_summary
from covey.types import RunStopped

from ..support.small import logging_as_it_was

Work = Callable[[Config, Path], None]

LOADING = "loading nano for environment=arithmetic\n"
"""What is said before anything heavy is imported."""
VERBS = {
    *("train", "cold-start", "judge", "evaluate", "audit", "check", "show", "rollouts", "report", "export"),
    *("doctor", "watch", "status", "replay", "serve", "branch", "verify", "config", "translate", "plan", "machines"),
}


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test runs in an empty folder and leaves logging as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COVEY_DEBUG", raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with logging_as_it_was():
        yield


def do(monkeypatch: pytest.MonkeyPatch, work: Work, verb: str = "train") -> list[tuple[Config, Path]]:
    """Let a verb do `work`; returns the list in which its calls are remembered."""
    calls: list[tuple[Config, Path]] = []

    def remembered(config: Config, folder: Path, *asked: object) -> None:
        calls.append((config, folder))
        work(config, folder)

    monkeypatch.setitem(main_module.WORK, verb, remembered)
    return calls


def nothing(config: Config, folder: Path) -> None:
    pass


def fail_with(error: BaseException) -> Work:
    def work(config: Config, folder: Path) -> None:
        raise error

    return work


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | environment, check=False
    )


# ------------------------------------------------------------------------------------------------ mistakes

ALL_VERBS = (
    "verbs: train, cold-start, judge, evaluate, audit, check, show, rollouts, report, export, doctor, "
    "watch, status, replay, serve, branch, verify, config, translate, plan, machines"
)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trian"], 'no verb "trian"; did you mean train?; ' + ALL_VERBS),
        (["compare", "a", "b"], 'no verb "compare"; did you mean report?; ' + ALL_VERBS),
        (["recipe=gsm8k"], 'no verb "recipe=gsm8k"; did you mean covey train recipe=gsm8k?; ' + ALL_VERBS),
        (["version"], 'no verb "version"; did you mean --version?; ' + ALL_VERBS),
        ([""], 'no verb ""; ' + ALL_VERBS),
        (["resume", "mine"], 'no verb "resume"; did you mean covey train resume=mine?; ' + ALL_VERBS),
        (["train", "--confg-name"], 'no flag "--confg-name"; did you mean --config-name?; see `covey train --help`'),
        (["train", "--config-name"], "--config-name needs a value"),
        (["train", "-cn", "gsm8k"], 'no "gsm8k" for --config-name in covey or --config-dir; there is recipe=gsm8k'),
        (["train", "--config-dir", "nowhere"], "Additional config directory '{cwd}/nowhere' not found"),
        (["config", "-m"], "covey config prints one configuration; --multirun is for covey train"),
        (["train", "environment=arithmetic", "group_size=1"], "group_size must be >= 2, got 1"),
        (["train", "environment=arithmetic", "group_size=1", "hydra.run.dir=mine"], "group_size must be >= 2, got 1"),
        (["train", "sed=3"], "unknown setting sed; did you mean seed?"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_exit_code_2_and_leaves_no_folder(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.err == f"covey: {line.format(cwd=tmp_path)}\n"
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_leaves_a_folder_that_was_there_before(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert main(["train", "environment=arithmetic", "group_size=1", "hydra.run.dir=mine"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.long
@pytest.mark.parametrize(
    "words", [["train", "environment=arithmetic", "group_size=1"], ["train", "+foo=1"], ["evaluate", "seed=abc"]]
)
def test_a_mistake_in_a_plain_value_is_refused_before_torch_is_imported(words: list[str], tmp_path: Path) -> None:
    done = run_python(
        f"import sys; from covey.cli.main import main; code = main({words});"
        "print('HEAVY', sorted({'torch', 'asyncio', 'urllib.request'} & set(sys.modules))); sys.exit(code)"
    )
    assert (done.returncode, done.stdout) == (2, "HEAVY []\n")


@pytest.mark.parametrize(
    "error", [ValueError("rows.jsonl line 3:\n no prompt"), RunStopped("rows.jsonl line 3: no prompt")]
)
def test_a_users_error_in_a_run_is_one_line_its_traceback_logged(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(config: Config, folder: Path) -> None:
        (folder / "metrics.jsonl").write_text("{}\n")
        raise error

    do(monkeypatch, work)
    assert main(["train", "environment=arithmetic", "hydra.run.dir=mine"]) == 2
    printed = capsys.readouterr()
    assert printed.err == "covey: rows.jsonl line 3: no prompt\n"
    assert printed.out == f"{LOADING}run folder: mine\n"
    assert "Traceback" in Path("mine/covey.log").read_text()


@pytest.mark.parametrize("before", [None, [], ["covey.log", "notes.txt"]])
def test_a_run_refused_before_its_logs_open_leaves_one_line(
    before: list[str] | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    do(monkeypatch, fail_with(ValueError("rows.jsonl line 3: no prompt")))
    if before is not None:
        Path("mine").mkdir()
    for name in before or ():
        Path("mine", name).touch()
    for _ in range(2):
        assert main(["train", "environment=arithmetic", "hydra.run.dir=mine"]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err) == (LOADING, "covey: rows.jsonl line 3: no prompt\n")
        assert (sorted(os.listdir("mine")) if os.path.exists("mine") else None) == before


def test_a_defect_shows_its_traceback_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    do(monkeypatch, fail_with(RuntimeError("shapes differ")))
    assert main(["train", "recipe=arithmetic"]) == 1
    assert capsys.readouterr().err.endswith("RuntimeError: shapes differ\n")


def test_debugging_shows_the_traceback_of_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COVEY_DEBUG", "1")
    assert main(["config", "group_size=1"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_is_one_line_and_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    do(monkeypatch, fail_with(KeyboardInterrupt()))
    assert main(["train", "environment=arithmetic", "hydra.run.dir=mine"]) == 130
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (f"{LOADING}run folder: mine\n", "covey: interrupted\n")


# ------------------------------------------------------------------------------------------------ the run folder


def test_a_run_gets_its_config_and_a_folder_by_date_and_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    calls = do(monkeypatch, nothing)
    assert main(["train", "recipe=arithmetic", "seed=3"]) == 0
    ((config, folder),) = calls
    assert config.seed == 3
    assert config.cold_start.enabled
    assert folder.parents[1] == tmp_path / "outputs"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.yaml",
        "report.html",
        "run.lock",
        "run.seal",
        "versions.json",
    ]
    assert "\nnum_steps: " in (folder / "config.yaml").read_text()
    versions = json.loads((folder / "versions.json").read_text())
    assert versions["command"] == "covey train recipe=arithmetic seed=3"
    assert versions["covey"] == "0.1.0"
    assert capsys.readouterr().out == f"{LOADING}run folder: {folder.relative_to(tmp_path)}\n"
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize("verb", ["train", "cold-start", "judge", "evaluate", "check"])
def test_each_verb_does_its_own_work(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = do(monkeypatch, nothing, verb)
    assert main([verb, "model=nano"]) == 0
    assert len(calls) == 1


def test_the_summary_of_a_run_is_shown_when_it_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = RunFacts(status="completed", seed=0, steps=5, seconds=2.0, phases={"sampling": 1.0})

    def work(config: Config, folder: Path) -> None:
        write_summary(folder, summary(facts, None, None))

    do(monkeypatch, work)
    assert main(["train", "environment=arithmetic", "hydra.run.dir=mine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("completed · 5 steps") for line in lines)
    assert lines[-1] == "run folder: mine"


def test_a_long_import_is_told_until_it_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def slow_import() -> Iterator[None]:
        yield
        time.sleep(0.2)

    do(monkeypatch, nothing)
    monkeypatch.setattr(main_module.machine, "heavy_imports", slow_import)
    monkeypatch.setattr(main_module, "QUIET_SECONDS", 0.02)
    assert main(["train", "environment=arithmetic", "hydra.run.dir=mine"]) == 0
    loading, *told, _ = capsys.readouterr().out.removesuffix("run folder: mine\n").splitlines()
    assert f"{loading}\n" == LOADING
    assert {"importing torch and transformers, 0 s"} <= set(told)


def test_a_folder_the_user_named_is_never_written_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    calls = do(monkeypatch, nothing)
    assert main(["train", "environment=arithmetic", "hydra.run.dir=mine", "seed=1"]) == 0
    capsys.readouterr()
    for resumed in ("it has no checkpoint to resume from:", f"resume={tmp_path}/mine continues it, or"):
        assert main(["train", "environment=arithmetic", "hydra.run.dir=mine", "seed=2"]) == 2
        printed = capsys.readouterr()
        held = f"{tmp_path}/mine already holds a run (config.yaml)"
        assert printed.err == f"covey: {held}; {resumed} name another folder\n"
        assert printed.out == ""  # nothing is loaded for it
        Path("mine/checkpoints/step-000001").mkdir(parents=True, exist_ok=True)
        Path("mine/checkpoints/step-000001/manifest.json").touch()
    assert [config.seed for config, _ in calls] == [1]


def test_runs_that_start_in_the_same_second_never_share_a_folder(tmp_path: Path) -> None:
    def claim(number: int) -> Path:
        return run_folder.create_run_folder(tmp_path / "12-00-00", f"seed: {number}\n", exact=False)

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(claim, range(8)))
    assert len(set(folders)) == 8
    assert (tmp_path / "12-00-00" / "config.yaml").exists()
    assert (tmp_path / "12-00-00-8" / "config.yaml").exists()
    assert [(folder / "config.yaml").read_text() for folder in folders] == [f"seed: {n}\n" for n in range(8)]


def test_only_empty_folders_of_a_refused_run_are_removed(tmp_path: Path) -> None:
    refused = tmp_path / "outputs" / "day" / "time"
    refused.mkdir(parents=True)
    (tmp_path / "outputs" / "other").mkdir()
    run_folder.discard_if_empty(refused)
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["other"]


def test_the_current_folder_stays_where_a_refused_run_was_to_lie_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    run_folder.discard_if_empty(Path("mine"))
    assert tmp_path.is_dir()
    assert not Path("mine").exists()


def test_a_warning_reaches_the_terminal_and_everything_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(config: Config, folder: Path) -> None:
        logging.getLogger("covey.test").info("quiet")
        logging.getLogger("covey.test").warning("3 rows skipped")
        logging.getLogger("bitsandbytes.library").error("noise")

    do(monkeypatch, work)
    assert main(["train", "environment=arithmetic", "hydra.run.dir=mine"]) == 0
    assert capsys.readouterr().err == "WARNING: 3 rows skipped\n"
    assert [line.split(" ", 2)[2] for line in Path("mine/covey.log").read_text().splitlines()] == [
        "INFO covey.test: quiet",
        "WARNING covey.test: 3 rows skipped",
        "ERROR bitsandbytes.library: noise",
    ]


# ------------------------------------------------------------------------------------------------ hydra


@pytest.mark.long
def test_a_multirun_runs_every_combination_and_reports_the_ones_that_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(config: Config, folder: Path) -> None:
        if config.seed == 2:
            raise ValueError("no luck")

    calls = do(monkeypatch, work)
    assert main(["train", "environment=arithmetic", "seed=1,2,3", "--multirun"]) == 2
    assert [(config.seed, folder.name) for config, folder in calls] == [(1, "0"), (2, "1"), (3, "2")]
    assert calls[0][1].parents[2].name == "multirun"
    printed = capsys.readouterr()
    assert [line for line in printed.out.splitlines() if line.startswith("job")] == [
        "job 0: seed=1",
        "job 1: seed=2",
        "job 2: seed=3",
    ]
    assert printed.err == "covey: no luck\n"
    shown = [line.rpartition("/")[2] for line in printed.out.splitlines() if line.startswith("multirun")]
    assert shown == ["0 (seed=1): no summary", "2 (seed=3): no summary"]


@pytest.mark.long
def test_a_configuration_of_ones_own_begins_with_coveys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_conf").mkdir()
    (tmp_path / "my_conf" / "my_run.yaml").write_text("defaults: [config, _self_]\nseed: 77\n")
    (tmp_path / "my_conf" / "bare.yaml").write_text("seed: 77\n")
    calls = do(monkeypatch, nothing)
    assert main(["train", "--config-dir", "my_conf", "--config-name", "my_run", "num_steps=2"]) == 0
    assert [(config.seed, config.num_steps) for config, _ in calls] == [(77, 2)]
    assert calls[0][1].parents[1].name == "outputs"
    assert main(["train", "--config-dir=my_conf", "--config-name=bare"]) == 2
    assert capsys.readouterr().err == (
        'covey: a configuration of your own must begin with "defaults: [config, _self_]"\n'
    )


def test_config_prints_settings_and_derived_numbers_and_makes_no_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["config", "groups_per_step=4", "group_size=2"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("seed: 0\n")
    assert "#   rollouts_per_step: 8\n" in shown
    assert list(tmp_path.iterdir()) == []


def test_modules_beside_the_user_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "beside_the_user.py").write_text(
        "def half(scores, *, share=0.5):\n    return scores.rewards_N * share\n"
    )
    assert main(["config", "algorithm.advantage=beside_the_user:half", "algorithm.advantage_options.share=0.25"]) == 0
    assert main(["config", "algorithm.advantage=beside_the_user:half", "algorithm.advantage_options.part=1"]) == 2
    assert "algorithm.advantage_options must be among share for half, got part" in capsys.readouterr().err


def test_another_pipe_than_the_terminals_that_breaks_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_module.report(BrokenPipeError("the judge has gone")) == 2
    assert capsys.readouterr().err == "covey: the judge has gone\n"


# ------------------------------------------------------------------------------------------------ completion


@pytest.mark.parametrize(
    ("line", "choices"),
    [
        (
            "covey ",
            VERBS,
        ),
        (
            "covey tr",
            VERBS,
        ),
        ("covey train environment=", {f"environment={name}" for name in group_choices()["environment"]}),
        ("covey train recipe=co", {f"recipe={name}" for name in group_choices()["recipe"] if name.startswith("co")}),
        ("covey config environment=gsm8k environment.sch", {"environment.scheme="}),
    ],
)
def test_tab_completes_verbs_groups_choices_and_keys(
    line: str, choices: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["--shell-completion", "query=bash"]) == 0
    assert set(capsys.readouterr().out.split()) == choices


@pytest.mark.long
def test_bash_completes_a_line_with_the_installed_script(tmp_path: Path) -> None:
    command = tmp_path / "bin" / "covey"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m covey "$@"\n')
    command.chmod(0o755)
    script = """
    eval "$(covey --shell-completion install=bash)"
    COMP_LINE="covey train recipe=lookup_"; COMP_POINT=${#COMP_LINE}; COMP_CWORD=2
    hydra_bash_completion
    echo "${COMPREPLY[@]}"
    complete -p covey | grep -o "hydra_bash_completion covey"
    """
    path = f"{command.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, env=os.environ | {"PATH": path}, check=False
    )
    assert done.stdout.splitlines() == ["recipe=lookup_nano", "hydra_bash_completion covey"]


def test_an_error_in_a_terminal_is_broken_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["config", "grop_size=8"]) == 2
    assert capsys.readouterr().err == "covey: unknown setting grop_size; did\nyou mean group_size?\n"
