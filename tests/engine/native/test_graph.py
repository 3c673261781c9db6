"""Decoding as a graph, uncaptured on a CPU: the rollouts are those of one token at a time, whoever looks when."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from covey.engine.native import graph, steps
from covey.engine.native.decode_weights import FusedAdapter
from covey.engine.native.engine import NativeEngine
from covey.policy.attention.base import Heads
from covey.policy.policy import Policy
from covey.types import Completion, Sampling

from ...support.builders import nano
from ...support.flash import cascade_attend, flash_forward
from ..tiny import plain_logprobs, tiny_model, tiny_policy
from .test_engine import GENEROUS, PROMPTS, SETTINGS, sampled, tokens

STOPS = range(0, 260, 23)
EQUAL_LENGTHS = [Sampling(max_tokens=12)] * 4


def run(
    is_graph: bool,
    samplings: Sequence[Sampling] = EQUAL_LENGTHS,
    architecture: str = "qwen2",
    n: int = 3,
    max_rows: int = 64,
    stops: Sequence[int] = STOPS,
) -> tuple[list[list[Completion]], NativeEngine]:
    """Sample in float64, as a graph or one token at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "is_wanted", lambda policy: is_graph)
        engine = NativeEngine(tiny_policy(architecture, torch.float64, stops), GENEROUS, max_rows, kernels="torch")
        return sampled(engine, PROMPTS, n, samplings), engine


def assert_same(found: list[list[Completion]], wanted: list[list[Completion]]) -> None:
    """The same tokens for the same reason, and log-probs up to the order in which float64 adds."""
    assert tokens(found) == tokens(wanted)
    for group, other in zip(found, wanted, strict=True):
        for mine, theirs in zip(group, other, strict=True):
            assert mine.finish_reason == theirs.finish_reason
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-12)


@pytest.mark.parametrize("settings", ["plain", "mixed"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2-window", "mistral-window", "gpt2"])
def test_rollouts_are_those_of_one_token_at_a_time(architecture: str, settings: str) -> None:
    found, engine = run(True, SETTINGS[settings], architecture)
    wanted, one_by_one = run(False, SETTINGS[settings], architecture)
    assert_same(found, wanted)
    assert any(c.finish_reason == "stop" for group in found for c in group)
    assert engine.take_stats().sampled_tokens == one_by_one.take_stats().sampled_tokens
    assert engine.cache_bytes_used == 0


@pytest.mark.parametrize("architecture", ["llama", "qwen2-window"])
def test_rollouts_through_flash_attention_over_the_cache_are_the_same(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def forward(*given: Any, **named: Any) -> tuple[Tensor]:
        calls.append(named)
        return flash_forward(*given, **named)

    monkeypatch.setattr(graph, "can_flash", lambda heads: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    samplings = [Sampling(max_tokens=20, seed=seed) for seed in range(4)]
    found, _ = run(True, samplings, architecture, n=7, max_rows=5)
    assert calls
    monkeypatch.undo()
    assert_same(found, run(False, samplings, architecture, n=7)[0])


@pytest.mark.parametrize("architecture", ["llama", "qwen2-window"])
def test_rollouts_with_prompts_read_once_for_their_group_are_the_same(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one group enter in waves, move and leave, so that tiles are made anew."""
    monkeypatch.setattr(graph, "can_flash", lambda heads: True)
    monkeypatch.setattr(graph, "can_share", lambda policy, shape: True)
    monkeypatch.setattr(graph, "flash_rows", lambda *given: pytest.fail("every prompt is shared"))
    monkeypatch.setattr(graph, "repeats_much", lambda rows: True)
    monkeypatch.setattr(graph.Tiles, "attend", cascade_attend)
    samplings = [Sampling(max_tokens=20, seed=seed) for seed in range(4)]
    found, _ = run(True, samplings, architecture, n=11, max_rows=14)
    monkeypatch.undo()
    assert_same(found, run(False, samplings, architecture, n=11)[0])


def test_the_next_steps_are_launched_before_the_last_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that was launched ahead is drawn once, and read with the one before it where a row has ended."""
    events: list[str] = []
    step, read = graph.one_step, steps.UnreadSteps.read
    monkeypatch.setattr(graph, "one_step", lambda *given: (events.append("step"), step(*given))[1])
    monkeypatch.setattr(steps.UnreadSteps, "read", lambda look, rows: (events.append("read"), read(look, rows))[1])
    alone = [Sampling(max_tokens=34)] * 4
    found, _ = run(True, alone, n=1, stops=())
    looks = "".join(event[0] for event in events).split("r")
    assert [len(own) for own in looks] == [16, 8, 8, 1, 0, 0], "33 tokens after the first, 8 at a time"
    assert_same(found, run(False, alone, n=1, stops=())[0])
    events.clear()
    found, engine = run(True, alone, n=8)
    wanted, one_by_one = run(False, alone, n=8)
    assert_same(found, wanted)
    assert engine.take_stats().sampled_tokens == one_by_one.take_stats().sampled_tokens
    assert "r r" in " ".join(event[0] for event in events), "a row ended, so that both are read before rows move"


def test_flash_attention_reads_the_cache_on_a_gpu_in_half_precision_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = Heads(torch.bfloat16, "cuda", 64, 64)
    assert graph.can_flash(on_gpu)
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "7.0")
        assert not graph.can_flash(on_gpu), "torch for AMD takes no lengths of rows"
    assert not any(
        graph.can_flash(replace(on_gpu, **other))
        for other in (
            {"dtype": torch.float32},
            {"device_type": "cpu"},
            {"is_plain": False},
            {"key_width": 60, "value_width": 60},
            {"value_width": 128},
        )
    )


@pytest.mark.long
def test_rows_that_enter_in_waves_and_leave_have_the_same_rollouts() -> None:
    samplings = [Sampling(max_tokens=20, seed=seed) for seed in range(4)]
    found, engine = run(True, samplings, n=7, max_rows=5)
    assert_same(found, run(False, samplings, n=7)[0])
    assert engine.take_stats().peak_rows == 5


def test_log_probs_are_those_of_a_plain_forward() -> None:
    groups, _ = run(True, architecture="gpt2", stops=())
    plain = tiny_model("gpt2", torch.float64, attention="eager").eval()
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            wanted = plain_logprobs(plain, prompt, completion, EQUAL_LENGTHS[0])
            assert completion.logprobs == pytest.approx(wanted.tolist(), abs=1e-10)


@pytest.mark.long
def test_stop_strings_end_a_row_between_two_looks_too() -> None:
    samplings = [Sampling(max_tokens=40, stop=("e", "7"), seed=seed) for seed in range(4)]
    found, _ = run(True, samplings, stops=())
    assert_same(found, run(False, samplings, stops=())[0])
    lengths = [len(c.token_ids) for group in found for c in group if c.finish_reason == "stop"]
    assert any(length % graph.LOOK_EVERY for length in lengths)


def test_a_captured_step_equals_an_uncaptured_one_and_dies_with_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph knows addresses alone: here it refuses to run where the block has been replaced since."""
    captured: list[int] = []
    runners: list[graph.GraphRunner] = []
    real = graph.GraphRunner.__init__

    def noted(self: graph.GraphRunner, *given: object) -> None:
        real(self, *given)  # type: ignore[arg-type]
        runners.append(self)

    def capture(step: Callable[[], None], pool: object) -> tuple[Callable[[], None], object]:
        keys = runners[-1].cache.rows.keys[0]
        captured.append(0)
        place = len(captured) - 1

        def replay() -> None:
            assert runners[-1].cache.rows.keys[0] is keys
            captured[place] += 1
            step()

        return replay, None

    monkeypatch.setattr(graph.GraphRunner, "__init__", noted)
    monkeypatch.setattr(graph, "can_capture", lambda device: True)
    monkeypatch.setattr(graph, "capture", capture)
    monkeypatch.setattr(graph, "SLOT_UNIT", 16)
    samplings = [Sampling(max_tokens=40, seed=seed) for seed in range(4)]
    found, engine = run(True, samplings, stops=())
    assert_same(found, run(False, samplings, stops=())[0])
    assert 1 < len(captured) < 12, "as many rows all along, which outgrow their block"
    assert sum(captured) > 20
    assert not engine._runner._graphs  # type: ignore[attr-defined] # the graph's runner


@pytest.mark.parametrize(
    ("reads_idle", "has_sessions", "expected"),
    [(False, False, 40), (True, False, 32), (False, True, 32)],
    ids=["flash", "all slots are read", "sessions rest beside"],
)
def test_rows_are_allocated_in_full_where_idle_slots_cost_nothing(
    reads_idle: bool, has_sessions: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "SLOT_UNIT", 16)
    engine = NativeEngine(tiny_policy("qwen2", torch.float64), GENEROUS, 8, kernels="torch")
    runner = graph.GraphRunner(engine._policy, engine._runner.cache)
    runner._reads_idle = reads_idle
    request = engine._request(list(range(5, 15)), 2, Sampling(max_tokens=30))
    if has_sessions:
        request.keep_rows()
    engine._scheduler.submit(request)
    (row, _) = engine._scheduler.admit().rows
    row.token_ids.append(7)
    assert engine._scheduler.limits.rows_hold_prompts is False
    engine._scheduler.limits = replace(engine._scheduler.limits, rows_hold_prompts=True)
    assert runner._length(engine._scheduler) == expected


def test_a_step_that_cannot_be_captured_runs_uncaptured_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def capture(step: Callable[[], None], pool: object) -> tuple[Callable[[], None], object]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    monkeypatch.setattr(graph, "can_capture", lambda device: True)
    monkeypatch.setattr(graph, "capture", capture)
    assert_same(run(True)[0], run(False)[0])
    # What other tests left behind may be collected here, which asyncio logs
    told = [record.getMessage() for record in caplog.records if record.name == graph.LOGGER.name]
    assert told == [
        "CUDA graph capture is disabled, so decoding is slower: operation not permitted when stream is capturing"
    ]


@pytest.mark.long
def test_the_cache_stays_within_its_bytes_though_rows_hold_their_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "is_wanted", lambda policy: True)
    policy = tiny_policy("qwen2", torch.float64)
    slot = NativeEngine(policy, GENEROUS, 64)._shape.slot_bytes
    budget = 100 * slot
    engine = NativeEngine(policy, budget, 64, kernels="torch")
    groups = sampled(engine, PROMPTS, 6, EQUAL_LENGTHS)
    assert tokens(groups) == tokens(sampled(NativeEngine(policy, GENEROUS, 64), PROMPTS, 6, EQUAL_LENGTHS))
    stats = engine.take_stats()
    assert stats.peak_cache_bytes <= budget
    assert 1 < stats.peak_rows < 8, "few rows have room at once"
    with pytest.raises(ValueError, match="needs 122 cached tokens, cache_bytes has room for"):
        sampled(engine, [[5] * 55], 1, [Sampling(max_tokens=12)])


def test_the_number_of_rows_is_a_power_of_two_from_8() -> None:
    assert [graph.bucket(n) for n in (1, 8, 9, 16, 17, 511, 512)] == [8, 8, 16, 16, 32, 512, 512]


def test_a_fused_adapter_computes_its_layer() -> None:
    policy: Policy = nano(lora_rank=4, precision="float64")
    named = [(n, m) for n, m in policy.model.named_modules() if n.endswith(("q_proj", "down_proj"))]
    assert named
    for _, layer in named:
        nn.init.normal_(layer.lora_B["default"].weight)  # type: ignore[union-attr,index,arg-type]
        x = torch.randn(2, 3, layer.base_layer.in_features, dtype=torch.float64)  # type: ignore[union-attr,arg-type]
        with torch.no_grad():
            torch.testing.assert_close(FusedAdapter(layer, torch.float64)(x), layer(x), rtol=1e-12, atol=1e-12)
