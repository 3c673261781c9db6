"""The command from end to end: real words, real engine, real reward functions; what it shows and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main

from ..support.processes import are_gone, children
from ..support.small import equal, logging_as_it_was, rows, saved_weights, words

REWARDS = """
import asyncio, os, time

def varied(completions, **kwargs):
    return [sum(text.encode()) % 5 / 4 for text in completions]

async def later(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [sum(text.encode()) % 3 / 2 for text in completions]

def partial(prompts, completions, **kwargs):
    return [1.0 if len(text) % 2 else None for text in completions]

def seldom(completions, **kwargs):
    if any(sum(text.encode()) % 6 == 0 for text in completions):
        raise ZeroDivisionError("a bad sample")
    return varied(completions)

def nan(completions, **kwargs):
    return [float("nan")] * len(completions)

def short(completions, **kwargs):
    return [1.0]

def raises(completions, **kwargs):
    raise KeyError("answer")

def hangs(completions, **kwargs):
    time.sleep(600)

def slow(completions, **kwargs):
    with open("scored", "a") as file:
        file.write("x")
    time.sleep(0.2)
    return varied(completions)
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test runs in a folder of its own, with reward functions beside it and logging left as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COVEY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("COVEY_DEBUG", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("my_rewards", None)
    Path("my_rewards.py").write_text(REWARDS)
    lines = [{"prompt": f"{index}+1="} for index in range(12)]
    Path("rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with logging_as_it_was():
        yield
    sys.modules.pop("my_rewards", None)


def own_rewards(*names: str, **changes: Any) -> list[str]:
    """`covey train` on rows.jsonl with functions of my_rewards.py."""
    settings = {
        "data__path": "rows.jsonl",
        "data__test_fraction": 0.2,
        "rewards": [f"my_rewards:{name}" for name in names],
    }
    return ["train", "environment=reward_functions", *words(**(settings | changes)), "hydra.run.dir=run"]


def metrics(kind: str = "train") -> list[dict[str, Any]]:
    return rows(Path("run/metrics.jsonl"), kind)


def summary() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path("run/summary.json").read_text())
    return content


# ------------------------------------------------------------------------------------------------ train


@pytest.mark.long
def test_training_shows_a_line_a_step_the_tables_and_the_run_folder_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(own_rewards("varied", environment__in_process=True, doctor__enabled=True)) == 0
    printed = capsys.readouterr()
    lines = [line.rstrip() for line in printed.out.splitlines()]
    beginnings = (
        "loading nano for environment=reward_functions",
        "nano: ",
        "preflight: 9 checks passed, 2 not applicable, in ",
        "step 0 evaluated: accuracy 0.",
        "step 1/2  reward 0.",
        "step 2/2  reward 0.",
        "step 2 evaluated: ",
    )
    checks = [line for line in lines if re.match(r"preflight \d+ of 11: ", line)]
    others = [line for line in lines if line not in checks]
    assert checks[0] == "preflight 1 of 11: tokenizer"
    assert checks[-1] == "preflight 11 of 11: true gradient"
    assert [line[: len(start)] for line, start in zip(others, beginnings, strict=False)] == list(beginnings)
    assert any(line.startswith("accuracy, %") for line in lines)
    assert any(line.startswith("completed · 2 steps · ") for line in lines)
    assert lines[-1] == "run folder: run"
    assert "\x1b" not in printed.out
    assert printed.err == ""
    assert printed.out.count("D34 never stops from the first step on: ") == 2  # as it is found, and at the end
    assert sorted(path.name for path in Path("run").iterdir()) == [
        *("checkpoints", "config.yaml", "covey.log", "evaluations.jsonl", "metrics.jsonl", "preflight.json"),
        *(
            "proof.jsonl",
            "report.html",
            "rollouts.jsonl",
            "run.lock",
            "run.seal",
            "summary.json",
            "traces.jsonl",
            "updates.jsonl",
            "verdicts.jsonl",
            "versions.json",
        ),
    ]


@pytest.mark.long
def test_without_progress_only_the_result_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*own_rewards("varied", environment__in_process=True), "output.progress=false"]) == 0
    assert not capsys.readouterr().out.lstrip().startswith("step")


def test_the_same_words_and_seed_give_the_same_weights() -> None:
    command = own_rewards("varied", environment__in_process=True)[:-1]
    for folder in ("first", "second"):
        assert main([*command, f"hydra.run.dir={folder}"]) == 0
    assert equal(saved_weights(Path("first")), saved_weights(Path("second")))


@pytest.mark.shared
def test_gsm8k_trains_offline_on_real_rows(shared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["groups_per_step=2", "group_size=2", "evaluation.num_prompts=4", "sampling.max_tokens=32"]
    small += ["evaluation.num_samples=2", "evaluation.k=[1,2]", "hydra.run.dir=run"]
    data = f"data.path={shared / 'data' / 'gsm8k'}"
    assert main(["train", "environment=gsm8k", data, "model=nano", "num_steps=3", *small]) == 0
    assert [row["step"] for row in metrics()] == [1, 2, 3]
    assert metrics()[0]["reward/format"] == 0.0
    assert [message["role"] for message in rows(Path("run/rollouts.jsonl"))[0]["prompt"]] == ["system", "user"]
    assert summary()["after"]["num_prompts"] == 4
    assert capsys.readouterr().err == ""


# ------------------------------------------------------------------------------------------------ evaluate, cold-start


WARM = {
    "environment__levels": [1],
    "environment__num_train": 60,
    "cold_start__num_steps": 6,
    "cold_start__check_every": 3,
    "cold_start__num_check_prompts": 8,
    "cold_start__batch_size": 8,
}


@pytest.mark.long
def test_a_policy_is_warmed_up_trained_and_measured_by_three_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cold-start", *words(**WARM), "hydra.run.dir=warm"]) == 0
    shown = capsys.readouterr().out
    report = json.loads(Path("warm/cold_start.json").read_text())
    assert "cold start 3/6  loss " in shown
    assert f"cold start: 6 supervised steps, greedy accuracy {report['accuracy']:.1%}" in shown
    assert not report["cached"]
    assert "cold_start" in [line.split()[0] for line in shown.splitlines() if "█" in line]
    assert re.search(r"^cold_start.json +the cold-start policy and its accuracy$", shown, re.MULTILINE)
    assert "rollouts.jsonl" not in shown
    assert Path(report["path"]).parent == Path("cache").resolve()

    assert main(["train", *words(**WARM, cold_start__enabled=True), "hydra.run.dir=run"]) == 0
    assert "taken from the cache" in capsys.readouterr().out

    trained = Path("run/checkpoints/step-000002/policy")
    settings = words(environment__levels=[1], environment__num_train=60)
    settings = [word for word in settings if "nano" not in word]
    assert main(["evaluate", *settings, f"model.name={trained}", "hydra.run.dir=look"]) == 0
    look = json.loads(Path("look/summary.json").read_text())
    assert look["before"] == summary()["after"]
    assert (look["status"], look["after"], look["steps"]) == ("completed", None, 0)
    assert not Path("look/checkpoints").exists()
    shown = capsys.readouterr().out
    assert "\nworst answers (of 2 greedy and 4 sampled kept, step 2)\nstep 2, test-" in shown
    assert ["measured"] in [line.split() for line in shown.splitlines()]
    assert " steps" not in shown


def test_a_saved_policy_is_evaluated_with_its_runs_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", *words(model__precision="float64", sampling__top_k=50), "hydra.run.dir=run"]) == 0
    after = summary()["after"]
    name = "model.name=run/checkpoints/step-000002/policy"
    capsys.readouterr()
    assert main(["evaluate", name, "hydra.run.dir=alone"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("settings of run: environment=arithmetic\n")
    assert printed.err == ""
    assert json.loads(Path("alone/summary.json").read_text())["before"] == after

    settings = [word for word in words(sampling__max_tokens=3) if "nano" not in word]
    assert main(["evaluate", "environment=arithmetic", *settings, name, "hydra.run.dir=otherwise"]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == (
        "WARNING: settings differ from the run in run: "
        "model.precision=float32 (run: float64), sampling.top_k=0 (run: 50)"
    )


@pytest.mark.long
def test_a_second_cold_start_says_where_the_first_one_lies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cold-start", *words(**WARM), "hydra.run.dir=first"]) == 0
    first = capsys.readouterr().out
    assert main(["cold-start", *words(**WARM), "hydra.run.dir=second"]) == 0
    second = capsys.readouterr().out
    assert "made now: " in first
    assert "taken from the cache: " in second
    assert "cold start 3/6" not in second
    paths = [json.loads(Path(f"{name}/cold_start.json").read_text())["path"] for name in ("first", "second")]
    assert paths[0] == paths[1]


def test_rows_without_demonstrations_cannot_be_warmed_up(capsys: pytest.CaptureFixture[str]) -> None:
    command = own_rewards("varied", environment__in_process=True)
    assert main(["cold-start", *command[1:]]) == 2
    assert capsys.readouterr().err.endswith(
        "covey: cold_start.enabled=true needs rows with a column 'completion', got none\n"
    )
    assert summary()["status"] == "failed"


# ------------------------------------------------------------------------------------------------ rewards of a user


@pytest.mark.long
def test_async_and_partial_functions_are_weighed_and_logged_by_name() -> None:
    functions = own_rewards("later", "partial", reward_weights=[1.0, 0.5], environment__num_workers=1)
    assert main(functions) == 0
    for row in metrics():
        assert 0 <= row["reward/later"] <= 1
        assert row["reward/partial"] == 1.0
    for row in rows(Path("run/rollouts.jsonl")):
        assert row["reward"] == row["parts"]["later"] + 0.5 * row["parts"].get("partial", 0)


@pytest.mark.long
def test_one_bad_sample_is_dropped_counted_and_the_run_continues(capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"num_steps": 6, "environment__in_process": True, "environment__max_failure_rate": 0.5}
    assert main(own_rewards("seldom", **changes)) == 0
    found = metrics()
    lost = sum(row["dropped/unscored_rollouts"] for row in found)
    assert lost > 0
    assert sum(row["unscored_fraction"] for row in found) > 0
    assert all(row["num_groups"] + row.get("dropped/unscored_groups", 0) == 2 for row in found)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nan", 'reward function "nan" returned nan for completion 0'),
        ("raises", "reward function \"raises\" raised KeyError: 'answer' (my_rewards.py:26) for completion 0"),
        ("short", 'reward function "short" returned 1 values for 4 completions'),
    ],
)
def test_a_function_that_always_fails_ends_the_run_in_one_line_that_names_it(
    name: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"environment__in_process": True, "evaluation__num_prompts": 1, "evaluation__num_samples": 2}
    assert main(own_rewards(name, **settings, preflight__enabled=False)) == 2
    assert capsys.readouterr().err == f"covey: none of 8 completions could be scored: {reason}\n"
    assert summary()["status"] == "failed"
    assert "Traceback" in Path("run/covey.log").read_text()


@pytest.mark.long
def test_too_many_failures_end_the_run_by_the_stated_rule(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"num_steps": 40, "environment__in_process": True, "environment__max_failure_rate": 0.01}
    assert main(own_rewards("seldom", **settings)) == 2
    error = capsys.readouterr().err
    assert error.startswith("covey: ")
    assert 'rewards failed (max_failure_rate=0.01); last: reward function "seldom" raised ZeroDivisionError' in error
    assert error.count("\n") == 1
    assert summary()["steps"] < 40


@pytest.mark.long
def test_a_hanging_function_is_killed_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"environment__timeout": 0.3, "environment__num_workers": 1, "evaluation__num_prompts": 1}
    started = time.monotonic()
    assert main(own_rewards("hangs", **settings, preflight__enabled=False)) == 2
    assert capsys.readouterr().err == (
        'covey: none of 8 completions could be scored: reward function "hangs" took longer than 0.3 s\n'
    )
    assert time.monotonic() - started < 20


@pytest.mark.long
def test_a_reward_that_trl_ships_runs_through_the_command() -> None:
    pytest.importorskip("trl")
    lines = [{"prompt": [{"role": "user", "content": f"{index}+1?"}]} for index in range(8)]
    Path("rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = own_rewards(environment__num_workers=1, rewards=["trl.rewards:think_format_reward"])
    assert main(command) == 0
    assert [row["reward/think_format_reward"] for row in metrics()] == [0.0, 0.0]


def test_a_reward_module_that_does_not_exist_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(own_rewards("varied", rewards=["nowhere:reward"])) == 2
    assert capsys.readouterr().err == (
        "covey: reward function nowhere:reward: cannot import nowhere: No module named 'nowhere'\n"
    )


# ------------------------------------------------------------------------------------------------ Ctrl-C


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_ctrl_c_is_one_line_a_summary_and_no_process_left_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "covey", *own_rewards("slow", num_steps=500, environment__num_workers=2)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    deadline = time.monotonic() + 120
    while not (Path("run/metrics.jsonl").exists() and metrics()):
        assert run.poll() is None, run.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started = children(run.pid)
    run.send_signal(signal.SIGINT)
    shown, error = run.communicate(timeout=60)
    assert run.returncode == 130
    assert error == "covey: stopped by SIGINT\n"
    assert shown.splitlines()[-1] == "run folder: run"
    assert summary()["status"] == "interrupted"
    assert 1 <= summary()["steps"] < 500
    assert len(started) == 3  # two workers, and the guard of the deadlines
    assert are_gone(started, seconds=0)
    scored = Path("scored").read_text()
    time.sleep(0.5)
    assert Path("scored").read_text() == scored
