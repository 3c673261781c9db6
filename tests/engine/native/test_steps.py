"""Steps in one call of C: the same bits as one at a time, wherever a row ends, begins, or is told what it had."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.engine.base import Begun
from covey.engine.native import engine as native
from covey.engine.native.engine import NativeEngine
from covey.engine.native.runner import Runner
from covey.engine.native.steps import DecodeSteps
from covey.types import Completion, Sampling

from ..tiny import tiny_policy
from .test_drafts import PRECISIONS, PROMPTS, ROOM, adapted, sampled
from .test_fused_hybrids import SHAPES, policy_of

ARCHITECTURES = ["llama", "qwen3", "mistral-window"]
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.05},
    {"temperature": 0.7, "stop": ("a", "\n")},
]
SINGLE, LONG = 0.0, 1e9
"""Seconds of a call: of one step, and of as many as there may be."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[int]]:
    """Set the seconds of a call; returns the steps of each that follows."""
    found: list[int] = []
    plain = Runner.decode

    def decode(self: Runner, *given: Any) -> Any:
        self._step_seconds = 1e-3
        drawn = plain(self, *given)
        found.append(len(drawn[1]) // len(set(drawn[0])))
        time.sleep(1e-3 * found[-1])  # as long as it is said to take: a turn ends by the clock
        return drawn

    def of(seconds: float) -> list[int]:
        monkeypatch.setattr(native, "TURN_SECONDS", seconds)
        found.clear()
        return found

    monkeypatch.setattr(Runner, "decode", decode)
    return of


def engine_of(architecture: str, dtype: torch.dtype = torch.float32, stop_ids: Sequence[int] = ()) -> NativeEngine:
    return NativeEngine(tiny_policy(architecture, dtype, stop_ids), ROOM, 64, "compiled", "off")


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_steps_in_one_call_have_the_bits_of_single_ones(
    architecture: str, dtype: torch.dtype, calls: Callable[[float], list[int]]
) -> None:
    engine = engine_of(architecture, dtype, stop_ids=[7, 40])
    for kind in KINDS:
        wanted = Sampling(max_tokens=30, **kind)
        assert set(calls(SINGLE)) <= {1}
        alone = sampled(engine, wanted)
        steps = calls(LONG)
        assert sampled(engine, wanted) == alone
        assert max(steps) == 8


@pytest.mark.parametrize("precision", [str(dtype).removeprefix("torch.") for dtype in PRECISIONS])
@pytest.mark.parametrize("architecture", SHAPES)
def test_steps_of_a_hybrid_have_the_bits_of_single_ones_and_of_draws_beside(
    architecture: str, precision: str, calls: Callable[[float], list[int]], tmp_path: Path
) -> None:
    policy = policy_of(architecture, tmp_path, precision=precision)
    engine, beside = (NativeEngine(policy, ROOM, 64, "compiled") for _ in range(2))
    assert (engine._runner._steps is not None) == ("falcon" not in architecture)  # whose logits are scaled
    beside._runner._steps = None
    calls(LONG)
    found = sampled(engine, Sampling(max_tokens=20))
    assert sampled(beside, Sampling(max_tokens=20)) == found
    calls(SINGLE)
    assert sampled(engine, Sampling(max_tokens=20)) == found


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_steps_have_the_bits_of_draws_beside_the_call(dtype: torch.dtype, calls: Callable[[float], list[int]]) -> None:
    policy = tiny_policy("llama", dtype)
    for each in (policy, adapted(policy)):
        engine, beside = (NativeEngine(each, ROOM, 64, "compiled", "off") for _ in range(2))
        beside._runner._steps = None
        calls(LONG)
        assert sampled(engine, Sampling(max_tokens=30)) == sampled(beside, Sampling(max_tokens=30))


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_weights_of_eight_bits_step_alike(dtype: torch.dtype, calls: Callable[[float], list[int]]) -> None:
    policy = tiny_policy("llama", dtype)
    engine, beside = (NativeEngine(policy, ROOM, 64, "compiled", "off", "int8") for _ in range(2))
    beside._runner._steps = None
    steps, found = calls(LONG), sampled(engine, Sampling(max_tokens=30))
    assert max(steps) == 8
    assert sampled(beside, Sampling(max_tokens=30)) == found


def test_rows_of_different_temperatures_step_together(calls: Callable[[float], list[int]]) -> None:
    engine = engine_of("llama")

    async def run() -> list[list[Completion]]:
        kinds = [Sampling(max_tokens=30, temperature=0.5 * i, seed=i) for i in range(3)]
        return list(await asyncio.gather(*(engine.generate([5, 9, i], 2, kind) for i, kind in enumerate(kinds))))

    steps = calls(LONG)
    together = asyncio.run(run())
    assert steps == [8, 8, 8, 5]
    for index, group in enumerate(together):
        kind = Sampling(max_tokens=30, temperature=0.5 * index, seed=index)
        assert asyncio.run(engine.generate([5, 9, index], 2, kind)) == group


def test_a_stop_token_ends_the_call_with_its_step(calls: Callable[[float], list[int]]) -> None:
    plain = asyncio.run(engine_of("llama").generate([5, 9], 2, Sampling(max_tokens=40)))
    stop = next(t for t in plain[0].token_ids[9:] if t not in (*plain[0].token_ids[:9], *plain[1].token_ids))
    place = plain[0].token_ids.index(stop)
    steps = calls(LONG)
    first, second = asyncio.run(engine_of("llama", stop_ids=[stop]).generate([5, 9], 2, Sampling(max_tokens=40)))
    assert first.token_ids == plain[0].token_ids[: place + 1]
    assert second.token_ids == plain[1].token_ids
    assert place in [sum(steps[:n]) for n in range(len(steps))]


def test_what_is_drawn_behind_a_stop_string_is_thrown_away(calls: Callable[[float], list[int]]) -> None:
    engine = engine_of("llama")
    calls(LONG)
    stopped = sampled(engine, Sampling(max_tokens=40, stop=("e", "1")))
    whole = sampled(engine, Sampling(max_tokens=40))
    assert any(a.finish_reason == "stop" for group in stopped for a in group)
    for a, b in zip((c for group in stopped for c in group), (c for group in whole for c in group), strict=True):
        assert a.token_ids == b.token_ids[: len(a.token_ids)]
        assert a.logprobs == b.logprobs[: len(a.token_ids)]
    assert engine.take_stats().sampled_tokens == sum(
        len(c.token_ids) for each in (stopped, whole) for g in each for c in g
    )


def test_filtered_rows_take_single_steps_and_greedy_ones_as_many_as_others(
    calls: Callable[[float], list[int]],
) -> None:
    engine, kinds = engine_of("llama"), [({"temperature": 0.0}, [8]), ({"top_k": 5}, [1] * 8)]
    for kind, expected in kinds:
        steps = calls(LONG)
        sampled(engine, Sampling(max_tokens=9, **kind))
        assert steps == expected


def test_a_request_that_arrives_waits_for_one_call_at_most(calls: Callable[[float], list[int]]) -> None:
    engine, sampling = engine_of("llama"), Sampling(max_tokens=60)
    alone = [asyncio.run(engine.generate([5, 9], 1, sampling)), asyncio.run(engine.generate([17, 3], 2, sampling))]
    steps = calls(0.004)
    begun: list[int] = []

    async def late() -> list[Completion]:
        while sum(steps) < 10:
            await asyncio.sleep(0)
        begun.append(len(steps))
        return await engine.generate([17, 3], 2, sampling)

    async def run() -> list[list[Completion]]:
        return list(await asyncio.gather(engine.generate([5, 9], 1, sampling), late()))

    assert asyncio.run(run()) == alone
    assert steps[: begun[0] + 1] == [4] * (begun[0] + 1)
    assert engine.take_stats().peak_rows == 3


def test_a_run_that_was_killed_continues_amid_a_call(calls: Callable[[float], list[int]]) -> None:
    engine, sampling = engine_of("llama"), Sampling(max_tokens=40)
    calls(LONG)
    whole = asyncio.run(engine.generate(PROMPTS[1], 3, sampling))
    for told in (5, 11, 39):
        known = Begun({index: whole[index].token_ids[:told] for index in (0, 2)}, lambda index, token_ids: None)
        again = engine_of("llama").generate_telling(PROMPTS[1], 3, sampling, lambda index, completion: None, known)
        assert asyncio.run(again) == whole


def test_the_cache_has_room_for_a_call_and_no_more_than_was_reserved(calls: Callable[[float], list[int]]) -> None:
    policy = tiny_policy("llama")
    slot_bytes = NativeEngine(policy, ROOM, 8)._shape.slot_bytes
    calls(LONG)
    wanted = sampled(engine_of("llama"), Sampling(max_tokens=40))
    tight = NativeEngine(policy, slot_bytes * 150, 64, "compiled", "off")
    assert sampled(tight, Sampling(max_tokens=40)) == wanted
    assert tight.take_stats().peak_cache_bytes <= slot_bytes * 150


def test_weights_that_have_diverged_are_an_error_after_any_step(calls: Callable[[float], list[int]]) -> None:
    policy = tiny_policy("llama")
    with torch.no_grad():
        policy.causal_lm.get_input_embeddings().weight[3:].fill_(float("nan"))  # type: ignore[operator]
    calls(LONG)
    with pytest.raises(ValueError, match="log-probabilities of sampled tokens must be finite"):
        sampled(NativeEngine(policy, ROOM, 8, "compiled", "off"), Sampling(max_tokens=20))


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3_moe"])
def test_a_model_that_c_computes_in_parts_takes_single_steps(architecture: str) -> None:
    assert engine_of(architecture)._runner._steps is None
    assert DecodeSteps.of(replace(tiny_policy("llama"), head_is_linear=False)) is None
