"""Sessions over changes of weights: each token is of its version, and a replay has the same bits."""

import asyncio
import copy
from collections.abc import Sequence

import pytest

from covey.engine.base import Session, UpdateMode
from covey.engine.native.own_weights import OwnWeightsEngine
from covey.engine.native.replaying import ReplayingEngine
from covey.policy.policy import Policy
from covey.rollouts.schedule import PastGroup
from covey.rollouts.turns import turn_seed
from covey.types import Completion, Sampling, Span
from covey_report.runs.replay import Attempts

from ..tiny import plain_logprobs, tiny_policy
from .test_own_weights import moved, spans_of
from .test_sessions import GENEROUS, PROMPTS, SAID, Turns, assert_empty, bytes_of

SAMPLING = Sampling(temperature=0.8, max_tokens=9, seed=4)
TURNS, SIZE = 4, 3
STOPS = range(0, 260, 23)


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the event loop after each step, so that a push comes at the token it is meant for."""
    monkeypatch.setattr("covey.engine.native.engine.TURN_SECONDS", 0.0)


def said(attempt: int, turn: int) -> list[int]:
    """Return the environment's reply before a turn."""
    return SAID[(attempt + turn) % len(SAID)]


def sampling_of(prompt: int, attempt: int, turn: int) -> Sampling:
    """Return a turn's sampling, seeded as episodes are."""
    seed = SAMPLING.seed + prompt
    return Sampling(temperature=0.8, max_tokens=9, seed=turn_seed(seed, attempt, turn) if turn > 1 else seed)


async def converse(session: Session, prompt: int, attempt: int) -> Turns:
    """Play one episode and close it. Some replies take their time."""
    found = [await session.first()]
    for turn in range(2, TURNS + 1):
        for _ in range(7 * (attempt % 2)):
            await asyncio.sleep(0)
        found.append(await session.extend(said(attempt, turn), sampling_of(prompt, attempt, turn)))
    session.close()
    return found


class Run:
    """Episodes of all prompts at once, with weights pushed after so many sampled tokens."""

    def __init__(
        self, policy: Policy, how: UpdateMode, at: Sequence[int], slots: int = 0, kernels: str = "auto", rows: int = 64
    ) -> None:
        self.policies = {0: copy.deepcopy(policy)}
        budget = bytes_of(policy, slots) if slots else GENEROUS
        self.engine = OwnWeightsEngine(copy.deepcopy(policy), budget, rows, kernels)
        self._how, self._at = how, at
        self.groups = asyncio.run(self._sample())
        self.stats = self.engine.take_stats()

    async def _sample(self) -> list[list[Turns]]:
        async def push() -> None:
            for version, tokens in enumerate(self._at, start=1):
                while self.engine._stats.sampled_tokens < tokens:
                    await asyncio.sleep(0)
                self.policies[version], weights = moved(self.policies[0], version)
                await self.engine.update(weights, self._how)

        async def group(number: int) -> list[Turns]:
            opened = self.engine.open(PROMPTS[number], SIZE, sampling_of(number, 0, 1))
            return list(await asyncio.gather(*(converse(each, number, index) for index, each in enumerate(opened))))

        *groups, _ = await asyncio.gather(*map(group, range(len(PROMPTS))), push())
        return groups  # type: ignore[return-value]

    def largest_gap(self) -> float:
        """Return the most nats between a token's log-prob and that of its version on all that was before."""
        gaps = [0.0]
        for prompt_ids, group in zip(PROMPTS, self.groups, strict=True):
            for attempt, turns in enumerate(group):
                history = [*prompt_ids]
                for turn, completion in enumerate(turns, start=1):
                    history += said(attempt, turn) if turn > 1 else []
                    for version, start, end in spans_of(completion):
                        wanted = plain_logprobs(self.policies[version].model.eval(), history, completion, SAMPLING)
                        gaps.append((wanted[start:end] - wanted.new_tensor(completion.logprobs[start:end])).abs().max())
                    history += completion.token_ids
        return float(max(gaps))

    def replayed(self) -> list[list[Turns]]:
        """Sample all of it again on the versions it was sampled on, group by group."""
        engine = ReplayingEngine(copy.deepcopy(self.policies[0]), GENEROUS, 64)
        for version, policy in self.policies.items():
            engine.remember(policy, version)

        async def group(number: int) -> list[Turns]:
            opened = engine.open(PROMPTS[number], SIZE, sampling_of(number, 0, 1))
            return list(await asyncio.gather(*(converse(each, number, index) for index, each in enumerate(opened))))

        found = []
        for number, turns in enumerate(self.groups):
            spans = tuple(tuple(whole_spans(each)) for each in turns)
            engine.past = Attempts(PastGroup("p", SAMPLING.seed + number, SIZE, 0, spans), TURNS)
            found.append(asyncio.run(group(number)))
        return found


def whole_spans(turns: Turns) -> list[Span]:
    """Return the versions of an attempt's tokens, turn after turn, where one version is one span."""
    spans: list[Span] = []
    before = 0
    for completion in turns:
        spans += [Span(version, before + start, before + end) for version, start, end in spans_of(completion)]
        before += len(completion.token_ids)
    return spans if len({span.version for span in spans}) > 1 else [Span(spans[0].version, 0, -1)]


def versions(turns: Turns) -> list[int]:
    return [version for completion in turns for version, _, _ in spans_of(completion)]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("how", ["keep", "wait", "abort"])
def test_every_token_is_of_its_version_while_weights_change(how: UpdateMode, kernels: str) -> None:
    run = Run(tiny_policy("llama", stop_ids=STOPS), how, at=[25, 60, 120], kernels=kernels)
    found = [turns for group in run.groups for turns in group]
    assert any(len(set(versions(turns))) > 1 for turns in found)
    assert all(versions(turns) == sorted(versions(turns)) for turns in found)
    if how != "keep":
        assert all(not completion.spans for turns in found for completion in turns)
    assert run.stats.re_encoded_tokens > 0
    assert run.largest_gap() < 1e-4
    assert_empty(run.engine)


def test_an_abort_begins_the_turn_again_and_not_the_episode() -> None:
    policy = tiny_policy("llama")

    async def run() -> list[Completion]:
        engine = OwnWeightsEngine(copy.deepcopy(policy), GENEROUS, 8)
        (session,) = engine.open(PROMPTS[0], 1, SAMPLING)
        first = await session.first()
        second = asyncio.ensure_future(session.extend([1, 2], SAMPLING))
        while engine._stats.sampled_tokens < len(first.token_ids) + 3:
            await asyncio.sleep(0)
        await engine.update(moved(policy, 1)[1], "abort")
        found = [first, await second]
        session.close()
        return found

    first, second = asyncio.run(run())
    assert (first.policy_version, second.policy_version) == (0, 1)
    assert len(second.token_ids) == SAMPLING.max_tokens


def test_a_turn_that_waits_for_a_place_begins_on_the_weights_that_came_meanwhile() -> None:
    policy = tiny_policy("llama")

    async def run() -> list[Completion]:
        engine = OwnWeightsEngine(copy.deepcopy(policy), GENEROUS, max_rows=1)
        (session,) = engine.open(PROMPTS[0], 1, SAMPLING)
        await session.first()
        await engine.update(moved(policy, 1)[1], "keep")  # nothing that it has read is kept
        (other,) = engine.open(PROMPTS[1], 1, SAMPLING)
        begun = asyncio.ensure_future(other.first())
        waiting = asyncio.ensure_future(session.extend([1, 2], SAMPLING))
        while engine._stats.sampled_tokens < SAMPLING.max_tokens + 3:
            await asyncio.sleep(0)
        await engine.update(moved(policy, 2)[1], "keep")
        found = [await begun, await waiting]
        session.close()
        other.close()
        return found

    begun, waited = asyncio.run(run())
    assert [version for version, _, _ in spans_of(begun)] == [1, 2]
    assert [version for version, _, _ in spans_of(waited)] == [2]


@pytest.mark.long
@pytest.mark.parametrize("how", ["keep", "abort"])
def test_weights_that_change_under_a_small_cache_give_right_tokens(how: UpdateMode) -> None:
    run = Run(tiny_policy("qwen3", stop_ids=STOPS), how, at=[25, 60, 61, 120], slots=120, rows=4)
    assert run.largest_gap() < 1e-4
    assert_empty(run.engine)


@pytest.mark.long
@pytest.mark.parametrize("how", ["keep", "wait", "abort"])
@pytest.mark.parametrize("slots", [0, 140])
def test_a_replay_has_the_same_bits_though_sessions_gave_way(how: UpdateMode, slots: int) -> None:
    run = Run(tiny_policy("llama", stop_ids=STOPS), how, at=[25, 60, 120], slots=slots, rows=5)
    assert run.engine.kernels == "compiled"
    assert run.replayed() == run.groups


@pytest.mark.long
def test_what_gave_way_is_read_again_with_the_same_bits() -> None:
    policy = tiny_policy("mistral-window", stop_ids=STOPS)
    kept, gave_way = Run(policy, "keep", at=[]), Run(policy, "keep", at=[], slots=140)
    assert gave_way.groups == kept.groups
    assert kept.stats.re_encoded_tokens == 0 < gave_way.stats.re_encoded_tokens
