"""The benchmark of slow tools makes the same calls in every way that it compares, and only lockstep waits."""

from pathlib import Path

import pytest

pytest.importorskip("trl", reason="compares with TRL's own loop: pip install trl")

from benchmarks.environments.slow_tools import DELAYS, MEAN_SECONDS, MOST_CALLS, Script, Tools, draw
from benchmarks.environments.tool_latency import Covey, Trl

LATE = 0.05


def calls_of_a_step(lockstep: bool, folder: Path, tokens: int = 0) -> list[tuple[int, int]]:
    """Return the calls that eight attempts made, in order. The first call of the first attempt is late."""
    tools = Tools()
    covey = Covey(tools, tools.asynchronous(), 1, tokens, str(folder))
    said = Script([[LATE, 0.0], *([[0.0] * 3] * 7)])
    assert covey.step(said, lockstep=lockstep) >= LATE
    return said.made


def test_in_lockstep_alone_all_wait_for_the_slowest_tool_of_a_turn(tmp_path: Path) -> None:
    in_lockstep = [turn for _, turn in calls_of_a_step(True, tmp_path)]
    assert in_lockstep == [1] * 8 + [2] * 8 + [3] * 7
    assert calls_of_a_step(False, tmp_path)[-1] == (0, 2)


def test_tokens_are_sampled_below_the_script(tmp_path: Path) -> None:
    assert sorted(calls_of_a_step(False, tmp_path, tokens=2)) == sorted(calls_of_a_step(True, tmp_path))


def test_a_call_that_was_not_made_or_made_twice_is_seen() -> None:
    said = Script([[0.0], [0.0, 0.0]])
    for attempt, turn in ((0, 1), (1, 1)):
        said.called(attempt, turn)
    with pytest.raises(AssertionError, match="2 calls were made, 3 are due"):
        said.check()
    said.called(1, 2)
    said.check()
    said.called(1, 2)
    with pytest.raises(AssertionError, match="4 calls were made, 3 are due"):
        said.check()


def test_delays_have_the_mean_that_is_named() -> None:
    for delays in DELAYS:
        drawn = draw(4000, delays, seed=1)
        seconds = [second for calls in drawn.seconds for second in calls]
        assert sum(seconds) / len(seconds) == pytest.approx(MEAN_SECONDS, rel=0.05)
        assert {len(calls) for calls in drawn.seconds} == set(range(1, MOST_CALLS + 1))


@pytest.mark.slow
def test_the_loop_of_trl_makes_the_same_calls(tmp_path: Path) -> None:
    for form in (Tools.sync, Tools.asynchronous):
        tools = Tools()
        trl = Trl(tools, form(tools), 1, 2, str(tmp_path))
        said = draw(8, "uniform", seed=0)
        assert trl.step(Script([[0.0] * len(calls) for calls in said.seconds])) > 0
