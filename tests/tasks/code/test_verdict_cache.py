"""Verdicts are reached once: what they are kept by, how many are kept, and which are not believed at first."""

import asyncio
from collections.abc import Sequence

import pytest

from covey_sandbox.types import CallTest, Limits, Report, SandboxFailed, Test
from covey_tasks.code import environment
from covey_tasks.code.environment import CachedRunner

from .code_runners import Told, report

TESTS = (CallTest((3,), expected=5),)


def told(**settings: str) -> Told:
    return Told(lambda code, tests: report(code == "right"), **settings)


def ask(cache: CachedRunner, *codes: str) -> list[bool]:
    async def one_after_the_other() -> list[bool]:
        return [(await cache.run(code, TESTS, "f", Limits())).results[0].passed for code in codes]

    return asyncio.run(one_after_the_other())


def test_a_program_runs_once_however_often_it_is_written() -> None:
    runner = told()
    cache = CachedRunner(runner, 8)
    assert ask(cache, "right", "wrong", "right", "wrong", "right") == [True, False, True, False, True]
    assert [code for code, _ in runner.asked] == ["right", "wrong"]
    assert cache.take_counts() == (5, 2)
    assert cache.take_counts() == (0, 0)


@pytest.mark.parametrize(
    ("code", "tests", "entry_point", "limits"),
    [
        ("other", TESTS, "f", Limits()),
        ("right", (CallTest((3,), expected=6),), "f", Limits()),
        ("right", (CallTest((3,), expected=5.0),), "f", Limits()),
        ("right", (*TESTS, *TESTS), "f", Limits()),
        ("right", TESTS, "g", Limits()),
        ("right", TESTS, "f", Limits(wall_seconds=1.0)),
        ("right", TESTS, "f", None),
    ],
)
def test_another_code_test_name_or_limit_is_another_verdict(
    code: str, tests: Sequence[Test], entry_point: str, limits: Limits | None
) -> None:
    runner = told()
    cache = CachedRunner(runner, 8)
    ask(cache, "right")
    asyncio.run(cache.run(code, tests, entry_point, limits))
    assert len(runner.asked) == 2


def test_equal_programs_at_the_same_time_run_once() -> None:
    async def many() -> list[Report]:
        runner.gate = asyncio.Event()
        asked = [asyncio.create_task(cache.run("right", TESTS, "f")) for _ in range(5)]
        await asyncio.sleep(0)
        runner.gate.set()
        return await asyncio.gather(*asked)

    runner = told()
    cache = CachedRunner(runner, 0)
    assert len(asyncio.run(many())) == 5
    assert len(runner.asked) == 1


def test_one_who_stops_waiting_leaves_the_others_their_verdict() -> None:
    async def two() -> bool:
        runner.gate = asyncio.Event()
        first = asyncio.create_task(cache.run("right", TESTS, "f"))
        second = asyncio.create_task(cache.run("right", TESTS, "f"))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        runner.gate.set()
        return (await second).results[0].passed

    runner = told()
    cache = CachedRunner(runner, 8)
    assert asyncio.run(two())
    assert len(runner.asked) == 1


def test_the_verdict_that_was_not_asked_for_longest_is_dropped() -> None:
    runner = told()
    ask(CachedRunner(runner, 2), "a", "b", "a", "c", "a", "b")
    assert [code for code, _ in runner.asked] == ["a", "b", "c", "b"]


def test_verdicts_with_long_messages_are_dropped_by_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "MAX_BYTES", 10_000)
    runner = Told(lambda code, tests: report(False, kind=code))  # a message of 27 characters: 516 bytes in all
    cache = CachedRunner(runner, 1000)
    ask(cache, *map(str, range(40)))
    assert len(cache._verdicts._kept) == 19
    assert cache._verdicts.num_bytes <= 10_000
    ask(cache, "39", "0")
    assert len(runner.asked) == 41


def test_nothing_is_kept_by_a_cache_of_size_0() -> None:
    runner = told()
    ask(CachedRunner(runner, 0), "a", "a")
    assert len(runner.asked) == 2


def test_what_the_clock_decided_is_believed_the_second_time() -> None:
    """A busy machine may have been to blame the first time."""
    verdicts = [report(False, kind="timeout"), report(True), report(False)]
    runner = Told(lambda code, tests: verdicts[len(runner.asked) - 1])
    assert ask(CachedRunner(runner, 8), "slow", "slow", "slow") == [False, True, True]
    runner = Told(lambda code, tests: report(False, kind="timeout"))
    assert ask(CachedRunner(runner, 8), "endless", "endless", "endless") == [False, False, False]
    assert len(runner.asked) == 2


def test_a_failure_of_the_sandbox_is_not_kept() -> None:
    def verdict(code: str, tests: Sequence[Test]) -> Report:
        if len(runner.asked) == 1:
            raise SandboxFailed("no room")
        return report(True)

    runner = Told(verdict)
    cache = CachedRunner(runner, 8)
    with pytest.raises(SandboxFailed, match="no room"):
        ask(cache, "right")
    assert ask(cache, "right") == [True]


def test_text_that_is_no_unicode_is_a_key_too() -> None:
    assert ask(CachedRunner(told(), 8), "\ud800", "right") == [False, True]
