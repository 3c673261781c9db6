"""The scripted engine."""

import asyncio
import math

import pytest

from covey.engine.build import ENGINES
from covey.engine.fake import FakeEngine, random_script
from covey.engine.native.engine import NativeEngine
from covey.engine.settings import EngineConfig
from covey.types import Completion, Sampling

from .tiny import tiny_policy


def test_the_script_decides_tokens_and_the_version_is_the_one_loaded() -> None:
    engine = FakeEngine(lambda prompt_ids, index: (*prompt_ids, index), vocab_size=8)
    engine.load_weights(3)
    completions = asyncio.run(engine.generate([5, 6], 2, Sampling()))
    logprob = -math.log(8)
    assert completions == [
        Completion((5, 6, 0), (logprob,) * 3, "stop", 3),
        Completion((5, 6, 1), (logprob,) * 3, "stop", 3),
    ]
    assert engine.calls == [((5, 6), 2, Sampling())]


def test_a_script_longer_than_max_tokens_is_cut() -> None:
    engine = FakeEngine(lambda prompt_ids, index: range(10), vocab_size=16)
    completion = asyncio.run(engine.generate([1], 1, Sampling(max_tokens=4)))[0]
    assert (completion.token_ids, completion.finish_reason) == ((0, 1, 2, 3), "length")


def test_no_completions_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match="n must be >= 1, got 0"):
        asyncio.run(FakeEngine(lambda prompt_ids, index: (1,), 8).generate([1], 0, Sampling()))


def test_random_scripts_depend_on_seed_prompt_and_sample_index_only() -> None:
    script = random_script(vocab_size=50, length=20)
    assert script((1, 2), 0) == random_script(50, 20)((1, 2), 0)
    others = [script((1, 2), 1), script((2, 1), 0), random_script(50, 20, seed=1)((1, 2), 0)]
    assert all(other != script((1, 2), 0) for other in others)
    assert set(script((1, 2), 0)) <= set(range(50))


def test_the_table_builds_engines_by_name() -> None:
    policy = tiny_policy("qwen2")
    assert isinstance(ENGINES["native"](policy, EngineConfig(max_rows=8), "auto"), NativeEngine)
    fake = ENGINES["fake"](policy, EngineConfig(), "auto")
    assert len(asyncio.run(fake.generate([1], 3, Sampling()))) == 3
