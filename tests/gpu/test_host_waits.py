"""How often host and device wait for each other, and how many kernels a pass launches, on the pretend device."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from covey.algorithm.settings import AlgorithmConfig
from covey.engine.native import graph
from covey.engine.native.engine import NativeEngine
from covey.engine.native.graph import LOOK_EVERY
from covey.policy.policy import Policy
from covey.trainer.layouts import LAYOUTS
from covey.types import Sampling

from ..support.builders import make_trainer
from ..support.pretend_gpu import PretendGpu
from .test_one_device import MODELS, batch_of, policy_of

LAYERS_OF_1_5B = 28


def decode_steps(num_rows: int, **settings: Any) -> tuple[int, Counter[str]]:
    """Waits and kernels of eight more decode steps for `num_rows` rows of two prompts, none of which stops early."""
    with PretendGpu() as gpu, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Policy, "stop_ids", frozenset())
        engine = NativeEngine(policy_of(**settings), 1 << 26, max_rows=512)

        def run(max_tokens: int) -> tuple[int, Counter[str]]:
            async def sample() -> None:
                how = Sampling(max_tokens=max_tokens)
                await asyncio.gather(*(engine.generate([5] * n, num_rows // 2, how) for n in (2, 4)))

            gpu.reset()
            asyncio.run(sample())
            assert not gpu.mixed
            return sum(gpu.waits.values()), Counter(gpu.kernels)

        run(9)  # makes what is made once
        fewer, more = run(9), run(9 + LOOK_EVERY)
        return more[0] - fewer[0], more[1] - fewer[1]


@pytest.mark.long
@pytest.mark.parametrize("model", ["bfloat16", "adapters"])
def test_eight_decode_steps_wait_once_for_any_number_of_rows(model: str) -> None:
    few, many = decode_steps(4, **MODELS[model]), decode_steps(32, **MODELS[model])
    assert few[0] == many[0] == 1
    assert few[1] == many[1]


@pytest.mark.long
@pytest.mark.parametrize(("model", "most"), [("float32", 1200), ("bfloat16", 1500), ("adapters", 1800)])
def test_a_decode_step_of_28_layers_launches_at_most_1800_kernels(model: str, most: int) -> None:
    numbers = (sum(decode_steps(4, **MODELS[model], nano_num_layers=n)[1].values()) / LOOK_EVERY for n in (2, 3))
    two, three = numbers
    assert two + (LAYERS_OF_1_5B - 2) * (three - two) <= most


@pytest.mark.long
def test_a_step_that_can_be_captured_asks_the_host_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []

    def capture(step: Callable[[], None], pool: object) -> tuple[Callable[[], None], object]:
        def replay() -> None:
            before = sum(gpu.waits.values())
            step()
            launched.append(sum(gpu.waits.values()) - before)

        return replay, None

    monkeypatch.setattr(graph, "can_capture", lambda device: True)
    monkeypatch.setattr(graph, "capture", capture)
    with PretendGpu() as gpu:
        engine = NativeEngine(policy_of(**MODELS["bfloat16"]), 1 << 26, max_rows=64)
        how = Sampling(max_tokens=12, top_k=20, top_p=0.9, temperature=0.8)
        asyncio.run(engine.generate([5, 6, 7], 4, how))
    assert len(launched) > 4
    assert set(launched) == {0}


@pytest.mark.long
@pytest.mark.parametrize("packing", LAYOUTS)
def test_a_micro_batch_waits_ten_times_at_most_and_is_made_without_a_wait(packing: str) -> None:
    with PretendGpu() as gpu:
        policy = policy_of(**MODELS["bfloat16"])
        trainer = make_trainer(policy, AlgorithmConfig(loss="clip"), logprob_chunk=8)
        gpu.reset()
        batch = batch_of(policy, packing)
        assert not gpu.waits
        found = []
        assert policy.attention == "varlen"
        for micro_batches in (batch.micro_batches[:1], batch.micro_batches[:2]):
            gpu.reset()
            trainer.step(replace(batch, micro_batches=micro_batches), 0)
            found.append(sum(gpu.waits.values()))
        assert 0 < found[1] - found[0] <= 10


@pytest.mark.long
def test_a_half_precision_step_plans_no_attention_shape() -> None:
    with PretendGpu() as gpu:
        policy = policy_of(**MODELS["bfloat16"])
        trainer = make_trainer(policy, AlgorithmConfig(loss="clip"))
        batch = batch_of(policy)
        gpu.reset()
        trainer.step(batch, 0)
        num_layers = policy.causal_lm.config.num_hidden_layers
        assert not gpu.shapes
        assert gpu.kernels["flash"] == num_layers * len(batch.micro_batches)
