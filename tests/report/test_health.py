"""What the doctor says of runs on the disk: of covey, of TRL and of verl, on the page, in the terminal, for scripts."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from covey.cli.main import main
from covey_report.doctor.command import read_words
from covey_report.doctor.health import doctor_page, health_of, read_for_doctor
from covey_report.logs.other_metrics import of_trl, of_verl
from covey_report.logs.read import RunFiles, read_run
from covey_report.page.content import content
from covey_report.text import as_lines


def trl_row(step: int, **numbers: float) -> dict[str, float]:
    """A row of log_history as GRPOTrainer of TRL 1.16 writes it."""
    usual = {
        **{"epoch": 0.1, "loss": 0.01, "grad_norm": 0.3, "learning_rate": 1e-6, "num_tokens": 1000.0 * step},
        **{"completions/mean_length": 120.0, "completions/max_length": 256.0, "completions/clipped_ratio": 0.01},
        **{
            "reward": 0.4,
            "reward_std": 0.4,
            "frac_reward_zero_std": 0.2,
            "entropy": 0.6,
            "clip_ratio/region_mean": 0.0,
        },
        **{"rewards/accuracy_reward/mean": 0.3, "rewards/accuracy_reward/std": 0.4, "step_time": 3.0},
        **{"sampling/sampling_logp_difference/mean": 0.01, "kl": 0.001},
    }
    return {"step": step, **usual, **numbers}


def trl_folder(folder: Path, history: Sequence[dict[str, float]], step: int = 500) -> Path:
    place = folder / f"checkpoint-{step}"
    place.mkdir(parents=True)
    (place / "trainer_state.json").write_text(json.dumps({"log_history": history, "global_step": step}))
    return folder


def verl_row(step: int, **numbers: float) -> dict[str, Any]:
    usual = {
        **{"actor/entropy": 0.5, "actor/grad_norm": 0.2, "actor/pg_clipfrac": 0.001, "actor/pg_loss": 0.01},
        **{"critic/score/mean": 0.4, "critic/rewards/mean": 0.4, "response_length/mean": 200.0},
        **{"response_length/clip_ratio": 0.01, "training/rollout_probs_diff_mean": 0.004, "perf/throughput": 900.0},
    }
    return {**usual, **{name.replace("__", "/"): value for name, value in numbers.items()}}


# ------------------------------------------------------------------------------------------------ other tools


def test_a_healthy_log_of_trl_is_healthy(tmp_path: Path) -> None:
    rows = [trl_row(step, reward=0.3 + 0.005 * step + 0.01 * (step % 3)) for step in range(1, 61)]
    health = health_of(read_for_doctor(trl_folder(tmp_path, rows)))
    assert (health.line, health.findings) == ("healthy", [])


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"frac_reward_zero_std": 1.0}, "D1"),
        ({"completions/clipped_ratio": 0.97}, "D8"),
        ({"clip_ratio/region_mean": 0.6}, "D26"),
        ({"sampling/sampling_logp_difference/mean": 0.3}, "D10"),
        ({"tools/failure_frequency": 0.7}, "D29"),
        ({"loss": float("nan")}, "D33"),
    ],
)
def test_a_critical_trl_log_is_named(tmp_path: Path, numbers: dict[str, float], expected: str) -> None:
    rows = [trl_row(step, **(numbers if step > 20 else {})) for step in range(1, 61)]
    found = health_of(read_for_doctor(trl_folder(tmp_path, rows))).findings
    assert expected in [one.rule.id for one in found[:2]]


@pytest.mark.parametrize(("silent", "expected"), [(0.2, ["D15"]), (0.0, [])])
def test_trls_share_of_batches_without_signal_is_not_one_of_groups(
    tmp_path: Path, silent: float, expected: list[str]
) -> None:
    """With scale_rewards="batch" TRL logs 0 unless all rewards of a batch are equal."""
    rows = [trl_row(step, reward=0.4 + 0.01 * (step % 3), frac_reward_zero_std=silent) for step in range(1, 61)]
    found = health_of(read_for_doctor(trl_folder(tmp_path, rows))).findings
    assert [one.rule.id for one in found] == expected


def test_verl_logs_how_far_probabilities_are_apart_and_not_their_logarithms(tmp_path: Path) -> None:
    def findings(gap: Callable[[int], float]) -> dict[str, str]:
        rows = [verl_row(step, training__rollout_probs_diff_mean=gap(step)) for step in range(1, 61)]
        lines = [json.dumps({"step": step, "data": row}) for step, row in enumerate(rows, start=1)]
        (tmp_path / "run.jsonl").write_text("\n".join(lines))
        return {one.rule.id: one.evidence.seen for one in health_of(read_for_doctor(tmp_path)).findings}

    assert findings(lambda step: 0.3)["D10"] == "difference of sampler and trainer is 0.3 in probability a token"
    grown = findings(lambda step: 0.011 + 0.0005 * step)["D11"]
    assert grown.endswith("grew from 0.0147 in probability (steps 3 to 12) to 0.0387 in probability (steps 51 to 60)")


def test_short_answers_are_no_collapse_without_rewards_within_groups(tmp_path: Path) -> None:
    def numbers(step: int) -> dict[str, float]:  # TRL's deviation is that of the whole batch
        return {} if step <= 20 else {"completions/mean_length": 12.0, "reward_std": 0.04}

    trl_folder(tmp_path, [trl_row(step, **numbers(step)) for step in range(1, 61)])
    assert health_of(read_for_doctor(tmp_path)).findings == []
    lines = [
        {"step": step, "data": verl_row(step, response_length__mean=20.0 if step > 20 else 200.0)}
        for step in range(1, 61)
    ]
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert health_of(read_for_doctor(tmp_path / "run.jsonl")).findings == []


def test_the_newest_checkpoint_of_trl_is_read_and_its_file_too(tmp_path: Path) -> None:
    trl_folder(tmp_path, [trl_row(step) for step in range(1, 10)], step=90)
    trl_folder(tmp_path, [trl_row(step, **{"frac_reward_zero_std": 1.0}) for step in range(1, 61)], step=100)
    assert [one.rule.id for one in health_of(read_for_doctor(tmp_path)).findings] == ["D1"]
    file = tmp_path / "checkpoint-90" / "trainer_state.json"
    assert len(read_for_doctor(file).steps) == 9


def test_evaluations_of_trl_are_held_out_rewards(tmp_path: Path) -> None:
    history = [trl_row(1), {"step": 1, "eval_reward": 0.2, "eval_rewards/accuracy_reward/mean": 0.1}]
    steps, looks = of_trl(trl_folder(tmp_path, history) / "checkpoint-500" / "trainer_state.json")
    assert steps[0]["reward/accuracy_reward"] == 0.3
    history = [{"step": 1, "loss": 0.5, "clip_ratio/low_mean": 0.1, "clip_ratio/high_mean": 0.2, "kl": 0.3}]
    clipped, _ = of_trl(trl_folder(tmp_path, history, step=600) / "checkpoint-600" / "trainer_state.json")
    assert clipped == [{"step": 1, "loss": 0.5, "clip_low": 0.1, "clip_high": 0.2, "kl": 0.3}]
    assert looks == [{"step": 1, "reward_mean": 0.2, "accuracy": 0.1}]


def test_json_lines_and_console_of_verl_say_the_same(tmp_path: Path) -> None:
    rows = [verl_row(step, actor__entropy=0.5 if step < 20 else 3.0) for step in range(1, 61)]
    lines = [json.dumps({"step": step, "data": row}) for step, row in enumerate(rows, start=1)]
    (tmp_path / "run.jsonl").write_text("\n".join(lines))
    printed = [
        f"(TaskRunner pid=12) step:{step} - " + " - ".join(f"{name}:np.float64({value})" for name, value in row.items())
        for step, row in enumerate(rows, start=1)
    ]
    (tmp_path / "console.log").write_text("Training Progress:  1%|\nnoise\n" + "\n".join(printed))
    assert of_verl(tmp_path / "run.jsonl") == of_verl(tmp_path / "console.log")
    for place in (tmp_path, tmp_path / "console.log"):
        assert [one.rule.id for one in health_of(read_for_doctor(place)).findings][:1] == ["D5"]


def test_verls_accuracies_of_several_data_sets_are_averaged_apart_from_rewards(
    tmp_path: Path,
) -> None:
    held_out = {"val-core/a/acc/mean@1": 0.5, "val-core/b/acc/mean@1": 1.0}
    scores = [{"val/test_score/a": score} for score in (0.125, None)]
    rows = [held_out | {"val-aux/a/reward/mean@1": 0.25}, held_out, *scores]
    log = tmp_path / "run.jsonl"
    log.write_text("\n".join(json.dumps({"step": step, "data": row}) for step, row in enumerate(rows)))
    assert of_verl(log) == (
        [],
        [
            {"step": 0, "reward_mean": 0.25, "accuracy": 0.75},
            {"step": 1, "reward_mean": 0.75, "accuracy": 0.75},
            {"step": 2, "reward_mean": 0.125},
        ],
    )


def test_held_out_accuracy_of_verl_shows_a_reward_that_is_hacked(tmp_path: Path) -> None:
    lines = []
    for step in range(1, 61):
        row = verl_row(step, critic__score__mean=0.2 + 0.01 * step + 0.001 * (step % 3))
        if step % 20 == 1:
            row["val-core/openai/gsm8k/acc/mean@1"] = 0.5 - 0.005 * step
        lines.append(json.dumps({"step": step, "data": row}))
    (tmp_path / "run.jsonl").write_text("\n".join(lines))
    found = health_of(read_for_doctor(tmp_path)).findings
    assert found[0].rule.id == "D16"
    assert found[0].level.word == "sick"


def test_a_folder_without_any_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("nothing here\n")
    assert main(["doctor", str(tmp_path)]) == 2
    assert "is no run folder" in capsys.readouterr().err
    assert main(["doctor"]) == 2
    assert "covey doctor needs a run" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path), "--jsn"]) == 2
    assert 'no flag "--jsn"; flags: --control, --json' in capsys.readouterr().err


def test_words_name_runs_and_a_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    assert read_words(["a", "--control", "b", "--json"]) == ([Path("a")], {"--control": "b", "--json": ""})
    assert read_words(["a", "--control=b"]) == ([Path("a")], {"--control": "b"})


# ------------------------------------------------------------------------------------------------ covey's own


def own_run(folder: Path, **numbers: float) -> Path:
    """The folder of a run of 60 steps, from numbers alone."""
    folder.mkdir()
    (folder / "config.yaml").write_text("num_steps: 60\nmodel:\n  precision: float32\n")
    usual = {"kind": "train", "zero_std_fraction": 0.2, "all_wrong_fraction": 0.1, "all_correct_fraction": 0.1}
    rows = [{"step": step, **usual, **numbers} for step in range(1, 61)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = {"step": 5, "reason": "evenly spread", "prompt_id": "p", "prompt": "1+1=", "rollouts": []}
    traces = "".join(json.dumps({**trace, "step": step}) + "\n" for step in (5, 50))
    (folder / "traces.jsonl").write_text(traces)
    return folder


def test_the_command_says_findings_with_their_reasons_and_ends_with_a_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    well, ill = own_run(tmp_path / "well"), own_run(tmp_path / "ill", zero_std_fraction=1.0)
    watched = own_run(tmp_path / "watched", zero_std_fraction=0.7)
    assert main(["doctor", str(well)]) == 0
    assert capsys.readouterr().out == "well: healthy\n"
    assert main(["doctor", str(watched)]) == 3
    assert "watch D1 no signal from the first step on: the rewards of 70 % of the groups" in capsys.readouterr().out
    assert main(["doctor", str(well), str(ill)]) == 4
    said = capsys.readouterr().out
    for words in (
        "well: healthy\n",
        "ill: sick: D1 no signal",
        "\n      why:   ",
        "\n      from:  ",
        "\n      try:   ",
        "wrong: if ",
    ):
        assert words in said


def test_the_command_advises_what_the_run_does_not_do_already(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = own_run(tmp_path / "run", zero_std_fraction=1.0)
    (run / "config.yaml").write_text("num_steps: 60\ngroup_size: 4\nalgorithm:\n  group_filter: zero_std\n")
    assert main(["doctor", str(run)]) == 4
    (said,) = re.findall(r"try:   (.*)\n", capsys.readouterr().out)
    assert said.startswith("group_size larger (now 4); ")
    assert "group_filter" not in said


def test_a_run_that_was_resumed_with_other_settings_is_judged_by_these(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = own_run(tmp_path / "run", zero_std_fraction=1.0)
    changes = {
        "num_steps": {"from": 60, "to": 90},
        "algorithm.shaping": {"from": {}, "to": {"soft_overlong": {"n": 8}}},
    }
    (run / "changes.jsonl").write_text(json.dumps({"after_step": 20, "changes": changes}) + "\n")
    assert main(["doctor", str(run)]) == 4
    settings = read_run(run).settings
    assert (settings["num_steps"], settings["algorithm.shaping.soft_overlong.n"]) == (90, 8)
    assert "60 of 90" in dict(content([read_run(run)], ["run"])["runs"][0]["facts"])["steps"]
    (run / "changes.jsonl").write_text('{"after_step": 20, "changes": {"num_steps": "to"}}\n')
    capsys.readouterr()
    assert main(["doctor", str(run)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_programs_get_the_same_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(own_run(tmp_path / "ill", mismatch_kl=1e-3)), "--json"]) == 4
    (row,) = json.loads(capsys.readouterr().out)
    assert row["verdict"] == "sick: D10 sampler is not the trainer"
    assert [one["id"] for one in row["findings"]] == ["D10"]
    assert row["findings"][0]["values"]["mean"] == pytest.approx(1e-3)


def test_a_control_that_gains_as_much_takes_the_gain_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = own_run(tmp_path / "run")
    looks = [{"step": step, "kind": "evaluate", "accuracy": value} for step, value in ((0, 0.2), (60, 0.6))]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in looks)
    control = tmp_path / "control"
    shutil.copytree(run, control)
    assert main(["doctor", str(run)]) == 0
    assert main(["doctor", str(run), "--control", str(control)]) == 4
    assert "D31 gain without signal" in capsys.readouterr().out


def test_the_page_and_the_text_have_findings_and_steps_to_look_at(tmp_path: Path) -> None:
    run = read_run(own_run(tmp_path / "ill", zero_std_fraction=1.0))
    page = doctor_page(run)
    assert page["line"] == "sick: D1 no signal"
    assert page["findings"][0]["look"] == [5, 50]
    assert content([run], ["ill"])["runs"][0]["doctor"] == page
    assert "  doctor: sick: D1 no signal" in as_lines([run], ["ill"])


def test_a_run_without_a_step_is_too_early_to_say() -> None:
    assert doctor_page(RunFiles(Path("none")))["line"] == "too early to say, after 0 steps"


@pytest.mark.long
def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from covey.cli.main import main; code = main(['doctor', sys.argv[1]]);"
        "print('HEAVY', {'torch', 'transformers', 'hydra', 'datasets'} & set(sys.modules)); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(own_run(tmp_path / "run"))], capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("HEAVY set()\n")
    assert done.returncode == 0
