"""`python -m benchmarks real`: what is measured, what is missing here, and what is kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real import sizes
from benchmarks.real.sizes import Cell, cells, in_short, rivals
from benchmarks.speed.floor import Rates, body_parameters, decode_step, shares
from benchmarks.speed.workloads import SHAPES

STEP = {"seconds": {"total": 2.0}, "num_tokens": 256, "peak_bytes": 5 * 10**8, "own_cores": 1.9, "others_cores": 0.0}


def test_the_shapes_are_those_of_the_models_they_are_named_after() -> None:
    weights = {size: body_parameters(shape) + shape.vocabulary * shape.hidden for size, shape in SHAPES.items()}
    assert round(weights["135M"] / 1e6) == 134
    assert round(weights["0.5B"] / 1e6) == 494
    assert round(weights["0.6B"] / 1e6) == 596
    assert round(weights["4B"] / 1e8) == 40


def test_every_number_of_rows_is_sampled_in_both_precisions_of_every_size() -> None:
    found = [cell for cell in cells("cpu") if cell.phase == "sampling" and not cell.lora_rank]
    assert {(cell.size, cell.precision, cell.rows) for cell in found} == {
        (size, precision, rows)
        for size in ("135M", "0.5B", "0.6B")
        for precision in ("float32", "bfloat16")
        for rows in (1, 4, 16, 64, 256)
    }
    assert all(cell.workload.num_rollouts == cell.rows for cell in found)
    assert {cell.lora_rank for cell in cells("cuda") if cell.phase == "step"} == {0, 16}


def test_few_rows_are_bound_by_reading_the_weights_once_a_token() -> None:
    cell = Cell("sampling", "135M", "float32", 1)
    flops, read = decode_step(cell.workload, 1, cell.precision)
    assert 530e6 < read < 560e6
    rates = Rates(decode_flops=1e15, training_flops=1e15, bandwidth=read)  # a second for each token
    assert shares(cell.job("vllm", "cpu"), {"total": {"median": 126.0}}, rates)["sampling"] == pytest.approx(
        0.5, rel=0.02
    )
    assert flops < 300e6


def test_a_rival_that_cannot_be_had_is_named_with_the_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "find_spec", lambda name: None)
    monkeypatch.setattr(sizes, "VLLM_PYTHON", Path("nowhere"))
    found = rivals(Cell("sampling", "135M", "float32", 4), "cpu")
    assert found == {"vllm": "make bench-vllm-setup", "llama": "pip install xllamacpp", "transformers": ""}
    assert rivals(Cell("step", "135M", "float32", 64), "cpu") == {"trl": ""}


def test_a_cell_is_written_when_it_is_done_and_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def contest(jobs: Any, *_: Any) -> list[dict[str, Any]]:
        asked.extend(jobs)
        return [dict.fromkeys(jobs, STEP)]

    monkeypatch.setattr(sizes, "RESULTS", tmp_path)
    monkeypatch.setattr(sizes, "load", lambda name: json.loads(kept.read_text()) if kept.is_file() else {})
    monkeypatch.setattr(sizes, "contest", contest)
    monkeypatch.setattr(sizes, "saved_model", lambda work, folder: str(tmp_path))
    monkeypatch.setattr(sizes, "rivals", lambda cell, device: {"vllm": "", "llama": "not here"})
    monkeypatch.setattr(sizes.floor, "measured", lambda *_: {"135M/float32": Rates(1e12, 1e12, 1e10)})
    kept, said = tmp_path / "real_sizes.json", list[str]()
    for _ in range(2):
        sizes.run("cpu", ("sampling", "135M float32", " 4 rows"), 1, said.append, again=False)
    assert asked == ["covey", "vllm"]
    (row,) = json.loads(kept.read_text())["cells"].values()
    assert row["absent"] == {"llama": "not here"}
    assert row["contestants"]["vllm"]["tokens_per_second"]["median"] == 128.0
    assert said == [f"sampling 135M float32 4 rows: {in_short(row)}"]
    assert "covey 128 (128 to 128) tokens/s" in said[0]
