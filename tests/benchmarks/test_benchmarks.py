"""The benchmarks measure what they say: tokens are counted, ratios are of pairs, disturbed repetitions are dropped."""

import json
import mmap
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.__main__ import chosen, main
from benchmarks.speed import floor, sizes
from benchmarks.speed.cases import CASES
from benchmarks.speed.contest import ROOT, TUNED_MALLOC, Worker, WorkerFailed, contest, environment
from benchmarks.speed.floor import Rates, body_parameters, decode_step, shares
from benchmarks.speed.models import saved_model
from benchmarks.speed.ratios import Spread, best_rival, contestant_figures, is_clean, ratio, split_clean
from benchmarks.speed.sizes import Cell, cells, in_short, rivals, tables, times
from benchmarks.speed.table import figures
from benchmarks.speed.workers.covey_steps import config_of, make_step
from benchmarks.speed.workers.worker import Meter
from benchmarks.speed.workloads import SHAPES, Job, Workload, reward_of, to_text

TINY = Job("covey", Workload("tiny", (5, 9), completion_length=6, group_size=4), micro_batch_rollouts=4)


def measured(total: float, others: float = 0.0, peak: int = 100) -> dict[str, Any]:
    return {"seconds": {"total": total}, "num_tokens": 30, "peak_bytes": peak, "others_cores": others}


def repetitions(*pairs: tuple[float, float], others: float = 0.0) -> list[dict[str, dict[str, Any]]]:
    return [{"covey": measured(own), "trl": measured(rival, others)} for own, rival in pairs]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return replace(TINY, model_dir=saved_model(TINY.workload, tmp_path_factory.mktemp("models")))


@pytest.mark.parametrize("packing", ["shared", "packed"])
def test_a_covey_step_samples_every_completion_to_its_full_length_and_trains_on_it(tiny: Job, packing: str) -> None:
    found = make_step(replace(tiny, packing=packing))()
    assert found["num_tokens"] == 2 * 4 * 6
    assert all(found["seconds"][phase] > 0 for phase in ("sampling", "training", "optimizer"))
    assert found["seconds"]["total"] >= sum(found["seconds"][p] for p in ("sampling", "training", "optimizer"))


@pytest.mark.long
def test_phases_can_be_measured_alone(tiny: Job) -> None:
    sampled = make_step(replace(tiny, phase="sampling"))()
    trained = make_step(replace(tiny, phase="training"))()
    assert (sampled["num_tokens"], trained["num_tokens"]) == (48, 48)
    assert sampled["seconds"]["training"] == 0
    assert sampled["seconds"]["sampling"] > 0
    assert trained["seconds"]["sampling"] == 0
    assert trained["seconds"]["training"] > 0


def test_a_worker_process_answers_step_by_step(tiny: Job, tmp_path: Path) -> None:
    found = contest({"covey": TINY}, 1, Path(tiny.model_dir).parent, tmp_path)
    assert 1 <= len(found) <= 2, "one clean repetition, or twice as many tries"
    assert found[0]["covey"]["num_tokens"] == 48


def test_a_worker_that_dies_says_why(tiny: Job, tmp_path: Path) -> None:
    broken = replace(tiny, model_dir="/nowhere")
    with Worker(broken, tmp_path / "log") as worker, pytest.raises(WorkerFailed, match=r"covey ended: .*/nowhere"):
        worker.ready()


def test_the_stop_token_cannot_be_sampled_and_prompts_are_the_ids_that_were_drawn(tiny: Job) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny.model_dir)
    assert tokenizer.eos_token_id == SHAPES["tiny"].vocabulary
    for prompt in tiny.workload.prompts():
        assert tokenizer(to_text(prompt))["input_ids"] == prompt
    assert tiny.workload.prompts() == TINY.workload.prompts()


def test_a_micro_batch_holds_the_rollouts_the_job_says() -> None:
    work = Workload("S", (256,) * 8)
    job = Job("covey", work, model_dir="models/S", micro_batch_rollouts=16)
    assert config_of(job).micro_batch_tokens == 2 * 256 + 16 * 128
    assert config_of(replace(job, packing="packed")).micro_batch_tokens == 16 * (256 + 128)


def test_rewards_of_a_group_differ_so_that_no_rollout_is_free() -> None:
    values = {reward_of(f"t{index}") for index in range(64)}
    assert len(values) == 64


def test_a_job_survives_the_command_line() -> None:
    assert Job.from_json(TINY.to_json()) == TINY


def test_figures_are_medians_with_the_smallest_and_the_largest() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([4.0, 1.0]) == Spread(2.5, 1.0, 4.0)


def test_a_ratio_is_of_pairs_not_of_medians() -> None:
    pairs = repetitions((1.0, 2.0), (2.0, 10.0), (4.0, 12.0))
    assert ratio(pairs, "trl", "seconds") == Spread(3.0, 2.0, 5.0)


def test_the_best_rival_counts() -> None:
    three = [{"covey": measured(1.0), "a": measured(3.0), "b": measured(2.0, peak=900)}]
    assert best_rival(three, "seconds") == "b"
    assert best_rival(three, "peak_bytes") == "a"


@pytest.mark.parametrize(("total", "others", "clean"), [(1.0, 0.09, True), (1.0, 0.11, False), (0.4, 0.14, True)])
def test_a_step_is_clean_while_others_use_little(total: float, others: float, clean: bool) -> None:
    assert is_clean(measured(total, others)) is clean


def test_repetitions_that_were_disturbed_are_dropped_and_counted() -> None:
    mixed = [*repetitions((1.0, 4.0), (1.0, 6.0)), *repetitions((1.0, 90.0), others=0.5)]
    kept, num_dropped = split_clean(mixed)
    assert (len(kept), num_dropped) == (2, 1)
    found = figures(mixed, "seconds")
    assert found["ratio"] == {"median": 5.0, "low": 4.0, "high": 6.0}
    assert (found["num_clean"], found["num_dropped"]) == (2, 1)


def test_where_nothing_was_clean_the_count_says_so() -> None:
    found = figures(repetitions((1.0, 4.0), others=0.5), "seconds")
    assert (found["num_clean"], found["num_dropped"]) == (0, 1)
    assert found["ratio"]["median"] == 4.0


def test_the_meter_leaves_out_what_the_optimizer_allocates() -> None:
    meter = Meter()
    meter.start()
    with touched(2**25) as held:
        meter.mark_peak()
        with touched(2**27) as later:
            found = meter.stop({}, 0)
            assert held[0] + later[0] == 2
    assert 2**24 <= found["peak_bytes"] < 2**27


@contextmanager
def touched(num_bytes: int) -> Iterator[mmap.mmap]:
    """Resident memory that is new to the process: what malloc hands out may have been resident before."""
    with mmap.mmap(-1, num_bytes) as memory:
        for start in range(0, num_bytes, mmap.PAGESIZE):
            memory[start] = 1
        yield memory


def test_the_peers_get_the_allocator_that_serves_them_best_and_covey_sets_its_own() -> None:
    assert TUNED_MALLOC.items() <= environment(replace(TINY, contestant="trl"), {}).items()
    assert not TUNED_MALLOC.keys() & environment(TINY, {}).keys()
    assert not TUNED_MALLOC.keys() & environment(replace(TINY, contestant="trl", tuned_malloc=False), {}).keys()


def test_the_floor_counts_parameters_operations_and_bytes() -> None:
    shape = SHAPES["M"]
    assert floor.body_parameters(shape) == 8 * (2 * 512 * 512 + 2 * 512 * 128 + 3 * 512 * 1792)
    assert floor.head_parameters(shape) == 32768 * 512
    work = Workload("M", (100,), completion_length=10, group_size=2)
    parameters = floor.body_parameters(shape) + floor.head_parameters(shape)
    operations, read = floor.decode_step(work, 5, "bfloat16")
    assert operations == 2 * 2 * parameters + 4 * 8 * 512 * 2 * 105
    assert read == 2 * (parameters + 2 * 8 * 128 * (100 + 2 * 5))


def test_without_a_gpu_the_gpu_benchmark_refuses_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["gpu"]) == 2
    assert capsys.readouterr().err == "benchmarks gpu needs a CUDA GPU and there is none\n"


def test_cases_are_chosen_by_name_and_quick_skips_slow_starts() -> None:
    assert list(chosen(["vllm-S", "step-S"], quick=False)) == ["step-S", "vllm-S"]
    quick = chosen(None, quick=True)
    assert all(case.at_least is not None for case in quick.values())
    assert list(quick["vllm-S"].rivals) == ["vllm-eager", "vllm-eager-iomp"]
    with pytest.raises(ValueError, match="no case nothing; there are step-S, "):
        chosen(["nothing"], quick=False)


def test_trl_and_covey_do_the_same_work() -> None:
    for name, case in CASES.items():
        works = {(job.workload, job.phase) for job in case.jobs.values()}
        assert len(works) == 1, f"{name} compares different work"
        assert all(job.workload.num_rollouts % job.micro_batch_rollouts == 0 for job in case.jobs.values()), name


def test_workers_for_other_environments_import_no_covey() -> None:
    plain = "benchmarks.speed.workers.worker, benchmarks.speed.workloads"
    program = f"import sys, {plain}; print(*{{'covey', 'torch'}} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout == "\n"


# ------------------------------------------------------------------------------------------------ real sizes

STEP = {"seconds": {"total": 2.0}, "num_tokens": 256, "peak_bytes": 5 * 10**8, "own_cores": 1.9, "others_cores": 0.0}


@pytest.mark.parametrize("phase", ["sampling", "step"])
def test_every_cell_of_real_sizes_has_valid_settings(phase: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    jobs = [cell.job("covey", "cpu") for cell in cells("cpu") if cell.phase == phase]
    found = [config_of(replace(job, model_dir=str(tmp_path))) for job in jobs]
    assert {config.groups_per_step * config.group_size for config in found} == (
        {1, 4, 16, 64, 256} if phase == "sampling" else {64}
    )


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
    hours = iter([Rates(1e12, 2e12, 1e10), Rates(2e12, 1e12, 3e10)])
    monkeypatch.setattr(sizes.floor, "measured", lambda *_: {"135M/float32": next(hours)})
    kept, said = tmp_path / "real_sizes.json", list[str]()
    for _ in range(2):
        sizes.run("cpu", ("sampling", "135M float32", " 4 rows"), 1, said.append, again=False)
    assert asked == ["covey", "vllm"]
    (row,) = json.loads(kept.read_text())["cells"].values()
    assert row["absent"] == {"llama": "not here"}
    assert row["rates"] == {"decode_flops": 2e12, "training_flops": 2e12, "bandwidth": 3e10}
    assert row["contestants"]["vllm"]["tokens_per_second"]["median"] == 128.0
    assert said == [f"sampling 135M float32 4 rows: {in_short(row)}"]
    assert "covey 128 (128 to 128) tokens/s" in said[0]


def test_the_page_shows_what_was_measured_at_real_sizes() -> None:
    page = (ROOT / "docs" / "use" / "real_models.md").read_text().splitlines()
    lines = tables(sizes.load(sizes.NAME)["cells"])
    assert [line for line in lines if line and line not in page] == []
    assert len(lines) > 5


def test_a_step_is_shown_with_pairs_of_turns_and_the_memory_of_whole_processes() -> None:
    def turn(name: str, seconds: float) -> dict[str, Any]:
        phases = {"total": seconds, "sampling": 0.5, "training": 0.25, "optimizer": 0.0}
        return {**STEP, "seconds": phases, "process_bytes": {"covey": 10**9, "trl": 6 * 10**9}[name]}

    raw = [{"covey": turn("covey", own), "trl": turn("trl", other)} for own, other in ((1.0, 8.0), (2.0, 10.0))]
    found = {name: contestant_figures([each[name] for each in raw]) for name in ("covey", "trl")}
    found["covey"]["shares"] = {"sampling": 0.5, "training": 0.75}
    found["trl"]["times"] = times(raw, "trl")
    cell = Cell("step", "135M", "bfloat16", 64)
    assert tables({cell.name: {"contestants": found, "raw": raw}})[-1] == (
        "| SmolLM2-135M | bfloat16 | all weights | 9.0 (8.0 to 10.0) | 1.5 (1.0 to 2.0) | 6.5 (5.0 to 8.0) "
        "| sampling 50%, training 75% | 6.0 GB | 1.0 GB |"
    )


def test_frozen_weights_need_two_thirds_of_the_products() -> None:
    work = Cell("step", "135M", "float32", 64).workload
    whole, adapters = floor.training_flops(work), floor.training_flops(work, only_adapters=True)
    tokens = 8 * 128 + 64 * 64
    frozen = 2 * (tokens * floor.body_parameters(work.shape) + 64 * 64 * floor.head_parameters(work.shape))
    assert whole - adapters == frozen
