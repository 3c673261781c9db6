"""Tokens of a killed process are drawn again many in a pass, and change no bit; those so far are told meanwhile."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from covey.engine.base import Begun
from covey.engine.native import engine as native
from covey.engine.native.engine import NativeEngine
from covey.engine.native.own_weights import OwnWeightsEngine
from covey.engine.native.runner import Runner
from covey.types import Completion, Sampling

from .native.test_drafts import PRECISIONS, PROMPTS, ROOM
from .tiny import tiny_policy

Known = Mapping[int, Sequence[int]]


def sampled(engine: NativeEngine, known: Known, sampling: Sampling) -> tuple[list[Completion], dict[int, list[int]]]:
    told: dict[int, list[int]] = {}

    async def run() -> list[Completion]:
        begun = Begun(known, lambda index, tokens: told.update({index: list(tokens)}))
        return await engine.generate_telling(PROMPTS[1], 5, sampling, lambda index, completion: None, begun)

    return asyncio.run(run()), told


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the passes that decode."""
    found: list[int] = []
    plain = Runner.decode

    def decode(self: Runner, *given: Any) -> Any:
        drawn = plain(self, *given)
        found.append(len(drawn[1]))
        return drawn

    monkeypatch.setattr(Runner, "decode", decode)
    monkeypatch.setattr(native, "TURN_SECONDS", 0.0)  # one step each
    return found


@pytest.mark.parametrize("kind", [{}, {"temperature": 0.0}, {"top_p": 0.7}, {"stop": ("a",)}])
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("speculation", ["off", "on"])
@pytest.mark.parametrize("of", [NativeEngine, OwnWeightsEngine])
def test_known_tokens_change_no_bit_and_take_few_passes(
    of: type[NativeEngine], speculation: str, dtype: torch.dtype, kind: dict[str, Any], passes: list[int]
) -> None:
    engine, sampling = (
        of(tiny_policy("llama", dtype), ROOM, 8, "compiled", speculation),
        Sampling(max_tokens=60, **kind),
    )
    wanted, _ = sampled(engine, {}, sampling)
    many, passes[:] = len(passes), []
    known = {index: wanted[index].token_ids[: 50 - 9 * index] for index in (0, 1, 3)}
    assert sampled(engine, known, sampling)[0] == wanted
    if not kind and speculation == "off":
        assert many == 59
        assert passes[0] > 40  # of five rows
    false = {0: [9] * 30, 1: [*wanted[1].token_ids[:20], 9, 9, 9], 2: (), 4: wanted[4].token_ids}
    assert sampled(engine, false, sampling)[0] == wanted


def test_tokens_so_far_are_told_and_begin_the_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "TOLD_SECONDS", 0.0)
    monkeypatch.setattr(native, "TURN_SECONDS", 0.0)
    found, told = sampled(NativeEngine(tiny_policy("llama"), ROOM, 8, "compiled"), {}, Sampling(max_tokens=20))
    assert sorted(told) == [0, 1, 2, 3, 4]
    for index, tokens in told.items():
        assert 10 < len(tokens) < 20
        assert found[index].token_ids[: len(tokens)] == tuple(tokens)


def test_an_engine_whose_passes_have_other_bits_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "TOLD_SECONDS", 0.0)
    engine = NativeEngine(tiny_policy("llama"), ROOM, 8, "torch")
    wanted, told = sampled(engine, {}, Sampling(max_tokens=20))
    assert told == {}
    assert sampled(engine, {0: wanted[0].token_ids[:9]}, Sampling(max_tokens=20))[0] == wanted
