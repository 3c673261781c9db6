"""sampling.max_total_tokens: an answer is as long as its prompt leaves room for, in one turn and in several."""

import asyncio

import pytest

from covey.config.schema import Config
from covey.engine.base import Engine, open_sessions
from covey.engine.fake import FakeEngine
from covey.engine.native.engine import NativeEngine
from covey.rollouts.rollout import roll_out
from covey.rollouts.sampler import Sampler
from covey.run.build import episode_limits
from covey.run.build_stream import longest_prompt
from covey.types import Completion, Prompt, Sampling
from covey_tasks.games.settings import GuessConfig

from ..engine.tiny import tiny_policy
from ..support.small import TOKENIZER, scripted, small_config

LIMITED = Sampling(max_tokens=6, max_total_tokens=10)


@pytest.fixture(scope="module")
def native() -> NativeEngine:
    return NativeEngine(tiny_policy("llama"), 1 << 26, max_rows=16)


def drawn(engine: Engine, prompt: list[int], n: int, sampling: Sampling) -> list[Completion]:
    return asyncio.run(engine.generate(prompt, n, sampling))


@pytest.mark.parametrize(("num_prompt_tokens", "length"), [(1, 6), (4, 6), (5, 5), (9, 1)])
def test_a_completion_shrinks_with_its_prompt_and_counts_as_cut(
    native: NativeEngine, num_prompt_tokens: int, length: int
) -> None:
    prompt = [5 + index for index in range(num_prompt_tokens)]
    whole = drawn(native, prompt, 2, Sampling(max_tokens=6))
    for completion, uncut in zip(drawn(native, prompt, 2, LIMITED), whole, strict=True):
        assert completion.token_ids == uncut.token_ids[:length]
        assert completion.finish_reason == ("length" if length < len(uncut.token_ids) else uncut.finish_reason)


def test_a_prompt_that_leaves_no_room_is_refused_in_one_line(native: NativeEngine) -> None:
    with pytest.raises(ValueError, match=r"^a prompt of 10 tokens leaves no room in max_total_tokens=10$"):
        drawn(native, list(range(5, 15)), 1, LIMITED)
    sampler = Sampler(FakeEngine(lambda ids, index: (1, 2), 300), scripted(), TOKENIZER)
    with pytest.raises(ValueError, match=r"^prompt p: a prompt of \d+ tokens leaves no room in max_total_tokens=3$"):
        asyncio.run(roll_out(sampler, Prompt("p", "scripted", "1+1+1=", {}), 2, Sampling(max_total_tokens=3)))


def test_a_later_turn_has_the_room_that_is_left(native: NativeEngine) -> None:
    async def two_turns() -> list[Completion]:
        (session,) = open_sessions(native, [5, 6, 7], 1, Sampling(max_tokens=2, max_total_tokens=10))
        found = [await session.first(), await session.extend([8, 9], Sampling(max_tokens=6, max_total_tokens=10))]
        session.close()
        return found

    assert [len(completion.token_ids) for completion in asyncio.run(two_turns())] == [2, 3]


def test_it_bounds_the_context_of_episodes_with_the_limit_that_they_have() -> None:
    assert episode_limits(GuessConfig(), 40).max_context == 40
    assert episode_limits(GuessConfig(max_context=30), 40).max_context == 30
    assert episode_limits(Config().environment, 40).max_context == 40


@pytest.mark.parametrize(("most", "longest"), [(None, 1008), (100, 99), (1024, 1023), (1025, 1008)])
def test_prompts_that_leave_no_room_are_those_that_are_skipped(most: int | None, longest: int) -> None:
    config = small_config(sampling__max_tokens=16, sampling__max_total_tokens=most)
    assert longest_prompt(config.sampling, max_length=1024) == longest


@pytest.mark.parametrize("n", [(1, 3), (2, 2), (3, 1)])
def test_a_part_of_a_group_is_drawn_as_it_is_in_the_whole_one(native: NativeEngine, n: tuple[int, int]) -> None:
    prompt, (first, rest) = [5, 6, 7], n
    whole = drawn(native, prompt, 4, Sampling(max_tokens=6, seed=3))
    parts = [
        *drawn(native, prompt, first, Sampling(max_tokens=6, seed=3)),
        *drawn(native, prompt, rest, Sampling(max_tokens=6, seed=3, first_sample=first)),
    ]
    assert [one.token_ids for one in parts] == [one.token_ids for one in whole]
    assert len({one.token_ids for one in whole}) == 4
