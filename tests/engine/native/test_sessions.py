"""Sessions of the native engine against prompts that hold the whole history, and under all that can happen to them."""

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from covey.engine.base import PromptSession, Session, open_sessions
from covey.engine.native import graph
from covey.engine.native.engine import NativeEngine
from covey.policy.policy import Policy
from covey.types import Completion, Sampling

from ..tiny import tiny_policy

PROMPTS = [[5, 9, 200], [17, 3, 44, 101, 7, 250, 31, 30, 29, 12, 64], [99]]
SAID = [[40, 41, 42], [7], [8, 8], [11, 12, 13, 14, 15]]
"""Replies of the environment, in turn."""
GENEROUS = 1 << 26
STOPS = range(0, 260, 23)
Turns = list[Completion]


def turn_sampling(attempt: int, turn: int, **changes: Any) -> Sampling:
    """Return a turn's sampling, whose seed names the attempt from the second turn on."""
    seed = 1000 * turn + attempt if turn else 3
    return Sampling(**{"max_tokens": 9, "temperature": 0.8, "seed": seed} | changes)


async def no_delay(attempt: int, turn: int) -> None:
    """Answer at once."""


async def converse(
    session: Session,
    attempt: int,
    turns: int,
    delay: Callable[[int, int], Awaitable[None]] = no_delay,
    **changes: Any,
) -> Turns:
    """Play one episode and close it."""
    found = [await session.first()]
    for turn in range(1, turns):
        await delay(attempt, turn)
        said = SAID[(attempt + turn) % len(SAID)]
        found.append(await session.extend(said, turn_sampling(attempt, turn, **changes)))
    session.close()
    return found


def played(
    open_all: Callable[[Sequence[int], int, Sampling], Sequence[Session]],
    turns: int = 4,
    n: int = 3,
    delay: Callable[[int, int], Awaitable[None]] = no_delay,
    **changes: Any,
) -> list[Turns]:
    """Play n episodes of every prompt at the same time."""

    async def run() -> list[Turns]:
        episodes = []
        for number, prompt_ids in enumerate(PROMPTS):
            sessions = open_all(prompt_ids, n, turn_sampling(0, 0, **changes))
            episodes += [converse(each, n * number + i, turns, delay, **changes) for i, each in enumerate(sessions)]
        return list(await asyncio.gather(*episodes))

    return asyncio.run(run())


def as_prompts(engine: NativeEngine) -> Callable[[Sequence[int], int, Sampling], Sequence[Session]]:
    """Return sessions of the engine that encode the whole history every turn."""

    def open_all(prompt_ids: Sequence[int], n: int, sampling: Sampling) -> Sequence[Session]:
        first = asyncio.ensure_future(engine.generate(prompt_ids, n, sampling))
        return [PromptSession(engine, prompt_ids, first, index) for index in range(n)]

    return open_all


def assert_same(found: list[Turns], wanted: list[Turns], tolerance: float = 1e-9) -> None:
    """The same tokens, and log-probs up to rounding."""
    for mine, theirs in zip(found, wanted, strict=True):
        assert [c.token_ids for c in mine] == [c.token_ids for c in theirs]
        for one, other in zip(mine, theirs, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=tolerance)
            assert (one.finish_reason, one.policy_version) == (other.finish_reason, other.policy_version)


def assert_empty(engine: NativeEngine) -> None:
    """Nothing is held any more."""
    assert engine.cache_bytes_used == 0
    assert not engine._runner.cache.kept
    assert not engine._scheduler.kept
    assert not engine._scheduler.groups
    assert not engine._turns.requests
    assert not engine._turns.under_way
    assert engine._scheduler.kept_slots == 0


def bytes_of(policy: Policy, slots: int) -> int:
    """Return a budget with room for so many cached tokens."""
    slot = NativeEngine(policy, GENEROUS, 1)._shape
    return next(b for b in range(slot.slot_bytes * slots, GENEROUS, slot.slot_bytes) if slot.max_slots(b) >= slots)


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "qwen2-window", "mistral-window", "gpt2"])
def test_turns_are_those_of_prompts_that_hold_the_whole_history(
    architecture: str, is_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy(architecture, torch.float64, STOPS)
    wanted = played(as_prompts(NativeEngine(policy, GENEROUS, 64)))
    monkeypatch.setattr(graph, "is_wanted", lambda policy: is_graph)
    engine = NativeEngine(policy, GENEROUS, 64)
    assert_same(played(engine.open), wanted)
    assert_empty(engine)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral-window"])
def test_compiled_kernels_continue_a_session(architecture: str) -> None:
    policy = tiny_policy(architecture, stop_ids=STOPS)
    engine = NativeEngine(policy, GENEROUS, 64)
    assert engine.kernels == "compiled"
    assert_same(played(engine.open), played(as_prompts(NativeEngine(policy, GENEROUS, 64))), tolerance=1e-4)
    assert_empty(engine)


def test_an_engine_without_sessions_is_spoken_to_in_the_same_way() -> None:
    engine = NativeEngine(tiny_policy("llama", torch.float64), GENEROUS, 64)

    class Plain:
        generate, load_weights, take_stats = engine.generate, engine.load_weights, engine.take_stats

    def open_plain(prompt_ids: Sequence[int], n: int, sampling: Sampling) -> Sequence[Session]:
        return open_sessions(Plain(), prompt_ids, n, sampling)

    def open_own(prompt_ids: Sequence[int], n: int, sampling: Sampling) -> Sequence[Session]:
        return open_sessions(engine, prompt_ids, n, sampling)

    assert_same(played(open_own), played(open_plain))


def test_no_token_is_encoded_twice() -> None:
    engine = NativeEngine(tiny_policy("llama"), GENEROUS, 64)
    turns = 8
    found = played(engine.open, turns, max_tokens=10)
    said = sum(len(SAID[(attempt + turn) % len(SAID)]) for attempt in range(len(found)) for turn in range(1, turns))
    last_tokens = len(found) * (turns - 1)
    stats = engine.take_stats()
    assert stats.prompt_tokens == sum(map(len, PROMPTS)) + said + last_tokens
    assert stats.sampled_tokens == sum(len(c.token_ids) for each in found for c in each)
    assert stats.re_encoded_tokens == 0


@pytest.mark.long
@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("slots", [75, 130, 250])
def test_a_small_cache_gives_the_same_turns_and_says_what_it_encoded_again(
    slots: int, is_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy("qwen2-window", torch.float64)
    wanted = played(NativeEngine(policy, GENEROUS, 64).open)
    monkeypatch.setattr(graph, "is_wanted", lambda policy: is_graph)
    budget = bytes_of(policy, slots)
    engine = NativeEngine(policy, budget, 64)
    sessions: list[Session] = []

    def noted(prompt_ids: Sequence[int], n: int, sampling: Sampling) -> Sequence[Session]:
        sessions.extend(opened := engine.open(prompt_ids, n, sampling))
        return opened

    assert_same(played(noted), wanted)
    stats = engine.take_stats()
    assert 0 < stats.peak_cache_bytes <= budget
    assert stats.re_encoded_tokens == sum(each.re_encoded_tokens for each in sessions) > 0
    given = sum(map(len, PROMPTS)) + sum(len(SAID[(a + t) % len(SAID)]) + 1 for a in range(9) for t in range(1, 4))
    assert stats.prompt_tokens - stats.re_encoded_tokens == given
    assert_empty(engine)


def test_a_session_without_room_for_another_turn_is_refused_unchanged() -> None:
    policy = tiny_policy("llama")
    engine = NativeEngine(policy, bytes_of(policy, 40), 8)

    async def run() -> Completion:
        (session,) = engine.open([1, 2, 3], 1, Sampling(max_tokens=10))
        await session.first()
        with pytest.raises(ValueError, match="a prompt of 33 tokens with max_tokens=10 needs 43 cached tokens"):
            await session.extend([1] * 20, Sampling(max_tokens=10))
        with pytest.raises(ValueError, match="a prompt of 113 tokens with max_tokens=16 needs 129 positions"):
            await session.extend([1] * 100, Sampling(max_tokens=16))
        found = await session.extend([1] * 10, Sampling(max_tokens=10))
        session.close()
        return found

    assert len(asyncio.run(run()).token_ids) == 10
    assert_empty(engine)


def test_each_first_turn_is_answered_when_its_own_row_is_done() -> None:
    engine = NativeEngine(tiny_policy("llama", stop_ids=range(0, 260, 20)), GENEROUS, 64)
    order: list[int] = []

    async def first(session: Session) -> None:
        order.append(len((await session.first()).token_ids))
        session.close()

    async def run() -> None:
        await asyncio.gather(*(first(each) for each in engine.open(PROMPTS[0], 8, Sampling(max_tokens=100))))

    asyncio.run(run())
    assert order == sorted(order)
    assert order[0] < order[-1]


@pytest.mark.long
def test_rollouts_do_not_depend_on_the_order_in_which_the_environment_answers() -> None:
    policy = tiny_policy("llama", torch.float64, STOPS)
    wanted = played(NativeEngine(policy, GENEROUS, 64).open)
    for seed in range(4):
        chance = random.Random(seed)

        async def shuffled(attempt: int, turn: int, chance: random.Random = chance) -> None:
            for _ in range(chance.randint(0, 40)):
                await asyncio.sleep(0)

        engine = NativeEngine(policy, GENEROUS if seed % 2 else bytes_of(policy, 150), 3 + seed)
        assert_same(played(engine.open, delay=shuffled), wanted)
        assert_empty(engine)


@pytest.mark.long
def test_prompts_and_sessions_are_sampled_together() -> None:
    engine = NativeEngine(tiny_policy("llama", torch.float64), GENEROUS, 64)
    calls: list[Completion] = []

    async def busy(attempt: int, turn: int) -> None:
        calls.extend(await engine.generate([attempt + 1, turn], 1, Sampling(max_tokens=3)))

    assert_same(played(engine.open, delay=busy), played(NativeEngine(engine._trained, GENEROUS, 64).open))
    assert len(calls) == 27
    assert_empty(engine)


def test_what_is_kept_outlives_the_work_and_goes_with_the_last_session() -> None:
    engine = NativeEngine(tiny_policy("llama"), GENEROUS, 8)
    held: list[int] = []

    async def run() -> None:
        sessions = engine.open(PROMPTS[1], 3, Sampling(max_tokens=8))
        await asyncio.gather(*(each.first() for each in sessions))
        while engine._is_driving:
            await asyncio.sleep(0)
        for session in sessions:
            held.append(engine.cache_bytes_used)
            session.close()
            session.close()
        held.append(engine.cache_bytes_used)

    asyncio.run(run())
    assert held[0] > 0
    assert held[3] == 0
    assert_empty(engine)


@pytest.mark.long
def test_sessions_end_when_they_are_closed_cancelled_or_forgotten() -> None:
    engine = NativeEngine(tiny_policy("gpt2", torch.float64), GENEROUS, 4)

    async def run() -> None:
        sessions = engine.open(PROMPTS[0], 9, Sampling(max_tokens=60))
        waits = [asyncio.ensure_future(each.first()) for each in sessions]
        while engine.cache_bytes_used == 0:
            await asyncio.sleep(0)
        sessions[0].close()  # under way
        sessions[8].close()  # has not begun
        waits[1].cancel()
        await asyncio.gather(*waits[2:6])
        later = asyncio.ensure_future(sessions[2].extend([1, 2], Sampling(max_tokens=60)))
        await asyncio.sleep(0)
        later.cancel()
        sessions[3].close()  # rests
        await asyncio.gather(*waits, later, return_exceptions=True)
        with pytest.raises(RuntimeError, match="a session that is closed cannot be extended"):
            await sessions[3].extend([1], Sampling(max_tokens=4))
        del sessions, waits  # forgotten, at rest
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(run())
    assert_empty(engine)
    assert engine.take_stats().sampled_tokens < 9 * 60


def test_an_error_reaches_running_sessions_and_idle_ones_continue() -> None:
    policy = tiny_policy("llama", torch.float64)
    engine = NativeEngine(policy, GENEROUS, 8)

    def fail(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    async def run() -> tuple[Completion, Completion]:
        rests, fails = engine.open(PROMPTS[0], 2, Sampling(max_tokens=6))
        await asyncio.gather(rests.first(), fails.first())
        handle = policy.causal_lm.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="the device is gone"):
            await fails.extend([1], Sampling(max_tokens=5))
        handle.remove()
        with pytest.raises(RuntimeError, match="has not answered its last turn"):
            await fails.extend([1], Sampling(max_tokens=5))
        found = await rests.extend([4, 4], Sampling(max_tokens=5, seed=8))
        assert rests.re_encoded_tokens == len(PROMPTS[0]) + 5
        first = await rests.first()
        rests.close()
        fails.close()
        return first, found

    first, found = asyncio.run(run())
    (wanted,) = asyncio.run(engine.generate([*PROMPTS[0], *first.token_ids, 4, 4], 1, Sampling(max_tokens=5, seed=8)))
    assert found.token_ids == wanted.token_ids
    assert_empty(engine)


@pytest.mark.long
def test_a_lora_session_continues_with_its_adapters() -> None:
    base = tiny_policy("qwen2", torch.float64)
    adapted = get_peft_model(base.causal_lm, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    policy = Policy(adapted.double(), base.tokenizer, torch.float64, head_is_linear=True)
    assert_same(played(NativeEngine(policy, GENEROUS, 64).open), played(as_prompts(NativeEngine(policy, GENEROUS, 64))))


@pytest.mark.long
def test_stop_strings_are_matched_within_each_turn() -> None:
    policy = tiny_policy("llama", torch.float64)
    changes = {"stop": ("e", "7"), "max_tokens": 20}
    found = played(NativeEngine(policy, GENEROUS, 64).open, **changes)
    assert_same(found, played(as_prompts(NativeEngine(policy, GENEROUS, 64)), **changes))
    assert {c.finish_reason for each in found for c in each[1:]} == {"stop", "length"}


@pytest.mark.long
@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_no_session_is_stuck_or_left_behind(seed: int, is_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "is_wanted", lambda policy: is_graph)
    policy = tiny_policy("llama", stop_ids=STOPS)
    chance = random.Random(seed)
    budget = bytes_of(policy, 200)
    engine = NativeEngine(policy, budget, chance.randint(1, 6))

    async def episode(session: Session) -> None:
        await session.first()
        for _ in range(chance.randint(0, 5)):
            for _ in range(chance.choice((0, 0, 3, 30))):
                await asyncio.sleep(0)
            what = chance.random()
            turn = asyncio.ensure_future(
                session.extend([5] * chance.randint(0, 6), Sampling(max_tokens=chance.randint(1, 9)))
            )
            if what < 0.1:
                await asyncio.sleep(0)
                turn.cancel()
                return
            if what < 0.2:
                session.close()
                await asyncio.gather(turn, return_exceptions=True)
                return
            await turn

    async def group(number: int) -> None:
        for _ in range(chance.randint(0, 60)):
            await asyncio.sleep(0)
        prompt_ids, most = [7] * chance.randint(1, 20), Sampling(max_tokens=chance.randint(1, 12), seed=number)
        if chance.random() < 0.3:
            await engine.generate(prompt_ids, chance.randint(1, 5), most)
            return
        sessions = engine.open(prompt_ids, chance.randint(1, 5), most)
        await asyncio.gather(*map(episode, sessions))

    async def run() -> None:
        await asyncio.wait_for(asyncio.gather(*map(group, range(25))), timeout=60)
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(run())
    stats = engine.take_stats()
    assert stats.peak_cache_bytes <= budget
    assert stats.re_encoded_tokens > 0
    assert_empty(engine)


def test_a_version_that_is_set_by_hand_drops_what_was_read_before() -> None:
    policy = tiny_policy("llama", torch.float64)
    engine = NativeEngine(policy, GENEROUS, 8)

    async def run() -> int:
        (session,) = engine.open(PROMPTS[0], 1, Sampling(max_tokens=6))
        await session.first()
        while engine._is_driving:
            await asyncio.sleep(0)
        engine.version = 1
        assert (await session.extend([9], Sampling(max_tokens=2))).policy_version == 1
        session.close()
        return session.re_encoded_tokens

    assert asyncio.run(run()) == len(PROMPTS[0]) + 5
    assert_empty(engine)


def test_new_weights_between_turns_re_encode_the_session() -> None:
    policy = tiny_policy("llama", torch.float64)
    engine = NativeEngine(policy, GENEROUS, 8)

    async def run() -> tuple[Completion, Completion]:
        (session,) = engine.open(PROMPTS[1], 1, Sampling(max_tokens=6))
        first = await session.first()
        while engine._is_driving:
            await asyncio.sleep(0)
        with torch.no_grad():
            for tensor in policy.causal_lm.parameters():
                tensor.mul_(1.5)
        engine.load_weights(4)
        second = await session.extend([9, 9], Sampling(max_tokens=6, seed=2))
        assert session.re_encoded_tokens == len(PROMPTS[1]) + 5
        session.close()
        return first, second

    first, second = asyncio.run(run())
    again = NativeEngine(policy, GENEROUS, 8)
    history = [*PROMPTS[1], *first.token_ids, 9, 9]
    (wanted,) = asyncio.run(again.generate(history, 1, Sampling(max_tokens=6, seed=2)))
    assert (first.policy_version, second.policy_version) == (0, 4)
    assert second.token_ids == wanted.token_ids
    assert second.logprobs == pytest.approx(wanted.logprobs, abs=1e-9)
    assert_empty(engine)
