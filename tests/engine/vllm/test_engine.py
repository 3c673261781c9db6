"""The engine over vLLM, against a fake of vLLM: pushes are whole or refused, versions are those of each token."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from covey.engine.base import (
    EngineLost,
    EngineStats,
    PushRefused,
    UpdatableEngine,
    UpdateMode,
    WeightSet,
    open_sessions,
)
from covey.engine.vllm import files
from covey.engine.vllm.engine import Served, VLLMEngine
from covey.engine.vllm.in_process import Launch
from covey.engine.vllm.wire import Sample, Wire
from covey.types import Completion, Sampling

from .fake_wire import FakeWire, pushed, set_of

SERVED = Served(max_length=64, stop_ids=frozenset({2, 0}), dtype=torch.float32, max_rows=16)
Make = Callable[..., VLLMEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[VLLMEngine] = []

    def build(wire: FakeWire, deadline: float = 5.0, served: Served = SERVED, **more: Any) -> VLLMEngine:
        async def open_wire() -> Wire:
            return wire

        made.append(VLLMEngine(open_wire, replace(served, deadline=deadline), **more))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def sample(engine: VLLMEngine, n: int = 2, max_tokens: int = 8) -> list[Completion]:
    return asyncio.run(engine.generate((5, 6), n, Sampling(max_tokens=max_tokens, seed=3)))


def in_flight(engine: VLLMEngine, how: UpdateMode, version: int = 1, n: int = 4) -> list[Completion]:
    """Push new weights while n completions are half done."""

    async def run() -> list[Completion]:
        sampling = asyncio.create_task(engine.generate((5, 6), n, Sampling(max_tokens=200)))
        await asyncio.sleep(0.05)
        await engine.update(pushed(version, 1.0, 2.0), how)
        return await sampling

    return asyncio.run(run())


# ------------------------------------------------------------------------------------------------ sampling


def test_it_is_an_engine_whose_weights_can_be_pushed(make: Make) -> None:
    assert isinstance(make(FakeWire()), UpdatableEngine)


def test_completions_carry_tokens_log_probs_and_the_version_of_the_weights(make: Make) -> None:
    wanted = Completion((9,) * 8, (-0.75,) * 8, "stop", policy_version=0)
    assert sample(make(FakeWire())) == [wanted, wanted]


@pytest.mark.parametrize(("cached", "re_encoded"), [(None, 10), (0, 9), (8, 1), (9, 0), (16, 0)])
def test_turns_are_prompts_and_cached_tokens_are_not_re_encoded(
    make: Make, cached: int | None, re_encoded: int
) -> None:
    wire = FakeWire(cached_tokens=cached)

    async def run() -> int:
        (session,) = open_sessions(make(wire), (5, 6), 1, Sampling(max_tokens=8))
        await session.first()
        await session.extend((7,), Sampling(max_tokens=8))
        session.close()
        return session.re_encoded_tokens

    assert asyncio.run(run()) == re_encoded
    assert [prompt for prompt, _ in wire.sampled] == [(5, 6), (5, 6, *[9] * 8, 7)]


def test_vllm_is_started_with_its_prefix_cache() -> None:
    launch = Launch(Path("model"), "float32", None, max_rows=8, max_length=64)
    assert launch.arguments()["enable_prefix_caching"] is True


def test_the_distribution_and_the_policys_stop_tokens_are_handed_over(make: Make) -> None:
    wire = FakeWire()
    sampling = Sampling(temperature=0.7, top_k=20, top_p=0.9, max_tokens=4, stop=("\n",), seed=3)
    asyncio.run(make(wire).generate((5, 6), 2, sampling))
    (prompt, params), (_, other) = wire.sampled
    assert prompt == (5, 6)
    assert {name: params[name] for name in ("temperature", "top_k", "top_p", "min_p", "max_tokens", "logprobs")} == {
        "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.0, "max_tokens": 4, "logprobs": 0
    }  # fmt: skip
    assert params["stop"] == ["\n"]
    assert params["detokenize"]
    assert params["stop_token_ids"] == [0, 2]
    assert params["ignore_eos"]
    assert 0 <= params["seed"] != other["seed"] >= 0


def test_what_does_not_fit_is_refused_with_the_numbers(make: Make) -> None:
    engine = make(FakeWire())
    with pytest.raises(ValueError, match="2 tokens with max_tokens=63 needs 65 positions, the policy has 64"):
        sample(engine, max_tokens=63)
    with pytest.raises(ValueError, match="n must be >= 1, got 0"):
        sample(engine, n=0)
    with pytest.raises(ValueError, match="at least one token"):
        asyncio.run(engine.generate((), 1, Sampling()))


def test_statistics_count_a_prompt_once_for_its_group(make: Make) -> None:
    engine = make(FakeWire())
    sample(engine, n=3)
    stats = engine.take_stats()
    assert (stats.prompt_tokens, stats.sampled_tokens, stats.peak_rows) == (2, 24, 3)
    assert 0.005 < stats.seconds < 5
    assert engine.take_stats() == EngineStats()


def test_seconds_and_rows_of_running_completions_are_reported(make: Make) -> None:
    engine = make(FakeWire(length=60), served=replace(SERVED, max_length=512))

    async def run() -> list[EngineStats]:
        sampling = asyncio.create_task(engine.generate((5, 6), 3, Sampling(max_tokens=60)))
        await asyncio.sleep(0.02)
        early = engine.take_stats()
        await sampling
        return [early, engine.take_stats()]

    early, late = asyncio.run(run())
    assert (early.sampled_tokens, early.peak_rows, late.sampled_tokens, late.peak_rows) == (0, 3, 180, 3)
    assert early.seconds > 0


def test_rows_beyond_the_limit_wait_inside_vllm_and_are_not_counted(make: Make) -> None:
    engine = make(FakeWire())
    sample(engine, n=40)
    assert engine.take_stats().peak_rows == 16


def test_a_partial_group_has_its_own_seeds_and_room_after_the_prompt(make: Make) -> None:
    wire = FakeWire(length=9)
    engine = make(wire)
    for number, first in ((4, 0), (2, 2)):
        sampling = Sampling(max_tokens=8, max_total_tokens=7, seed=3, first_sample=first)
        asyncio.run(engine.generate((5, 6), number, sampling))
    seeds = [params["seed"] for _, params in wire.sampled]
    assert seeds[4:] == seeds[2:4]
    assert {params["max_tokens"] for _, params in wire.sampled} == {5}


def test_it_is_called_from_any_event_loop(make: Make) -> None:
    engine = make(FakeWire())
    assert [len(sample(engine)), len(sample(engine))] == [2, 2]


# ------------------------------------------------------------------------------------------------ pushes


def test_after_a_push_completions_are_of_the_new_weights_and_version(make: Make) -> None:
    engine = make(FakeWire())
    asyncio.run(engine.update(pushed(7, 1.0, 2.0), "keep"))
    assert engine.version == 7
    assert sample(engine, n=1) == [Completion((9,) * 8, (-3.0,) * 8, "stop", policy_version=7)]


def test_running_completions_continue_and_each_token_has_its_version(make: Make) -> None:
    engine = make(FakeWire(length=200), served=replace(SERVED, max_length=512))
    for completion in in_flight(engine, "keep"):
        old, new = completion.spans
        assert (old.version, old.start, new.version, new.end) == (0, 0, 1, 200)
        assert old.end == new.start > 0
        assert completion.logprobs == (-0.75,) * old.end + (-3.0,) * (200 - new.start)
        assert completion.policy_version == 0


@pytest.mark.parametrize(("how", "logprob", "version"), [("wait", -0.75, 0), ("abort", -3.0, 1)])
def test_running_completions_end_before_a_push_or_restart_after_it(
    make: Make, how: UpdateMode, logprob: float, version: int
) -> None:
    engine = make(FakeWire(length=200), served=replace(SERVED, max_length=512))
    assert in_flight(engine, how) == [Completion((9,) * 200, (logprob,) * 200, "stop", version)] * 4
    assert engine.version == 1


def test_a_push_pauses_loads_labels_resumes_and_is_proved(make: Make) -> None:
    wire = FakeWire()
    asyncio.run(make(wire).update(pushed(7, 1.0, 2.0), "keep"))
    assert wire.calls == ["label 0", "covey_refusal", "pause keep", "covey_load", "label 7", "resume", "score"]


@pytest.mark.parametrize(
    ("tensors", "line"),
    [
        ({"body": torch.ones(1)}, "1 tensors of the engine's are missing and 0 are not the engine's (head)"),
        ({"body": torch.ones(1), "head": torch.ones(2)}, "head has the shape (2,), the engine's has (1,)"),
        (
            {"body": torch.ones(1), "head": torch.ones(1), "more": torch.ones(1)},
            "0 tensors of the engine's are missing and 1 are not the engine's (more)",
        ),
    ],
)
def test_a_set_that_cannot_replace_all_weights_is_refused_before_anything_changes(
    make: Make, tensors: dict[str, torch.Tensor], line: str
) -> None:
    wire = FakeWire()
    engine = make(wire)
    with pytest.raises(PushRefused) as refusal:
        asyncio.run(engine.update(set_of(7, tensors, -2.0), "keep"))
    assert str(refusal.value) == f"version 7: {line}"
    assert wire.calls == ["label 0", "covey_refusal"]
    assert sample(engine, n=1)[0].logprobs == (-0.75,) * 8


def test_completions_that_end_while_a_push_is_refused_are_given_out(make: Make) -> None:
    class Slow(FakeWire):
        async def call(self, method: str, *arguments: Any) -> list[Any]:
            await asyncio.sleep(0.1)
            return await super().call(method, *arguments)

    engine = make(Slow())

    async def run() -> list[Completion]:
        sampling = asyncio.create_task(engine.generate((5, 6), 1, Sampling(max_tokens=8)))
        with pytest.raises(PushRefused):
            await engine.update(set_of(7, {"body": torch.ones(1)}, -2.0), "keep")
        return await asyncio.wait_for(sampling, 5)

    assert asyncio.run(run()) == [Completion((9,) * 8, (-0.75,) * 8, "stop", policy_version=0)]


def test_bytes_that_changed_on_their_way_are_refused_unread(make: Make) -> None:
    wire = FakeWire()
    engine = make(wire)
    with pytest.raises(PushRefused, match="version 7: it changed on its way: its bytes have another digest"):
        asyncio.run(engine.update(replace(pushed(7, 1.0, 2.0), digest="0" * 32), "keep"))
    assert wire.calls == ["label 0"]
    assert engine.version == 0


def test_a_second_push_during_the_first_is_refused(make: Make) -> None:
    engine = make(FakeWire(length=200), served=replace(SERVED, max_length=512))

    async def run() -> list[object]:
        sampling = asyncio.create_task(engine.generate((5, 6), 1, Sampling(max_tokens=200)))
        await asyncio.sleep(0.02)
        pushes = [engine.update(pushed(version, 1.0, 2.0), "wait") for version in (1, 2)]
        found = await asyncio.gather(*pushes, return_exceptions=True)
        await sampling
        return list(found)

    first, second = asyncio.run(run())
    assert first is None
    assert repr(second) == "PushRefused('version 2 came while another was being loaded')"
    assert engine.version == 1


def test_nothing_is_left_of_a_push_on_disk(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MEMORY", tmp_path)
    engine = make(FakeWire())
    asyncio.run(engine.update(pushed(1, 1.0, 2.0), "keep"))
    with pytest.raises(PushRefused):
        asyncio.run(engine.update(set_of(2, {"body": torch.ones(1)}, -1.0), "keep"))
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ faults


def test_a_load_that_keeps_the_old_head_is_found_by_the_probe(make: Make) -> None:
    engine = make(FakeWire(keeps_old_head=True))
    with pytest.raises(EngineLost) as lost:
        asyncio.run(engine.update(pushed(7, 1.0, 2.0), "keep"))
    assert str(lost.value) == (
        "after the push of version 7 vLLM differs from the trainer's probe by up to 1.8 nats, 1.8 on average; rounding "
        "explains 0.0001 and 1e-05"
    )
    assert engine.version == 0
    with pytest.raises(EngineLost, match="after the push of version 7"):
        sample(engine)


def test_weights_that_are_not_numbers_are_refused_before_anything_changes(make: Make) -> None:
    wire = FakeWire()
    engine = make(wire)
    with pytest.raises(PushRefused, match="version 7: body holds values that are not finite"):
        asyncio.run(engine.update(pushed(7, float("nan"), 2.0), "keep"))
    assert wire.calls == ["label 0"]
    assert sample(engine, n=1)[0].logprobs == (-0.75,) * 8


def test_a_probe_that_is_not_a_number_proves_nothing(make: Make) -> None:
    tensors = {"body": torch.tensor([1.0]), "head": torch.tensor([2.0])}
    with pytest.raises(EngineLost, match="nan nats"):
        asyncio.run(make(FakeWire()).update(set_of(7, tensors, float("nan")), "keep"))


def test_weights_older_than_those_sampled_on_are_refused(make: Make) -> None:
    engine = make(FakeWire())
    asyncio.run(engine.update(pushed(7, 1.0, 2.0), "keep"))
    with pytest.raises(PushRefused, match="version 6: it is older than version 7, which is sampled on"):
        asyncio.run(engine.update(pushed(6, 0.5, 0.25), "keep"))
    assert sample(engine, n=1)[0] == Completion((9,) * 8, (-3.0,) * 8, "stop", policy_version=7)


@pytest.mark.long
def test_no_completion_with_a_token_of_unproved_weights_is_given_out(make: Make) -> None:
    engine = make(FakeWire(length=60, keeps_old_head=True, hangs_in="score"), deadline=1.0)

    async def run() -> object:
        sampling = asyncio.create_task(engine.generate((5, 6), 1, Sampling(max_tokens=60)))
        await asyncio.sleep(0.02)
        with pytest.raises(EngineLost, match="vLLM did not score the probe within 1 s"):
            await engine.update(pushed(1, 1.0, 2.0), "keep")
        return (await asyncio.gather(sampling, return_exceptions=True))[0]

    assert repr(asyncio.run(run())) == "EngineLost('vLLM did not score the probe within 1 s')"


@pytest.mark.parametrize("call", ["pause keep", "covey_load", "label 7", "resume", "score"])
def test_an_error_once_loading_has_begun_loses_the_engine(make: Make, call: str) -> None:
    engine = make(FakeWire(fails_in=call))
    with pytest.raises(EngineLost, match=f"vLLM failed: RuntimeError: {call}"):
        asyncio.run(engine.update(pushed(7, 1.0, 2.0), "keep"))
    assert engine.version == 0
    with pytest.raises(EngineLost, match=f"vLLM failed: RuntimeError: {call}"):
        sample(engine)


@pytest.mark.parametrize(("call", "doing"), [("covey_load", "load weights"), ("covey_refusal", "check weights")])
def test_vllm_that_does_not_answer_a_push_in_time_is_lost(make: Make, call: str, doing: str) -> None:
    engine = make(FakeWire(hangs_in=call), deadline=0.2)
    with pytest.raises(EngineLost, match=f"vLLM did not {doing} within 0.2 s"):
        asyncio.run(engine.update(pushed(7, 1.0, 2.0), "keep"))


def test_a_push_that_is_cut_off_loses_the_engine(make: Make) -> None:
    engine = make(FakeWire(hangs_in="covey_load"))

    async def run() -> None:
        push = asyncio.create_task(engine.update(pushed(7, 1.0, 2.0), "keep"))
        await asyncio.sleep(0.2)
        push.cancel()
        await asyncio.gather(push, return_exceptions=True)
        await asyncio.sleep(0.1)

    asyncio.run(run())
    with pytest.raises(EngineLost, match="the push of version 7 was cut off"):
        sample(engine)


def test_vllm_that_dies_while_it_samples_is_lost_at_once(make: Make) -> None:
    engine = make(FakeWire(fails_in="sample of the second token"))
    for _ in range(2):
        with pytest.raises(EngineLost, match="vLLM failed: EngineDeadError: gone"):
            sample(engine)


class Slow(FakeWire):
    """Takes a little longer than a deadline of 0.2 s."""

    async def _tokens(self, length: int) -> Sample:
        await asyncio.sleep(0.22)
        return await super()._tokens(length)


def test_vllm_that_samples_longer_than_the_deadline_is_asked_whether_it_lives(make: Make) -> None:
    wire = Slow(length=1)
    assert len(sample(make(wire, deadline=0.2), n=1)[0].token_ids) == 1
    assert "ping" in wire.calls


def test_vllm_that_neither_samples_nor_answers_is_lost(make: Make) -> None:
    engine = make(FakeWire(length=10**6, hangs_in="ping"), deadline=0.1, served=replace(SERVED, max_length=10**7))
    with pytest.raises(EngineLost, match=r"vLLM did not answer a ping within 0.1 s"):
        sample(engine, max_tokens=10**6)


def test_vllm_that_does_not_start_is_an_engine_lost(make: Make) -> None:
    with pytest.raises(EngineLost, match="vLLM failed: RuntimeError: label 0"):
        make(FakeWire(fails_in="label 0"))


def test_a_closed_engine_says_so_and_ends_vllm(make: Make) -> None:
    wire = FakeWire()
    engine = make(wire)
    engine.close()
    assert wire.closed
    with pytest.raises(EngineLost, match="the engine was closed"):
        sample(engine)


# ------------------------------------------------------------------------------------------------ one device for both


def resting(make: Make, wire: FakeWire, level: int) -> VLLMEngine:
    """An engine whose trainer has the weights 1 and 2."""
    collect = lambda version, text: replace(pushed(version, 1.0, 2.0), digest="")  # noqa: E731
    return make(wire, served=replace(SERVED, sleep_level=level), collect=collect)


@pytest.mark.parametrize("level", [1, 2])
def test_vllm_sleeps_while_the_trainer_works_and_wakes_around_the_push(make: Make, level: int) -> None:
    wire = FakeWire()
    engine = resting(make, wire, level)
    sample(engine, n=1)
    engine.rest()
    engine.rest()  # it is asleep
    engine.load_weights(1)
    assert wire.calls == [
        *("label 0", "sample", f"sleep {level}"),
        *("covey_refusal", "wake weights", "covey_load", "label 1", "wake kv_cache", "score"),
    ]
    assert sample(engine, n=1)[0].logprobs == (-3.0,) * 8
    wire.calls.clear()
    engine.load_weights(2)
    assert "pause keep" in wire.calls
    assert "wake weights" not in wire.calls


def test_a_request_wakes_a_sleeping_vllm_once_on_its_version(make: Make) -> None:
    wire = FakeWire()
    engine = resting(make, wire, 2)
    engine.load_weights(4)
    engine.rest()

    async def ask() -> list[list[Completion]]:
        calls = [engine.generate((5, place), 1, Sampling(max_tokens=8)) for place in range(5)]
        return list(await asyncio.gather(*calls))

    assert {(c.policy_version, c.logprobs) for (c,) in asyncio.run(ask())} == {(4, (-3.0,) * 8)}
    assert wire.calls.count("wake kv_cache") == 1


def test_a_vllm_on_a_device_of_its_own_never_sleeps(make: Make) -> None:
    wire = FakeWire()
    resting(make, wire, 0).rest()
    assert wire.calls == ["label 0"]


def test_the_probe_of_a_push_reads_the_prompt_asked_for_last(make: Make) -> None:
    texts: list[tuple[int, ...]] = []

    def collect(version: int, text: Sequence[int]) -> WeightSet:
        texts.append(tuple(text))
        return pushed(version, 1.0, 2.0)

    engine = make(FakeWire(), collect=collect)
    sample(engine)
    engine.load_weights(1)
    assert texts == [(5, 6)]
