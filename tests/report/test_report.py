"""What a report says of a run, of several, and of logs of other tools; and that nothing a model writes is markup."""

import base64
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from rich.console import Console

from covey.cli.main import main
from covey.config.schema import OutputConfig
from covey.loop import train
from covey.run.folder import LOCK, read_summary
from covey_report.command import report_at_the_end
from covey_report.logs.foreign import read_any
from covey_report.logs.read import RunFiles, read_run
from covey_report.page.bands import mean_band, moving_bands, share_band
from covey_report.page.content import _histograms, _rollout, content, thinned, verdict
from covey_report.page.curves import curves_of, reading
from covey_report.page.make import SCRIPTS, STYLES, as_data, asset, make_report, names_of
from covey_report.page.png import draw_curves
from covey_report.runs.tables import render
from covey_report.text import as_lines

from ..support.small import rows, scripted, small_config, use, words

HOSTILE = "</script><img src=x onerror=alert(1)><!--<script>\u202e\u2028\U000e0041{{ 7*7 }}"


@pytest.fixture(scope="module", name="finished")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps, made by the command."""
    folder = tmp_path_factory.mktemp("reports")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", *words(num_steps=4, evaluation__every=2), "hydra.run.dir=run"]) == 0
    return folder / "run"


def data_of(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    content: dict[str, Any] = json.loads(found[1])
    return content


# ------------------------------------------------------------------------------------------------ the page


@pytest.mark.long
def test_every_training_ends_with_a_report_of_one_file(finished: Path) -> None:
    page = finished / "report.html"
    assert page.stat().st_size < 3_000_000
    (run,) = data_of(page)["runs"]
    assert [curve["name"] for curve in run["curves"]][:2] == ["accuracy", "reward"]
    assert {trace["step"] for trace in run["traces"]} == {1, 2, 3, 4}
    assert run["histograms"]["reward"][0]["step"] == 1
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=["'](?!data:)""", text)
    assert 'http-equiv="refresh"' not in text


@pytest.mark.long
def test_a_report_can_be_turned_off_and_never_fails_a_run(tmp_path: Path, finished: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "report.html").unlink()
    assert report_at_the_end(OutputConfig(report=False), folder) is None
    assert not (folder / "report.html").exists()
    assert report_at_the_end(OutputConfig(), folder) == folder / "report.html"
    (folder / "config.yaml").unlink()
    assert report_at_the_end(OutputConfig(), folder) is None


def test_only_the_scripts_and_styles_of_the_page_itself_may_run(finished: Path) -> None:
    text = (finished / "report.html").read_text(encoding="utf-8")
    found = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert found is not None
    policy = found[1].replace("&#39;", "'")
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for name in (*STYLES, *SCRIPTS):
        digest = base64.b64encode(hashlib.sha256(asset(name).encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_uplot_is_the_file_of_its_release_beside_its_licence() -> None:
    digest = hashlib.sha256(asset("uPlot.iife.min.js").encode()).hexdigest()
    assert digest == "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"  # 1.6.32 on npm
    assert "MIT License" in asset("uPlot.LICENSE")


def test_what_a_model_writes_cannot_end_the_block_it_stands_in() -> None:
    text = as_data({HOSTILE: [HOSTILE, float("nan")]})
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text) == {HOSTILE: [HOSTILE, "nan"]}


def test_the_scripts_put_texts_on_the_page_as_text_alone() -> None:
    for name in SCRIPTS[1:]:
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", asset(name))


@pytest.mark.long
def test_a_page_of_hostile_answers_holds_none_of_them_as_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hostile_run(tmp_path, monkeypatch)
    page = make_report([folder])
    assert "<img" not in page.read_text(encoding="utf-8")
    (run,) = data_of(page)["runs"]
    assert run["traces"][0]["prompt"] == HOSTILE
    assert run["name"] == folder.name


def hostile_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run all of whose texts are hostile."""
    use(monkeypatch, scripted())
    folder = tmp_path / "run <b>"
    train(small_config(num_steps=1), folder)
    make_config(folder)
    for name in ("traces.jsonl", "evaluations.jsonl", "rollouts.jsonl"):
        changed = [hostile(row) for row in rows(folder / name)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in changed))
    return folder


def make_config(folder: Path) -> None:
    """What the command would have written: `train` was called by a program."""
    if not (folder / "config.yaml").exists():
        (folder / "config.yaml").write_text("num_steps: 1\nenvironment: {name: custom}\n")


def hostile(value: Any) -> Any:
    """The same row with every text replaced that a model or a data set could have written."""
    if isinstance(value, Mapping):
        kept = ("step", "kind", "reason", "format")
        return {key: item if key in kept else hostile(item) for key, item in value.items()}
    if isinstance(value, list):
        return [hostile(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


# ------------------------------------------------------------------------------------------------ what it says


def summary(low: float | None, high: float | None, status: str = "completed") -> dict[str, Any]:
    look = {"accuracy": {"value": 0.25, "low": 0.2, "high": 0.3}, "num_prompts": 400}
    gain = {"accuracy": {"value": 0.2 if low is None or high is None else (low + high) / 2, "low": low, "high": high}}
    return {"status": status, "steps": 3, "before": look, "after": look, "gain": gain}


@pytest.mark.parametrize(
    ("low", "high", "state", "words"),
    [
        (0.1, 0.3, "shown", "gain shown"),
        (-0.1, 0.3, "unclear", "gain not shown"),
        (-0.3, -0.1, "lost", "got worse"),
        (None, None, "few", "too few to tell"),
    ],
)
def test_the_verdict_says_whether_the_interval_holds_0(low: float, high: float, state: str, words: str) -> None:
    found = verdict(RunFiles(Path("run"), summary=summary(low, high)))
    assert (found["state"], found["badge"]) == (state, words)


def test_a_pass_at_k_that_fell_is_said_beside_an_accuracy_that_did_not() -> None:
    fell, same = {"value": -0.05, "low": -0.08, "high": -0.02}, {"value": 0.0, "low": -0.03, "high": 0.03}
    for accuracy, said in ((-0.1, "pass@4 and pass@8 fell"), (0.1, "gain shown, pass@4 and pass@8 fell")):
        found = summary(accuracy, 0.3)
        found["gain"]["pass_at_k"] = {"1": same, "4": fell, "8": fell}
        assert verdict(RunFiles(Path("run"), summary=found))["badge"] == said
    few = summary(-0.1, 0.3)
    few["gain"] |= {"pass_at_k": {"4": fell}, "num_prompts": 19}
    assert verdict(RunFiles(Path("run"), summary=few))["badge"] == "too few to tell"


def test_no_gain_of_fewer_than_20_prompts_is_shown_on_any_surface(tmp_path: Path) -> None:
    few = summary(0.1, 0.3)
    few["after"] = few["after"] | {"num_prompts": 19}
    run = RunFiles(tmp_path, summary=few)
    assert verdict(run)["badge"] == "too few to tell"
    assert as_lines([run], ["run"])[1].endswith("19 held-out prompts. Too few to tell.")


def test_the_verdict_and_the_table_say_of_which_level_the_interval_is(finished: Path) -> None:
    wide = summary(0.1, 0.3) | {"confidence": 0.975}
    assert "(+20.0, 97.5 % [10.0, 30.0])" in verdict(RunFiles(Path("run"), summary=wide))["text"]
    console = Console(width=120)
    with console.capture() as shown:
        console.print(render((read_summary(finished) or {}) | {"confidence": 0.975}, finished))
    assert "97.5 % intervals" in shown.get()


def test_the_verdict_gives_a_failed_runs_reason_or_an_unfinished_runs_progress() -> None:
    failed = RunFiles(Path("run"), {"num_steps": 9}, summary=summary(0, 1, "failed"), error="the disk is full")
    assert verdict(failed)["text"].startswith("Failed after 3 of 9 steps because the disk is full.")
    running = RunFiles(Path("run"), {"num_steps": 9}, steps=[{"step": 2, "sampled_reward_mean": 0.5031249999}])
    assert verdict(running) == {
        "state": "running",
        "badge": "under way",
        "text": "Under way, or killed: step 2 of 9, reward 0.503.",
    }


def test_the_verdict_of_a_locked_run_is_running(tmp_path: Path) -> None:
    with (tmp_path / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        running = RunFiles(tmp_path, {"num_steps": 9}, steps=[{"step": 2, "sampled_reward_mean": None}])
        assert verdict(running)["text"] == "Under way: step 2 of 9."


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_the_lock_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK)
    assert verdict(RunFiles(tmp_path, {"num_steps": 9}))["text"] == "Under way, or killed: no step is finished yet."


def test_intervals_are_those_of_the_evaluations() -> None:
    assert share_band(30, 100) == pytest.approx((0.3, 0.218949, 0.395849), abs=1e-6)
    assert share_band(0, 0) == mean_band([]) == (None, None, None)
    assert mean_band([2.0]) == (2.0, None, None)
    assert mean_band([1.0, 1.0, 4.0]) == (2.0, None, None)  # three of unknown bounds are too few to tell
    assert mean_band([3.0, 1.0] * 10) == pytest.approx((2.0, 1.5199, 2.4801), abs=1e-3)  # 2.093 x 1.026 / sqrt(20)
    assert [band.value for band in moving_bands([0.0, None, 2.0, 4.0], 3)] == [0.0, 1.0, 3.0, 3.0]


def test_a_curve_is_read_in_words() -> None:
    assert reading([1.0] * 20) == "stayed at 1"
    assert reading([4.0] * 10 + [1.0] * 10) == "fell by 75 %: 4 to 1"
    assert reading([2440.0] * 10 + [1230.0] * 10) == "fell by 50 %: 2,440 to 1,230"
    assert reading([]) == "nothing was measured"
    assert reading([0.25]) == "measured once: 0.25"
    assert reading([0.01] * 10 + [0.5] * 10) == "rose 50-fold: 0.01 to 0.5"
    assert reading([-0.01] * 10 + [-0.5] * 10) == "fell: -0.01 to -0.5"
    assert reading([3.64] * 10 + [3.63] * 10) == "hardly moved: 3.64 to 3.63"
    assert reading([0.0] * 10 + [0.002] + [0.0] * 10) == "0 at both ends (0 to 0.002)"
    assert reading([-7.45e-09, 3e-9, -2e-9, 4e-9, -1e-9, 2e-9, -5e-9, -1.86e-09]) == "no trend: -7.45e-09 to 4e-09"
    assert reading([210.0, 199.0]) == "210 to 199"
    assert reading([3.64] * 10 + [9.0] + [3.63] * 10) == "3.63 at both ends (3.63 to 9)"


def test_rows_are_left_out_evenly_and_both_ends_stay() -> None:
    kept = thinned([{"step": step, "text": "x" * 80} for step in range(1, 101)], 2000)
    assert (kept[0]["step"], kept[-1]["step"]) == (1, 100)
    assert sum(len(json.dumps(row)) for row in kept) <= 2000
    assert len(kept) > 10


@pytest.mark.parametrize(("ratios", "shown"), [([1.0, None, 1.0], None), ([1.0, None, 1.25], [1.0, None, 1.25])])
def test_ratios_of_tokens_are_shown_where_one_has_moved(ratios: list[float | None], shown: object) -> None:
    assert _rollout({"tokens": {"ratio": ratios, "kl": None}}).get("ratio") == shown


def test_a_long_run_has_histograms_of_80_steps_with_first_and_last() -> None:
    updates = [{"step": step, "histograms": {"reward": {"counts": [step]}}} for step in range(1, 202)]
    found = _histograms(updates)["reward"]
    assert (len(found), found[0], found[-1]) == (80, {"step": 1, "counts": [1]}, {"step": 201, "counts": [201]})
    assert [len(_histograms(updates[:number])["reward"]) for number in (0, 1, 3)] == [0, 1, 3]


def test_folders_are_named_by_what_tells_them_apart() -> None:
    assert names_of([Path("/a/one"), Path("/b/one"), Path("/b/two")]) == ["a/one", "b/one", "b/two"]
    assert names_of([Path("/sweep/0"), Path("/sweep/1")]) == ["sweep/0", "sweep/1"]


# ------------------------------------------------------------------------------------------------ the command


def test_a_report_of_two_runs_compares_them(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    shutil.copytree(finished, other)
    out = tmp_path / "both.html"
    assert main(["report", str(finished), str(other), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"report: {out}\n"
    found = data_of(out)
    assert [run["name"] for run in found["runs"]] == ["run", "other"]
    assert found["compare"]["together"] == "runs of the same settings and seed"
    assert [gain["name"] for gain in found["compare"]["gains"]] == ["other"]
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config + "own: 1\n")
    assert main(["report", str(finished), str(other), "--out", str(out)]) == 0
    (gain,) = data_of(out)["compare"]["gains"]
    assert gain["measures"]["accuracy"][0] == 0.0
    assert gain["lines"][0].startswith("other against run, 2 prompts, a run each")
    assert gain["state"] == "few"


def test_a_report_of_two_runs_leaves_the_pages_of_both(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished, tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    before = (finished / "report.html").read_bytes() if (finished / "report.html").exists() else None
    assert make_report([finished, tmp_path / "other"]) == Path("compared.html")
    assert (tmp_path / "compared.html").is_file()
    after = (finished / "report.html").read_bytes() if (finished / "report.html").exists() else None
    assert after == before


def test_an_unfinished_run_is_reported_despite_its_torn_last_line(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "running"
    shutil.copytree(finished, folder)
    (folder / "summary.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    run = read_run(folder)
    assert [row["step"] for row in run.steps] == [1, 2]
    assert content([run], ["running"])["runs"][0]["verdict"]["state"] == "running"


@pytest.mark.parametrize("how", [[], ["--text"]])
@pytest.mark.parametrize("damage", [{"before": {"num_prompts": 1}}, {"before": 1.0}])
def test_a_summary_that_no_run_writes_is_one_line(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Mapping[str, Any], how: list[str]
) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    found = read_summary(folder) or {}
    (folder / "summary.json").write_text(json.dumps(found | damage))
    assert main(["report", str(folder), *how]) == 2
    printed = capsys.readouterr().err
    assert f"{folder} does not hold what a run writes there" in printed
    assert printed.count("\n") == 1


def test_rows_that_no_tool_writes_are_one_line(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    updates = [row | {"num_groups": 1, "groups": ["no group"]} for row in rows(run / "updates.jsonl")]
    (run / "updates.jsonl").write_text("".join(json.dumps(row) + "\n" for row in updates))
    verl = tmp_path / "verl"
    verl.mkdir()
    (verl / "1.jsonl").write_text(json.dumps({"step": 1, "input": "q", "output": "a", "score": None}) + "\n")
    for verb, folder in (("report", run), ("doctor", run), ("report", verl), ("doctor", verl)):
        assert main([verb, str(folder)]) == 2
        printed = capsys.readouterr().err
        assert f"{folder} does not hold what a run writes there" in printed
        assert printed.count("\n") == 1


def test_numbers_that_no_axis_has_are_gaps_in_a_curve() -> None:
    values = [0.5, math.inf, math.nan, 0.25, 0.75]
    steps = [{"step": step, "truncated_fraction": value} for step, value in enumerate(values, start=1)]
    (curve,) = curves_of(RunFiles(Path("run"), steps=steps))
    assert curve["raw"] == [0.5, None, None, 0.25, 0.75]


def test_the_text_report_has_verdict_curves_and_groups_as_squares(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(finished), "--text"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run"
    assert " ".join(lines[1].split()).startswith(verdict(read_run(finished))["text"][:40])
    assert any(line.strip().startswith("reward of training") for line in lines)
    assert "  groups of step 4:" in lines
    assert main(["watch", str(finished)]) == 0  # a run that has ended is shown once
    assert "reward of training" in capsys.readouterr().out
    assert as_lines([read_run(finished)] * 2, ["a", "b"])[-2:] == ["settings that differ:", "  none"]


@pytest.mark.parametrize("columns", [60, 80, 128])
def test_lines_of_text_fit_the_terminal_and_end_with_what_a_curve_did(finished: Path, columns: int) -> None:
    lines = as_lines([read_run(finished)], ["run"], columns)
    assert [line for line in lines if len(line) > max(columns, 80)] == []
    drawn = [line for line in lines if line.startswith("  reward of training ")]
    assert len(drawn) == 1
    assert re.search(r"(rose|fell|stayed).* \S+$", drawn[0])
    assert columns > 60 or len(drawn[0]) <= 60


@pytest.mark.long
def test_curves_are_drawn_as_pictures(finished: Path, tmp_path: Path) -> None:
    assert main(["report", str(finished), "--png", str(tmp_path / "pictures")]) == 0
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert {"reward.png", "accuracy.png", "entropy.png"} <= names


def test_a_dollar_in_a_name_is_no_formula_in_a_picture(tmp_path: Path) -> None:
    steps = [{"step": step, "environment/$_per_$": step / 9} for step in (1, 2)]
    paths = draw_curves([RunFiles(tmp_path, steps=steps)] * 2, ["$a_$", "b"], tmp_path)
    assert [path.name for path in paths] == ["environment_$_per_$.png"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "covey report needs a run folder, such as covey report outputs/DATE/TIME"),
        (["--out"], "--out needs a value"),
        (["run", "--out", "page.pdf"], "--out must be a .html file, got page.pdf"),
        (["run", "--out", "no/page.html"], "--out must lie in a folder that is there (no is not), got no/page.html"),
        (["run", "--server"], 'no flag "--server"; flags: --out, --png, --follow, --text'),
    ],
)
def test_words_that_say_nothing_are_refused_in_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *words]) == 2
    assert capsys.readouterr().err == f"covey: {line}\n"


@pytest.mark.long
def test_a_report_needs_no_torch(finished: Path) -> None:
    program = (
        "import sys; from covey_report.page.make import make_report; from pathlib import Path;"
        "make_report([Path(sys.argv[1])]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(finished)], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# ------------------------------------------------------------------------------------------------ other tools


def test_answers_that_trl_and_verl_keep_are_read_with_their_rewards(tmp_path: Path) -> None:
    for name in ("trl/completions", "verl"):
        (tmp_path / name).mkdir(parents=True)
    right, steps = [1.0, 0.0, 1.0, 1.0], {1: ["4", "5", "4", "4"], 12: ["9", "9", "8", "9"]}
    for step, answers in steps.items():
        prompts = [[{"role": "user", "content": question}] for question in ("2 + 2?", "2 + 2?", "3 + 1?", "3 + 1?")]
        columns = {"step": [step] * 4, "prompt": prompts, "completion": answers, "advantage": [0.5] * 4}
        table = pyarrow.table({**columns, "right": right, "short": [0.25] * 4})
        parquet.write_table(table, tmp_path / f"trl/completions/completions_{step:05d}.parquet")
        found = [
            {"input": prompt[0]["content"], "output": answer, "gts": "4", "score": reward + 0.25, "step": step}
            for prompt, answer, reward in zip(prompts, answers, right, strict=True)
        ]
        (tmp_path / f"verl/{step}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in found))
    for name in ("trl", "verl"):
        run = read_any(tmp_path / name)
        assert [(row["step"], row["sampled_reward_mean"]) for row in run.steps] == [(1, 1.0), (12, 1.0)]
        assert [row["zero_std_fraction"] for row in run.steps] == [0.5, 0.5]
        kept = [(row["step"], one["completion"], one["reward"]) for row in run.traces for one in row["rollouts"]]
        assert kept == [(step, a, r + 0.25) for step in steps for a, r in zip(steps[step], right, strict=True)]
        parts = {"right": 1.0, "short": 0.25} if name == "trl" else {}
        assert (one := run.traces[0]["rollouts"][0])["parts"] == parts
        assert one["advantage"] == (0.5 if name == "trl" else None)
        assert make_report([tmp_path / name], tmp_path / f"{name}.html").is_file()


def test_a_verifiers_record_has_weighted_rewards_and_the_sampled_answer(tmp_path: Path) -> None:
    nodes = [
        {"message": {"role": "user", "content": "6 * 7?"}},
        {"message": {"role": "assistant", "content": "42"}, "sampled": True},
    ]
    rewards = {"right": {"score": 0.5, "weight": 2.0}, "short": {"score": 0.25}, "unknown": None}
    record = {"nodes": nodes, "rewards": rewards, "info": {"step": 3}}
    records = [record, {"nodes": nodes}, {"nodes": nodes, "rewards": {"right": 1.0}}]
    (tmp_path / "traces.jsonl").write_text("no record\n" + "".join(f"{json.dumps(one)}\n" for one in records))
    run = read_any(tmp_path)
    found = [(row["step"], row["sampled_reward_mean"], row["zero_std_fraction"]) for row in run.steps]
    assert found == [(1, 0.5, 0.0), (3, 1.25, 1.0)]
    (answer,) = run.traces[1]["rollouts"]
    assert (answer["parts"], answer["completion"]) == ({"right": 1.0, "short": 0.25}, "42")


def test_a_folder_that_holds_no_log_is_refused_with_what_could_be_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no run folder: it has no config.yaml, no completions/\*.parquet of TRL"):
        read_any(tmp_path)
