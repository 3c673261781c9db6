"""The benchmark of turns samples what it says, in every way that it compares."""

import pytest

from benchmarks.environments import sessions
from covey.engine.base import EngineStats
from covey.engine.native.engine import NativeEngine


@pytest.mark.long
def test_every_way_samples_each_turn_to_its_full_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "GROUPS", 2)
    monkeypatch.setattr(sessions, "SIZE", 2)
    shape = sessions.Shape(turns=3, tokens=4)
    assert shape.length == 3 * 4 + 2 * sessions.REPLY
    sampled: list[int] = []
    take = NativeEngine.take_stats

    def noted(engine: NativeEngine) -> EngineStats:
        stats = take(engine)
        sampled.append(stats.sampled_tokens)
        return stats

    monkeypatch.setattr(NativeEngine, "take_stats", noted)
    found = sessions.measure(shape, repetitions=1, with_prompts=True)
    assert {name: len(rates) for name, rates in found.items()} == {"one turn": 1, "sessions": 1, "prompts": 1}
    assert sampled[1::2] == [4 * shape.length, 4 * 3 * 4, 4 * 3 * 4] * 2
