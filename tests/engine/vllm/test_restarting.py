"""vLLM beside the trainer that dies or hangs: it is started again, and what was under way is asked for again."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from covey.engine.base import EngineLost, EngineStats
from covey.engine.vllm.engine import Served, VLLMEngine
from covey.engine.vllm.loop_thread import LoopThread
from covey.engine.vllm.restarting import RestartingEngine
from covey.engine.vllm.wire import Wire
from covey.types import Completion, RunStopped, Sampling

from .fake_wire import FakeWire, pushed

SERVED = Served(max_length=64, stop_ids=frozenset(), dtype=torch.float32, max_rows=16, deadline=0.3)
Start = Callable[..., RestartingEngine]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start an engine over wires that are lost one after the other."""
    made: list[RestartingEngine] = []

    def build(*wires: FakeWire) -> RestartingEngine:
        left = iter(wires)

        def make(version: int) -> VLLMEngine:
            wire = next(left)

            async def open_wire() -> Wire:
                return wire

            served = replace(SERVED, sleep_level=2)
            collect = lambda number, text: replace(pushed(number, 0.5, 0.25), digest="")  # noqa: E731
            return VLLMEngine(open_wire, served, version=version, collect=collect)

        made.append(RestartingEngine(make))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def ask(engine: RestartingEngine, num_prompts: int = 3) -> list[list[Completion]]:
    async def run() -> list[list[Completion]]:
        calls = [engine.generate((5, place), 2, Sampling(max_tokens=8, seed=3)) for place in range(num_prompts)]
        return list(await asyncio.gather(*calls))

    return asyncio.run(run())


def test_who_waits_for_an_engine_that_is_closed_hears_of_it() -> None:
    wire = FakeWire(hangs_in="sample")

    async def open_wire() -> Wire:
        return wire

    engine = VLLMEngine(open_wire, replace(SERVED, deadline=60.0))

    async def run() -> list[Any]:
        calls = [asyncio.create_task(engine.generate((5, 6), 2, Sampling(max_tokens=8))) for _ in range(3)]
        while len(wire.sampled) < 6:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.close)
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)

    found = asyncio.run(run())
    assert [type(error) for error in found] == [EngineLost] * 3
    assert {str(error) for error in found} == {"the engine was closed"}


def test_work_for_a_closed_thread_is_refused_at_once() -> None:
    thread = LoopThread("closed")
    thread.close(5)
    with pytest.raises(RuntimeError, match="the thread is closed"):
        thread.submit(asyncio.sleep(0))
    thread.close(5)


DEAD: dict[str, Any] = {"fails_in": "sample of the second token"}
HUNG: dict[str, Any] = {"hangs_in": ("sample", "ping")}


@pytest.mark.parametrize("fault", [DEAD, HUNG], ids=["dies", "hangs"])
def test_lost_completions_are_resampled_on_the_next_vllm_with_their_seeds(start: Start, fault: dict[str, Any]) -> None:
    lost, next_one = FakeWire(**fault), FakeWire()
    engine = start(lost, next_one)
    assert ask(engine) == [[Completion((9,) * 8, (-0.75,) * 8, "stop", 0)] * 2] * 3
    key = lambda asked: (asked[0], asked[1]["seed"])  # noqa: E731
    assert sorted(map(key, lost.sampled)) == sorted(map(key, next_one.sampled))
    assert lost.closed
    stats = engine.take_stats()
    assert (stats.restarts, stats.sampled_tokens) == (1, 48)
    assert engine.take_stats().restarts == 0


def test_what_was_done_before_a_loss_is_counted_with_what_is_done_after_it() -> None:
    class Done:
        version = 0

        def __init__(self, *numbers: int) -> None:
            self.stats = EngineStats(*numbers)

        def take_stats(self) -> EngineStats:
            return self.stats

        def close(self) -> None:
            self.stats = EngineStats()

    lost, now = Done(2, 8, 3, 5), Done(1, 4, 1, 2)
    made: Any = iter([lost, now])
    engine = RestartingEngine(lambda version: next(made))
    engine._restart(engine._engine, 0, EngineLost("gone"))
    found = engine.take_stats()
    assert found == EngineStats(prompt_tokens=3, sampled_tokens=12, seconds=4, peak_rows=5, restarts=1)


def test_the_next_vllm_is_on_the_version_of_the_one_that_was_lost(start: Start) -> None:
    lost, next_one = FakeWire(), FakeWire()
    engine = start(lost, next_one)
    engine.load_weights(6)
    lost.fails_in = "sample"
    assert {c.policy_version for group in ask(engine) for c in group} == {6}
    assert next_one.calls[0] == "label 6"


@pytest.mark.parametrize("fault", [{"fails_in": "covey_load"}, {"hangs_in": "covey_load"}, {"keeps_old_head": True}])
def test_a_push_that_loses_vllm_starts_it_on_the_weights_that_were_to_come(start: Start, fault: dict[str, Any]) -> None:
    engine = start(FakeWire(weights={"body": torch.ones(1), "head": torch.ones(1)}, **fault), FakeWire())
    engine.load_weights(1)
    assert {c.policy_version for group in ask(engine) for c in group} == {1}
    assert engine.take_stats().restarts == 1


def test_a_vllm_that_is_lost_five_times_in_a_row_ends_the_run(start: Start) -> None:
    engine = start(*(FakeWire(**DEAD) for _ in range(5)))
    with pytest.raises(RunStopped, match=r"^vLLM was lost 5 times in a row: vLLM failed: EngineDeadError: gone$"):
        ask(engine)


def test_a_vllm_that_does_not_start_again_counts_as_lost(start: Start) -> None:
    engine = start(FakeWire(**DEAD), FakeWire(fails_in="label 0"), FakeWire())
    assert len(ask(engine)) == 3
    assert engine.take_stats().restarts == 2


def test_losses_between_which_weights_were_taken_are_not_in_a_row(start: Start) -> None:
    wires = [FakeWire() for _ in range(8)]
    engine = start(*wires)
    for version, wire in enumerate(wires[:-1], start=1):
        wire.fails_in = "sample"
        ask(engine, num_prompts=1)
        engine.load_weights(version)
    assert engine.take_stats().restarts == 7


def test_the_first_start_is_not_tried_twice(start: Start) -> None:
    with pytest.raises(EngineLost, match="label 0"):
        start(FakeWire(fails_in="label 0"), FakeWire())


def test_a_vllm_lost_before_sleeping_is_restarted_when_needed(start: Start) -> None:
    engine = start(FakeWire(fails_in="sleep 2"), FakeWire())
    engine.rest()
    assert len(ask(engine)) == 3
