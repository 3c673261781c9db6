"""What a GPU has room for, on the pretend device."""

import asyncio
import logging

import pytest
import torch

from covey.engine.native.cache import budget
from covey.engine.native.engine import NativeEngine
from covey.policy.kernels.gpu.liger import LIGER
from covey.policy.kernels.layers import COMPILED
from covey.run import stages
from covey.run.stages import computing
from covey.types import Sampling

from ..support.pretend_gpu import CUDA, FREE_BYTES, PretendGpu
from ..support.small import small_config
from .test_one_device import policy_of


def test_without_a_bound_the_cache_takes_four_fifths_of_what_is_free() -> None:
    with PretendGpu():
        assert budget(None, CUDA) == int(0.8 * FREE_BYTES)
    assert budget(None, torch.device("cpu")) == 2**30
    assert budget(5, CUDA) == 5


@pytest.mark.long
def test_the_cache_follows_what_is_free_whenever_sampling_begins(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step of the optimiser has taken memory in between: fewer rows are sampled at once, all of them in the end."""
    with PretendGpu() as gpu:
        policy = policy_of()
        engine = NativeEngine(policy, None, max_rows=64)

        def run() -> int:
            asyncio.run(engine.generate([5, 6, 7], 16, Sampling(max_tokens=8)))
            return engine.take_stats().peak_rows

        with caplog.at_level(logging.INFO):
            assert run() == 16
        slot = engine._shape.slot_bytes
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *args: (100 * slot, FREE_BYTES))
        fewer = run()
        assert 1 <= fewer < 16
        assert not gpu.mixed
    told = [record.getMessage() for record in caplog.records if "cache_bytes" in record.getMessage()]
    assert told == ["engine.cache_bytes is 12.8 GiB here, four fifths of what is free on cuda:0"]


def test_a_run_on_a_gpu_says_what_samples_and_attends_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with PretendGpu():
        half, whole = policy_of(precision="bfloat16"), policy_of()
        found = computing(half, small_config(model__precision="bfloat16"))
        assert found.startswith("sampling: native, a graph of each step (vLLM is")
        layers = "layers: torch (pip install liger-kernel shortens a step)"
        assert found.endswith(f"attention: varlen; {layers}; activations: kept, for they fit")
        why = "sdpa (varlen needs model.precision=bfloat16 or float16 on a GPU)"
        told = computing(whole, small_config(model__gradient_checkpointing=False))
        assert told.endswith(f"attention: {why}; layers: torch; activations: kept")
        monkeypatch.setattr(stages, "chooses_liger", lambda kernels, is_half: kernels == "auto" and is_half)
        assert "; layers: torch; " in computing(half, small_config(model__precision="bfloat16"))
        taken = next(module for module in half.causal_lm.modules() if type(module) in COMPILED)
        taken.__class__ = LIGER[COMPILED[type(taken)]]
        assert "; layers: liger; " in computing(half, small_config(model__precision="bfloat16"))
