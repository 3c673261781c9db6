"""How often host and device wait for each other, and how many kernels a pass launches, on the pretend device."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from covey.algorithm.settings import AlgorithmConfig
from covey.engine.native.engine import NativeEngine
from covey.trainer.layouts import LAYOUTS
from covey.types import Sampling

from ..support.builders import make_trainer
from ..support.pretend_gpu import PretendGpu
from .test_one_device import MODELS, batch_of, policy_of

LAYERS_OF_1_5B = 28


def decode_step(num_rows: int, **settings: Any) -> tuple[int, Counter[str]]:
    """Waits and kernels of one more decode step for `num_rows` rows of two prompts."""
    with PretendGpu() as gpu:
        engine = NativeEngine(policy_of(**settings), 1 << 24, max_rows=512)

        def run(max_tokens: int) -> tuple[int, Counter[str]]:
            async def sample() -> None:
                how = Sampling(max_tokens=max_tokens)
                await asyncio.gather(*(engine.generate([5] * n, num_rows // 2, how) for n in (2, 4)))

            gpu.reset()
            asyncio.run(sample())
            return sum(gpu.waits.values()), Counter(gpu.kernels)

        run(12)  # makes what is made once
        fewer, more = run(12), run(13)
        return more[0] - fewer[0], more[1] - fewer[1]


@pytest.mark.parametrize("model", ["bfloat16", "adapters"])
def test_a_decode_step_waits_once_whatever_the_number_of_rows(model: str) -> None:
    few, many = decode_step(4, **MODELS[model]), decode_step(32, **MODELS[model])
    assert few[0] == many[0] == 1
    assert few[1] == many[1]


def test_a_decode_step_of_28_layers_launches_at_most_1800_kernels_in_float32() -> None:
    two, three = (sum(decode_step(4, nano_num_layers=number)[1].values()) for number in (2, 3))
    assert two + (LAYERS_OF_1_5B - 2) * (three - two) <= 1800


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


def test_a_step_in_half_precision_asks_for_no_attention_of_a_shape_to_plan_for() -> None:
    with PretendGpu() as gpu:
        policy = policy_of(**MODELS["bfloat16"])
        trainer = make_trainer(policy, AlgorithmConfig(loss="clip"))
        batch = batch_of(policy)
        gpu.reset()
        trainer.step(batch, 0)
        num_layers = policy.causal_lm.config.num_hidden_layers
        assert not gpu.shapes
        assert gpu.kernels["flash"] == num_layers * len(batch.micro_batches)
