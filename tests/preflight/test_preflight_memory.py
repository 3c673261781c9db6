"""The check of memory: what is counted, how small passes stand for large ones, what there is to be had."""

import math
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.environments.arithmetic import Arithmetic
from covey.run.build import Run, build_run
from covey.run.memory.room import available_bytes, host_bytes
from covey.system.waits.timer import PhaseTimer
from covey_preflight import memory, passes
from covey_preflight.memory import Need, _finding, _remedy_of_known, check_memory, gradient_bytes, state_bytes
from covey_preflight.passes import (
    BatchShape,
    LiveBytes,
    MemorySample,
    bytes_of,
    fitting_tokens,
    largest_shape,
    measure,
    measure_pass,
    synthetic,
)
from covey_preflight.policy import probe_trainer
from covey_preflight.subject import Check, PreflightContext

from ..support.small import small_config

CPU = torch.device("cpu")
MIB = 1 << 20
Build = Callable[..., PreflightContext]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are tried or not for their bytes, not for the time they take on a machine that is busy."""
    monkeypatch.setattr("covey_preflight.passes.MAX_SECONDS", math.inf)


@pytest.fixture(name="build")
def _build() -> Iterator[Build]:
    """Subjects whose device has `free` bytes left."""
    runs: list[Run] = []

    def build(free: int = 1 << 40, **changes: Any) -> PreflightContext:
        config = small_config(**changes)
        runs.append(build_run(config, Arithmetic(levels=[3], num_train=16, num_test=4), PhaseTimer()))
        return PreflightContext(runs[-1], config, available=lambda device: free)

    yield build
    for run in runs:
        run.close()


LARGE = {"groups_per_step": 64, "sampling__max_tokens": 64, "micro_batch_tokens": 3000}
"""Steps of several micro-batches, the largest of which is measured itself."""


def needed(found: Check) -> int:
    return int(found.values["needed"])


# ------------------------------------------------------------------------------------------------ the verdict


@pytest.mark.long
def test_a_batch_that_does_not_fit_is_refused_and_the_remedy_makes_it_fit(build: Build) -> None:
    need = needed(check_memory(build(**LARGE)))
    free = need - need // 3
    refused = check_memory(build(free, **LARGE))
    assert not refused.passed
    assert refused.figure.endswith("3,000 tokens in a micro-batch (scaled up from 453 and 969)")
    words = refused.remedy.split()
    assert words[:3] == ["lower", "micro_batch_tokens", "to"]
    assert "model.gradient_checkpointing=true" in refused.remedy
    mended = check_memory(build(free, **LARGE | {"micro_batch_tokens": int(words[3])}))
    assert mended.passed
    assert needed(mended) > 0.8 * free  # it does not give away much either


@pytest.mark.long
def test_what_just_fits_passes(build: Build) -> None:
    need = needed(check_memory(build(**LARGE)))
    assert check_memory(build(need + need // 50, **LARGE)).passed
    assert not check_memory(build(need - need // 50, **LARGE)).passed


@pytest.mark.long
def test_the_line_through_small_passes_meets_the_large_one(build: Build) -> None:
    measured = check_memory(build(**LARGE))
    assert measured.figure.endswith("(measured)")
    scaled = check_memory(build(needed(measured) * 3 // 2, **LARGE))  # more than half of it: not tried
    assert scaled.values["measured"] == 0.0
    assert needed(scaled) == pytest.approx(needed(measured), rel=0.03)


@pytest.mark.parametrize("term", ["advantage", "divergence"])
def test_memory_is_measured_with_the_teacher(term: str, build: Build) -> None:
    algorithm = {"algorithm__teacher": "self", "algorithm__teacher_shows": ["gold"], "algorithm__teacher_term": term}
    assert check_memory(build(**algorithm)).passed


def test_a_prompt_longer_than_small_micro_batches_does_not_make_them_one(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(passes.WORK, "cpu", 1.0)  # a model so large that 64 tokens take long
    subject = build(**LARGE)
    shape = replace(largest_shape(subject, 8), prompt_ids=tuple(range(5, 105)))
    trainer = probe_trainer(subject)
    small, larger = passes.measure(trainer, shape, 0)
    assert small.num_tokens < larger.num_tokens <= 64
    whole = passes.measure_pass(trainer, replace(shape, several=True), 3000)
    assert passes.bytes_of([small, larger], whole.num_tokens) == pytest.approx(
        whole.num_bytes, rel=0.3
    )  # not 10 times it


@pytest.mark.long
def test_memory_of_one_micro_batch_is_not_read_off_passes_below_their_gradients(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(passes.WORK, "cpu", 1e8)  # a slow machine: 64 tokens at least
    wide: dict[str, Any] = {"model__nano_hidden_size": 128, "model__nano_num_layers": 2, "sampling__max_tokens": 400}
    subject = build(**wide)
    shape = largest_shape(subject, 2)
    assert (shape.num_tokens > 2000, shape.several) == (True, False)
    trainer = probe_trainer(subject)
    whole = measure_pass(trainer, shape, shape.num_tokens).num_bytes
    read_off = bytes_of(measure(trainer, shape, free=0), shape.num_tokens)
    assert 0.95 * whole <= read_off <= whole + 1.1 * gradient_bytes(subject.run.policy.model)


def test_no_pass_is_tried_where_even_the_optimizer_does_not_fit(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey_preflight.memory.measure", None)  # calling it would raise
    found = check_memory(build(1000))
    assert not found.passed
    assert found.figure.endswith("activations not counted")
    assert found.tolerance == "1000 B free"
    assert found.remedy == "train adapters (model.lora_rank=16) or a smaller model.name"
    assert "smaller model.lora_rank" in check_memory(build(1000, model__lora_rank=2)).remedy


def test_a_cache_that_is_too_large_is_named(build: Build) -> None:
    wide = {"groups_per_step": 64, "engine__max_rows": 256, "sampling__max_tokens": 2048}
    sampling = int(check_memory(build(1, **wide)).values["sampling"])
    assert check_memory(build(sampling - 1, **wide)).remedy == "lower engine.cache_bytes or engine.max_rows"


def test_the_optimiser_and_the_larger_phase_must_fit() -> None:
    points = [MemorySample(100, 20, 0.1, is_largest=True)]
    shape = BatchShape((1,), 4, 2, "packed", "forked", num_tokens=100, several=False)
    for need, total in ((Need(10, 20, 30), 40), (Need(10, 30, 20), 40)):
        found = [_finding(need, free, points, shape, recomputes=True) for free in (total, total - 1)]
        assert [one.passed for one in found] == [True, False]
        assert found[1].values["needed"] == total


@pytest.mark.parametrize(("free", "smaller"), [(29, "model"), (30, "cache"), (109, "cache"), (110, "model")])
def test_a_smaller_cache_is_the_remedy_where_all_but_sampling_fits(free: int, smaller: str) -> None:
    told = {"cache": "lower engine.cache_bytes or", "model": "train adapters (model.lora_rank=16) or"}
    assert _remedy_of_known(small_config(), Need(10, 20, 100), free).startswith(told[smaller])


def test_the_rank_with_the_least_memory_decides(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {bool: lambda value: [value], int: lambda value: [value, 7, value]}
    monkeypatch.setattr(memory.collectives, "all_gather", lambda value: ranks[type(value)](value))
    monkeypatch.setattr(memory, "measure", None)  # calling it would raise
    assert check_memory(build()).values["free"] == 7.0


def test_gradients_are_held_beside_sampling_only_where_groups_stream_in(build: Build) -> None:
    subjects = [build(1, streaming=streaming, source="ray") for streaming in (False, True)]
    usual, streamed = (check_memory(subject).values["sampling"] for subject in subjects)
    assert streamed - usual == gradient_bytes(subjects[0].run.policy.model) > 0


def test_running_out_of_memory_on_the_way_is_a_verdict_too(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def out(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("covey_preflight.memory.measure", out)
    found = check_memory(build())
    assert not found.passed
    assert "ran out of memory" in found.figure


@pytest.mark.long
def test_gradient_checkpointing_takes_less_and_a_copy_for_an_optimizer_more(build: Build) -> None:
    deep = {**LARGE, "model__nano_num_layers": 6}
    plain, saving = check_memory(build(**deep)), check_memory(build(**deep, model__gradient_checkpointing=True))
    assert saving.values["training"] < 0.7 * plain.values["training"]
    model = build().run.policy.model
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert gradient_bytes(model) == weights
    assert state_bytes(model, "adamw") == 2 * weights
    assert state_bytes(model, "adamw8bit") == weights // 2
    assert state_bytes(model, "sgd") == 0
    adapted = build(model__lora_rank=2).run.policy.model
    assert 0 < gradient_bytes(adapted) < gradient_bytes(model)


# ------------------------------------------------------------------------------------------------ passes


def test_bytes_are_counted_while_they_live_and_views_are_not() -> None:
    weight = torch.zeros(1000)
    with LiveBytes() as live:
        first = torch.ones(250)  # 1000 bytes
        first.view(25, 10).add_(1)
        weight[:10].mul_(2)
        weight.t()
        second = torch.ones(500)  # 2000 more
        del second
        third = first + 1  # 1000 beside the first
        assert third.shape == first.shape
    assert live.peak == 3000


def test_a_backward_pass_is_counted_with_the_activations_it_needs() -> None:
    weight = torch.ones(100, 100, requires_grad=True)
    inputs = torch.ones(50, 100)
    with LiveBytes() as live:
        (inputs @ weight).exp().sum().backward()
    product, gradient = 50 * 100 * 4, 100 * 100 * 4
    assert live.peak >= product + gradient
    assert live.peak < 4 * product + 2 * gradient


def test_the_largest_micro_batch_is_the_budget_a_whole_step_or_one_long_rollout(build: Build) -> None:
    step = largest_shape(build(sampling__max_tokens=10), 2)
    assert len(step.prompt_ids) == 6
    assert (step.num_tokens, step.several) == (2 * (6 + 4 * 10), False)
    padded = largest_shape(build(sampling__max_tokens=10, packing="padded"), 2)
    assert padded.num_tokens == 2 * 4 * 16
    full = largest_shape(build(sampling__max_tokens=10, micro_batch_tokens=50), 2)
    assert (full.num_tokens, full.several) == (50, True)
    assert largest_shape(build(sampling__max_tokens=10, micro_batch_tokens=12), 2).num_tokens == 16


@pytest.mark.parametrize(("packing", "expected"), [("shared", 89), ("packed", 90), ("padded", 90)])
def test_a_synthetic_micro_batch_is_filled_with_rollouts_of_full_length(packing: str, expected: int) -> None:
    shape = BatchShape((5, 6, 7), 8, 3, packing, "sdpa", num_tokens=100, several=True)
    batch = synthetic(shape, 95, CPU)
    assert len(batch.micro_batches) == 2
    assert batch.micro_batches[0].input_ids_BT.numel() == expected
    assert set(batch.micro_batches[0].column_L.tolist()) == set(range(8))
    assert len(synthetic(replace(shape, several=False), 95, CPU).micro_batches) == 1
    cut = synthetic(shape, 8, CPU).micro_batches[0]
    assert (cut.num_rows, len(cut.target_L)) == (1, 5)


def test_the_line_and_the_number_that_fits_are_those_of_the_points() -> None:
    hidden = [MemorySample(100, 5000, 0.1, 100), MemorySample(200, 5000, 0.2, 700)]  # gradients are the peak of both
    assert bytes_of(hidden, 1000) == 5000 + 800 * 6
    points = [MemorySample(100, 5000, 0.1), MemorySample(200, 9000, 0.2)]
    assert bytes_of(points, 1000) == 41000
    assert fitting_tokens(points, 41000) == 1000
    assert fitting_tokens(points, 40999) == 990
    assert fitting_tokens(points, 0) == 0
    assert bytes_of(points[:1], 200) == 10000


# ------------------------------------------------------------------------------------------------ what there is


def machine(root: Path, cgroup: str = "") -> Path:
    """A machine with 8 GiB to be had."""
    (root / "proc" / "self").mkdir(parents=True)
    rows = f"MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: {8 * 1024 * 1024} kB\n"
    (root / "proc" / "meminfo").write_text(rows)
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    return root


def group(folder: Path, names: tuple[str, str, str], limit: str, used: int, cached: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\n")


V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_a_machine_without_limits_has_what_it_says(tmp_path: Path) -> None:
    assert host_bytes(machine(tmp_path)) == 8 << 30


def test_a_control_group_leaves_its_limit_less_what_is_used_but_for_droppable_cache(tmp_path: Path) -> None:
    group(tmp_path / "sys/fs/cgroup/jobs/one", V2, str(600 * MIB), 200 * MIB, 50 * MIB)
    assert host_bytes(machine(tmp_path, "0::/jobs/one\n")) == 450 * MIB


def test_the_tightest_of_the_groups_above_counts(tmp_path: Path) -> None:
    group(tmp_path / "sys/fs/cgroup/jobs/one", V2, "max", 200 * MIB, 0)
    group(tmp_path / "sys/fs/cgroup/jobs", V2, str(300 * MIB), 200 * MIB, 0)
    assert host_bytes(machine(tmp_path, "0::/jobs/one\n")) == 100 * MIB


def test_the_first_version_of_control_groups_is_read_too(tmp_path: Path) -> None:
    group(tmp_path / "sys/fs/cgroup/memory", V1, str(900 * MIB), 300 * MIB, 100 * MIB)
    lines = "5:cpu,cpuacct:/x\n4:memory:/not-visible-here\n"
    assert host_bytes(machine(tmp_path, lines)) == 700 * MIB


def test_a_limit_of_the_address_space_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path)
    (root / "proc" / "self" / "statm").write_text("1000 500 1 1 0 1 0\n")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 30, 1 << 30))
    assert host_bytes(root) == (1 << 30) - 1000 * resource.getpagesize()


def test_processes_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.run.memory.room.host_bytes", lambda root: 1000)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert available_bytes(CPU) == 1000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert available_bytes(CPU) == 250


def test_this_machine_has_some_memory() -> None:
    assert 0 < available_bytes(CPU) < 1 << 50
