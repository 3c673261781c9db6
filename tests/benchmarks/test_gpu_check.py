"""The check of one GPU, tried on a model of nothing: what it writes, and what ends it."""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.checks import gpu_check, gpu_fits, gpu_guarantees, gpu_parts
from benchmarks.checks.gpu_models import make_policy
from benchmarks.speed.contest import ROOT
from covey.engine.native import rows

from ..support.pretend_gpu import PretendGpu

PARTS = (
    gpu_check.Part("first", "facts", 5, "nothing"),
    gpu_check.Part("result", "exact", 5, "right", decides=True),
    gpu_check.Part("speed", "decode", 5, "fast"),
)


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **functions: Any) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and lines of three parts, some of which compute something else."""
    monkeypatch.setattr(gpu_check, "PARTS", PARTS)
    for name in ("facts", "exact", "decode"):
        monkeypatch.setattr(gpu_parts, name, functions.get(name, lambda tiny: {"right": True}))
    code = gpu_check.main(["--tiny", "--out", str(tmp_path)])
    return code, [json.loads(line) for line in (tmp_path / "gpu_check.jsonl").read_text().splitlines()]


def test_every_part_runs_on_a_model_of_nothing_and_stands_beside_its_prediction(tmp_path: Path) -> None:
    assert gpu_check.main(["--tiny", "--out", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "gpu_check.jsonl").read_text().splitlines()]
    assert [row["part"] for row in rows] == [part.name for part in gpu_check.PARTS]
    assert [row for row in rows if "error" in row or row.get("right") is False] == []
    assert {row["part"] for row in rows if "skipped" in row} == {
        "waits",
        "quantised",
        "memory",
        "against TRL",
        "kernels",
        "fits TRL",
    }
    table = (tmp_path / "gpu_check.md").read_text().splitlines()
    assert len(table) == 2 + len(rows)
    assert all(row["predicted"] in line for row, line in zip(rows, table[2:], strict=True))


def test_a_wrong_result_ends_the_check_and_what_was_found_before_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = run(tmp_path, monkeypatch, exact=lambda tiny: {"right": False, "gap": 3.0})
    assert code == 1
    assert [(row["part"], row.get("right")) for row in rows] == [("first", True), ("result", False)]
    assert rows[1]["gap"] == 3.0
    assert "result: WRONG" in capsys.readouterr().out


@pytest.mark.long
def test_a_part_that_fails_ends_the_check_only_where_a_result_hangs_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tiny: bool) -> Any:
        raise ValueError("no such kernel")

    code, rows = run(tmp_path, monkeypatch, facts=fail)
    assert (code, len(rows)) == (0, 3)
    assert "ValueError: no such kernel" in rows[0]["error"]
    code, rows = run(tmp_path, monkeypatch, exact=fail)
    assert (code, len(rows)) == (1, 2)


@pytest.mark.long
def test_a_slow_figure_ends_no_check_and_a_late_part_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "TINY_SECONDS", 0.3)
    started = time.monotonic()
    code, rows = run(tmp_path, monkeypatch, facts=lambda tiny: time.sleep(60), decode=lambda tiny: {"good": False})
    assert time.monotonic() - started < 20
    assert (code, len(rows)) == (0, 3)
    assert rows[0]["error"] == "longer than 0.3 s"
    assert gpu_check.verdict(rows[2]) == "not as predicted"


@pytest.mark.parametrize("promise", ["update_gap", "sampled_gap", "has_same_rollouts"])
def test_a_promise_that_is_not_kept_is_a_wrong_result(promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"update_gap": 1e-12, "sampled_gap": 1e-6, "has_same_rollouts": True}
    monkeypatch.setattr(gpu_guarantees, "make_policy", lambda **settings: None)
    for name, value in kept.items():
        monkeypatch.setattr(gpu_guarantees, name, lambda *given, value=value, **how: value)
    assert gpu_guarantees.guarantees(False)["right"]
    broken = {"update_gap": 1e-3, "sampled_gap": 0.2, "has_same_rollouts": False}[promise]
    monkeypatch.setattr(gpu_guarantees, promise, lambda *given, **how: broken)
    assert not gpu_guarantees.guarantees(False)["right"]


@pytest.mark.long
def test_rollouts_that_depend_on_their_neighbours_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(precision="float64")
    assert gpu_guarantees.has_same_rollouts(policy)
    numbers = itertools.count(1)
    monkeypatch.setattr(rows, "row_key", lambda seed, index: next(numbers))
    assert not gpu_guarantees.has_same_rollouts(policy)


@pytest.mark.slow
def test_the_promises_hold_on_the_pretend_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_guarantees, "device_here", lambda: "cuda")
    with PretendGpu() as gpu:
        assert gpu_guarantees.update_gap("gpt2", torch.float64, few=True) < 1e-9
        assert gpu.kernels
        policy = make_policy(device="auto", precision="float32", lora_rank=4)
        assert str(policy.device) == "cuda:0"
        assert gpu_guarantees.sampled_gap(policy, gpu_guarantees.SAMPLINGS["filters"]) < 1e-4
        assert not gpu.mixed


def test_turns_of_the_script_name_parts_that_there_are() -> None:
    script = (ROOT / "benchmarks" / "gpu_check.sh").read_text()
    turns = [line.split("parts=(")[1].split(")")[0] for line in script.splitlines() if "parts=(" in line]
    named = {name for turn in turns for name in gpu_check_words(turn)}
    assert named == {part.name for part in gpu_check.PARTS}
    (unseen,) = (turn for turn in turns if "kernels" in gpu_check_words(turn))
    assert gpu_check_words(unseen)[:3] == ["facts", "kernels", "exact"], "by importance: $LIMIT ends it"
    for turn in set(turns) - {unseen}:
        chosen = [part for part in gpu_check.PARTS if part.name in gpu_check_words(turn)]
        together = gpu_check.batches(chosen, together=True)
        assert sum(max(part.seconds for part in batch) for batch in together) <= 700


def test_parts_that_measure_no_time_run_together_and_all_others_alone() -> None:
    names = [[part.name for part in batch] for batch in gpu_check.batches(gpu_check.PARTS, together=True)]
    assert names[:3] == [
        ["facts"],
        ["exact", "waits", "guarantees", "crashes", "quantised", "learns"],
        ["decode"],
    ]
    assert all(len(batch) == 1 for batch in names[2:])
    assert all(len(batch) == 1 for batch in gpu_check.batches(gpu_check.PARTS, together=False))


def test_a_wrong_part_ends_the_check_when_all_parallel_parts_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"facts": {}, "exact": {"right": False}, "waits": {"good": True}}
    monkeypatch.setattr(
        gpu_check, "look", lambda part, tiny: {"part": part.name, "seconds": 0, "predicted": "", **found[part.name]}
    )
    assert gpu_check.main(["facts", "exact", "waits", "decode", "--out", str(tmp_path)]) == 1
    rows = [json.loads(line) for line in (tmp_path / "gpu_check.jsonl").read_text().splitlines()]
    assert [rows[0]["part"], *sorted(row["part"] for row in rows[1:])] == ["facts", "exact", "waits"]


def test_a_limit_leaves_parts_to_another_call_which_repeats_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = itertools.count(0, 100)
    deadlines: dict[str, int] = {}

    def look(part: gpu_check.Part, tiny: bool) -> dict[str, Any]:
        deadlines[part.name] = part.seconds
        return {"part": part.name, "seconds": 0, "predicted": ""}

    monkeypatch.setattr(gpu_check, "look", look)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    first, second = tmp_path / "first", tmp_path / "second"
    names = ["decode", "kernels", "sharing", "rates"]
    assert gpu_check.main([*names, "--limit", "330", "--out", str(first)]) == 0
    assert deadlines == {"decode": 150, "kernels": 90, "sharing": 30}, "in the order named, the last with what is left"
    assert "rates: left for another call" in capsys.readouterr().out
    deadlines.clear()
    assert gpu_check.main([*names, "--done", str(first), "--out", str(second)]) == 0
    assert list(deadlines) == ["rates"]


def test_the_stair_of_sizes_and_caps_is_walked_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {"small": 9.0, "middle": 12.0, "large": 60.0}
    tried: list[tuple[str, float]] = []

    def cell(kind: str, size: str, cap: float) -> dict[str, Any]:
        tried.append((size, cap))
        return {"fits": needs[size] <= cap, "seconds": 1.5, "told": needs[size], "peak": needs[size]}

    monkeypatch.setenv("GPU_CHECK_OUT", str(tmp_path))
    monkeypatch.setenv("GPU_CHECK_DONE", str(tmp_path))
    given = "covey", (8, 10, 16, 24), tuple(needs), ("LoRA",), cell
    found = gpu_fits.stairs(*given)
    assert tried == [("small", 8), ("small", 10), ("middle", 10), ("middle", 16), ("large", 16), ("large", 24)]
    told = {"8": "none", "10": "small, 1.5 s", "16": "middle, 1.5 s", "24": "middle, 1.5 s"}
    assert found == {f"LoRA, {cap} GB": best for cap, best in told.items()}
    assert gpu_fits.stairs(*given) == found
    assert len(tried) == 6, "every cell was kept"


def test_the_plan_of_a_size_is_met_by_a_model_of_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPU_CHECK_OUT", str(tmp_path))
    monkeypatch.setenv("GPU_CHECK_DONE", str(tmp_path))
    found = gpu_fits.fits(True)
    assert {name: best.partition(",")[0] for name, best in found.items()} == {
        **{"LoRA, 0.005 GB": "none", "LoRA, 0.01 GB": "small", "LoRA, 0.05 GB": "larger"},
        **{"all weights, 0.005 GB": "none", "all weights, 0.01 GB": "small", "all weights, 0.05 GB": "larger"},
    }


def test_the_script_is_a_program_of_bash() -> None:
    assert subprocess.run(["bash", "-n", str(ROOT / "benchmarks" / "gpu_check.sh")]).returncode == 0


@pytest.mark.slow
def test_the_script_runs_to_its_end_without_a_gpu(tmp_path: Path) -> None:
    variables = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable}
    words = ["bash", str(ROOT / "benchmarks" / "gpu_check.sh")]
    ran = subprocess.run([*words, "tiny"], env=variables, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert [line.partition(":")[0] for line in ran.stdout.splitlines()] == [part.name for part in gpu_check.PARTS]
    assert len((tmp_path / "gpu_check-tiny" / "gpu_check.jsonl").read_text().splitlines()) == len(gpu_check.PARTS)
    wrong = subprocess.run([*words, "all"], env=variables, capture_output=True, text=True)
    assert (wrong.returncode, wrong.stderr) == (2, "right, fast, compared, open or tiny, got all\n")


def gpu_check_words(turn: str) -> list[str]:
    quoted = turn.split('"')
    return [name for index, part in enumerate(quoted) for name in ([part] if index % 2 else part.split())]
