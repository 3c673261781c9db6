"""The model of memory against counted bytes: of one layer of public models, of the head, and of what takes turns."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from covey.environments.arithmetic import Arithmetic
from covey.policy import head
from covey.policy.policy import DTYPES
from covey.policy.settings import ModelConfig, chunk_within_bound
from covey.run.build import build_run
from covey.run.memory.estimate import workload
from covey.run.memory.memory_model import (
    Workload,
    block_layers,
    cast_bytes,
    head_bytes,
    kept_by_layer,
    memory_of,
    passing_in_layer,
)
from covey.run.memory.model_shapes import Shape, shape_of
from covey.system.waits.timer import PhaseTimer
from covey_preflight import passes
from covey_preflight.memory import check_memory
from covey_preflight.policy import probe_trainer
from covey_preflight.subject import PreflightContext
from covey_report.plan.settings import plan, shape_for

from ...support.models.counted_layer import NUM_TOKENS, count_layer
from ...support.models.saved_models import qwen, save_model
from ...support.small import scripted, small_config

GB80 = 80 * 10**9


def known(name: str) -> Shape:
    shape = shape_of(ModelConfig(name=name))
    assert shape is not None
    return shape


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 32])
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("Qwen2.5-0.5B", "bfloat16"),
        ("Qwen2.5-1.5B", "bfloat16"),
        ("Qwen2.5-1.5B", "float32"),
        ("Qwen2.5-7B", "bfloat16"),
        ("Qwen3-0.6B", "bfloat16"),
    ],
)
def test_a_layer_keeps_what_is_counted_for_it(name: str, precision: str, rank: int) -> None:
    shape, load = known(name), Workload(precision=precision, lora_rank=rank)
    counted = count_layer(name.lower(), precision, rank)
    kept = NUM_TOKENS * kept_by_layer(shape, load) + cast_bytes(replace(shape, layers=block_layers(shape)), load)
    assert kept == pytest.approx(counted.kept, rel=0.01)
    assert kept + NUM_TOKENS * passing_in_layer(shape, load) == pytest.approx(counted.peak, rel=0.1)


@pytest.mark.parametrize("rank", [0, 32])
@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen3-0.6B"])
def test_a_layer_through_liger_keeps_what_is_counted_for_it(name: str, rank: int) -> None:
    shape, load = known(name), Workload(precision="bfloat16", lora_rank=rank, fuses_layers=True)
    counted = count_layer(name.lower(), "bfloat16", rank, by_liger=True)
    kept = NUM_TOKENS * kept_by_layer(shape, load) + cast_bytes(replace(shape, layers=block_layers(shape)), load)
    assert kept == pytest.approx(counted.kept, rel=0.01)
    assert kept + NUM_TOKENS * passing_in_layer(shape, load) == pytest.approx(counted.peak, rel=0.1)


def test_bytes_of_a_token_and_layer_are_known_by_heart() -> None:
    """KiB, all weights trained and adapters of rank 32, and all weights trained through Liger."""
    full, adapters = Workload(precision="bfloat16"), Workload(precision="bfloat16", lora_rank=32)
    shapes = [known(f"Qwen2.5-{size}") for size in ("0.5B", "1.5B", "7B")]
    assert [round(kept_by_layer(shape, full) / 1024) for shape in shapes] == [65, 116, 255]
    assert [round(kept_by_layer(shape, adapters) / 1024) for shape in shapes] == [53, 95, 207]
    by_liger = replace(full, fuses_layers=True)
    assert [round(kept_by_layer(shape, by_liger) / 1024) for shape in shapes] == [43, 78, 169]


@pytest.mark.parametrize(("precision", "rank"), [("bfloat16", 0), ("float32", 0), ("bfloat16", 32)])
def test_the_head_takes_what_is_counted_for_it(precision: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(head.SLICE, "cpu", head.SLICE["cuda"])
    monkeypatch.setattr(passes, "OWN_MEMORY", (*passes.OWN_MEMORY, FakeTensor))
    shape = known("Qwen2.5-0.5B")
    chunk = chunk_within_bound(4096, shape.vocabulary)
    load = Workload(precision=precision, lora_rank=rank, micro_batch_tokens=3 * chunk, logprob_chunk=chunk)
    with FakeTensorMode():
        layer = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        layer.requires_grad_(rank == 0)
        rows = torch.empty(3 * chunk, shape.hidden, dtype=DTYPES[precision], requires_grad=True)
        target, predicted = torch.zeros(3 * chunk, dtype=torch.int64), torch.zeros(3 * chunk)
        with passes.LiveBytes() as live:
            head.score_rows(head.Head(layer, DTYPES[precision], 1.0, chunk), rows, target, predicted)
    assert head_bytes(shape, load) == pytest.approx(live.peak, rel=0.1)


def test_sharded_memory_is_split_over_gpus_and_sampling_gathers_weights() -> None:
    shape = known("Qwen2.5-7B")
    load = Workload("bfloat16", gradient_checkpointing=True, has_reference=True, num_rows=8, num_cached=8)
    whole, shared = memory_of(shape, load), memory_of(shape, replace(load, num_shards=8))
    for name in ("weights", "reference", "gradients", "optimizer"):
        assert shared[name] == -(-whole[name] // 8)
    assert shared["sampling"] - whole["sampling"] == 2 * shape.weights
    assert shared["saving"] == 4 * shape.vocabulary * shape.hidden
    assert "decode_copy" not in shared
    assert whole["in_all"] > GB80 > shared["in_all"]


def test_what_takes_turns_is_counted_once_and_gradients_are_let_go_while_sampling() -> None:
    shape = known("Qwen2.5-1.5B")
    load = Workload(precision="bfloat16", micro_batch_tokens=64, num_rows=512, num_cached=2 * 10**6)
    for each in (load, replace(load, keeps_gradients=True), replace(load, num_rows=1, num_cached=1)):
        found = memory_of(shape, each)
        idle = 0 if each.keeps_gradients else found["gradients"]
        kept = sum(found[name] for name in ("weights", "gradients", "optimizer", "decode_copy"))
        assert found["in_all"] == kept + max(found["training"], found["sampling"] - idle)
    assert memory_of(shape, load)["sampling"] - memory_of(shape, replace(load, cache_bytes=10**9))["sampling"] == (
        2 * 10**6 * shape.key_value_width * 2 - 10**9
    )


def test_recomputing_and_offloading_activations_take_less_and_longer_micro_batches_more() -> None:
    shape, load = known("Qwen2.5-7B"), Workload(precision="bfloat16", lora_rank=16)
    usual = memory_of(shape, load)["training"]
    again = memory_of(shape, replace(load, gradient_checkpointing=True))["training"]
    both = memory_of(shape, replace(load, gradient_checkpointing=True, activation_offload=True))["training"]
    assert both < again < 0.3 * usual
    assert memory_of(shape, replace(load, activation_offload=True))["training"] < 0.3 * usual
    twice = memory_of(shape, replace(load, micro_batch_tokens=2 * load.micro_batch_tokens))["training"]
    assert 1.8 * usual < twice < 2 * usual


def test_vllm_holds_weights_of_its_own_and_a_scripted_engine_nothing() -> None:
    shape, load = known("Qwen2.5-1.5B"), Workload(precision="bfloat16", num_rows=4, num_cached=4096)
    native, vllm, fake = (
        memory_of(shape, replace(load, engine=name))["sampling"] for name in ("native", "vllm", "fake")
    )
    assert (vllm - native, fake) == (2 * shape.weights, 0)


@pytest.mark.long
@pytest.mark.parametrize(("precision", "rank", "again"), [("float32", 0, False), ("bfloat16", 4, True)])
def test_a_whole_pass_takes_what_is_told_beforehand(
    precision: str, rank: int, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "MAX_SECONDS", math.inf)
    config = small_config(
        model__name=save_model(tmp_path, qwen()),
        model__kernels="torch",
        model__precision=precision,
        model__lora_rank=rank,
        model__gradient_checkpointing=again,
        groups_per_step=32,
        sampling__max_tokens=64,
        micro_batch_tokens=2000,
    )
    run = build_run(config, scripted(), PhaseTimer())
    try:
        measured = check_memory(PreflightContext(run, config)).values["training"]
    finally:
        run.close()
    told = plan(config, num_ranks=1)
    assert told["training"] + told["gradients"] == pytest.approx(measured, rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("chunk", [0, 256])
def test_gradients_of_a_single_micro_batch_are_made_while_its_activations_go(again: bool, chunk: int) -> None:
    model = {"kernels": "torch", "nano_hidden_size": 256, "nano_num_layers": 6, "gradient_checkpointing": again}
    config = small_config(
        **{f"model__{name}": value for name, value in model.items()},
        groups_per_step=8,
        group_size=8,
        sampling__max_tokens=16,
        logprob_chunk=chunk,
    )
    # Measure a step of one micro-batch, and one of two
    run = build_run(config, Arithmetic(), PhaseTimer())
    subject = PreflightContext(run, config)
    largest = passes.largest_shape(subject, config.groups_per_step)
    try:
        one, two = (
            passes.measure_pass(probe_trainer(subject), replace(largest, several=flag), largest.num_tokens)
            for flag in (False, True)
        )
    finally:
        run.close()
    # Compare what the second adds with what is told
    load = replace(workload(config, 1), micro_batch_tokens=one.num_tokens)
    single, several = (memory_of(shape_for(config.model), replace(load, single_pass=flag)) for flag in (True, False))
    added = several["training"] - single["training"]
    assert added == pytest.approx(two.num_bytes - one.num_bytes, abs=0.05 * one.num_bytes)
    assert two.num_bytes > 1.1 * one.num_bytes


def test_norms_and_gates_through_c_keep_their_inputs_alone() -> None:
    shape = shape_of(ModelConfig(name="Qwen/Qwen2.5-0.5B"))
    assert shape is not None
    plain, compiled = (kept_by_layer(shape, Workload(fuses_layers=flag)) for flag in (False, True))
    assert plain - compiled == 4 * (2 * 896 + 4864)
    lora = [kept_by_layer(shape, Workload(lora_rank=8, fuses_layers=flag)) for flag in (False, True)]
    assert lora[0] - lora[1] == 4 * 4864
