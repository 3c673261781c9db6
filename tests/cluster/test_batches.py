"""Prompts go out and groups come back in as few calls as they can, and no group waits long for another."""

import asyncio
import json
import os
import pickle
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from covey.cluster import status, waiting
from covey.cluster.pool import SamplerPool
from covey.cluster.sampler import SamplerActor, patience
from covey.cluster.slot import PoolLimits, SamplerSlot, TicketCall
from covey.cluster.start import prepare_actor, worker_environment
from covey.cluster.wire import (
    GroupPart,
    Jobs,
    SampledBatch,
    SampledGroup,
    SampledPart,
    WeightArrays,
    pack,
    ranks_of,
    shares,
)
from covey.engine.base import EngineLost, EngineStats, WeightSet
from covey.engine.weights import await_probe, make_weight_set, prove, trained_tensors, unproved_set
from covey.policy.policy import Policy
from covey.rollouts import rollout
from covey.rollouts.buffer import Bound, Ticket
from covey.rollouts.saved.journal import KeptGroup
from covey.rollouts.saved.plain import SavedGroup
from covey.system.machine import KEPT_MEMORY
from covey.types import Failure, Group, Prompt, Reward, Rollout, Sampling, Span, Turn

from ..support.fake_ray import Actor
from .faulty import Engine, Plan, make_sampler, training


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each method of an actor is called."""
    found: Counter[str] = Counter()
    call = Actor.call

    def counted(self: Actor, name: str, given: tuple[Any, ...]) -> "asyncio.Future[Any]":
        found[name] += 1
        return call(self, name, given)

    monkeypatch.setattr(Actor, "call", counted)
    return found


def test_a_steps_prompts_go_out_and_return_in_one_call(policy: Policy, calls: Counter[str]) -> None:
    with training(policy, Plan(seconds=0.5), Bound(4, 0), samplers=1) as run:
        run.take()
        assert (calls["begin"], calls["collect"]) == (1, 1)


def test_a_freed_place_is_refilled_while_other_groups_are_sampled(policy: Policy) -> None:
    """Four places and eight prompts: a straggler holds one place, and the others go on without it."""
    begun: list[int] = []
    straggler = asyncio.Event()

    async def hook(engine: Engine) -> None:
        begun.append(engine.calls)
        if engine.calls == 1:
            await straggler.wait()

    with training(policy, Plan(on_generate=hook), Bound(8, 0), samplers=1) as run:
        run.source.publish(0)
        run.wait_until(lambda: len(begun) == 8)
        run.wait_until(lambda: len(run.source._buffer.finished) == 7)
        run.in_pool(straggler.set)
        run.advance(1)


@pytest.mark.parametrize(("room", "is_stored"), [(0, True), (10**9, False)])
def test_small_weights_travel_inside_of_the_call_and_do_not_need_the_store(
    room: int, is_stored: bool, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covey.cluster.pool.inline_bytes", lambda: room)
    with training(policy) as run:
        run.plan.ray.is_full = not is_stored
        run.advance(3)
        assert (run.plan.ray.puts > 0) is is_stored
        assert run.pool._weights is not None
        packed, own = run.pool._weights[1], trained_tensors(policy)
    if not is_stored:  # training moves the policy's while they travel
        memory = [(data, own[name].detach().numpy()) for name, (_, _, data) in packed.arrays.items()]
        assert not any(np.shares_memory(*pair) for pair in memory)


@pytest.mark.parametrize(
    ("bound", "first_admitted", "order"),
    [(Bound(4, 0), 8, ["begin", "update"]), (Bound(4, 1), 12, ["update", "begin"])],
)
def test_prompts_go_ahead_of_weights_only_where_they_must_wait_for_them(
    bound: Bound, first_admitted: int, order: list[str], policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of version 2, and of the prompts that it admits: calls for earlier ones may come between."""
    said: list[str] = []
    call = Actor.call

    def noted(self: Actor, name: str, given: tuple[Any, ...]) -> "asyncio.Future[Any]":
        if (name == "update" and given[0][0].version == 2) or (
            name == "begin" and first_admitted in [ticket.number for ticket in given[0].tickets]
        ):
            said.append(name)
        return call(self, name, given)

    monkeypatch.setattr(Actor, "call", noted)
    monkeypatch.setattr("covey.cluster.pool.inline_bytes", lambda: 10**9)
    with training(policy, bound=bound, samplers=1, groups_per_sampler=16) as run:
        run.advance(1)
        run.wait_until(lambda: run.pool.status()[0]["version"] == 1)
        run.advance(1)
        run.wait_until(lambda: len(said) == 2)
    assert said == order


@pytest.mark.parametrize("is_first", [True, False])
def test_a_proof_is_taken_whether_it_comes_before_its_weights_or_after(is_first: bool, policy: Policy) -> None:
    weights = unproved_set(policy, 1)
    packed = pack(weights)
    assert (packed.is_proved, packed.probe.logprobs) == (False, ())
    proved: list[object] = []

    async def on_update(engine: Engine, given: WeightSet) -> None:
        proved.append((await await_probe(given.probe)).logprobs)

    async def run() -> None:
        actor = SamplerActor(lambda: make_sampler(Plan(on_update=on_update)), "keep")
        calls = [actor.prove(1, prove(policy, weights.probe)), actor.update([packed])]
        async with asyncio.timeout(10):
            await asyncio.gather(*calls[:: 1 if is_first else -1])
            await actor.prove(1, (0.0,))  # again, and too late to change anything
        assert actor._version == 1

    asyncio.run(run())
    assert proved == [prove(policy, replace(weights.probe, logprobs=()))]


def test_a_proof_waits_for_weights_that_are_still_fetched(policy: Policy) -> None:
    weights = unproved_set(policy, 1)

    async def on_update(engine: Engine, given: WeightSet) -> None:
        await await_probe(given.probe)

    async def run() -> None:
        actor = SamplerActor(lambda: make_sampler(Plan(on_update=on_update)), "keep")
        is_fetched = asyncio.Event()

        async def fetched() -> WeightArrays:
            await is_fetched.wait()
            return pack(weights)

        async with asyncio.timeout(10):
            taking = asyncio.create_task(actor.update([fetched()]))
            await actor.prove(1, prove(policy, weights.probe))
            await actor.prove(2, (0.0,))
            is_fetched.set()
            assert await taking == ""
        assert (actor._version, list(actor._logprobs)) == (1, [2])

    asyncio.run(run())


@pytest.mark.parametrize("publish_every", [1, 4])
def test_held_out_prompts_are_answered_on_the_weights_of_now(publish_every: int, policy: Policy) -> None:
    """They wait for weights that are under way, and weights that nobody samples for training on are pushed for them."""

    async def on_update(engine: Engine, weights: WeightSet) -> None:
        await asyncio.sleep(0.05)

    with training(policy, Plan(on_update=on_update), Bound(4, 1, publish_every), samplers=1) as run:
        run.advance(2)
        groups = run.source.run(run.source.stream.prompts[:2], 1, run.source.sampling)
    assert [rollout.policy_version for group in groups for rollout in group.rollouts] == [2, 2]


def test_a_prompt_is_encoded_once_and_before_its_weights_are_there(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    encode = rollout.encode_prompt

    def counted(tokenizer: Any, prompt: Prompt) -> list[int]:
        encoded.append(prompt.id)
        return encode(tokenizer, prompt)

    monkeypatch.setattr(rollout, "encode_prompt", counted)

    async def run() -> None:
        plan = Plan()
        actor = SamplerActor(lambda: make_sampler(plan), "keep")
        actor._engine.version = 1  # type: ignore[misc] # of weights that it has loaded itself, which nothing proves
        waiting = tuple(replace(ticket, least_version=1) for ticket in tickets(2))
        await actor.begin(Jobs(waiting, incarnation=1))
        await asyncio.sleep(0.01)
        assert (encoded, actor._engine.calls) == (["p0", "p1"], 0)  # type: ignore[attr-defined]
        await actor.update([pack(make_weight_set(policy, 1))])
        num_sampled = 0
        while num_sampled < 2:
            num_sampled += len((await actor.collect()).sampled)

    asyncio.run(run())
    assert encoded == ["p0", "p1"]


def test_an_actor_keeps_freed_memory_but_its_child_processes_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in KEPT_MEMORY:
        monkeypatch.delenv(name, raising=False)
    variables = worker_environment(1)["env_vars"]
    assert {name: variables[name] for name in KEPT_MEMORY} == KEPT_MEMORY
    # In the process that starts with them
    for name, value in (KEPT_MEMORY | {"MALLOC_ARENA_MAX": "7"}).items():
        monkeypatch.setenv(name, value)
    before = sys.getswitchinterval()
    prepare_actor()
    sys.setswitchinterval(before)
    assert {name for name in KEPT_MEMORY if name in os.environ} == {"MALLOC_ARENA_MAX"}
    assert KEPT_MEMORY.keys().isdisjoint(worker_environment(1)["env_vars"])


def tickets(num: int) -> tuple[Ticket, ...]:
    return tuple(Ticket(number, Prompt(f"p{number}", "scripted", "a:", {}), Sampling(), 2, -1) for number in range(num))


def collected(plan: Plan, num: int) -> tuple[SampledBatch, float]:
    """What a sampler answers first of so many tickets, and after how many seconds."""

    async def run() -> tuple[SampledBatch, float]:
        actor = SamplerActor(lambda: make_sampler(plan), "keep")
        started = time.monotonic()
        await actor.begin(Jobs(tickets(num), incarnation=3))
        batch = await actor.collect()
        seconds = time.monotonic() - started
        for task in actor._under_way:
            task.cancel()
        return batch, seconds

    return asyncio.run(run())


def test_groups_that_end_together_come_in_one_batch_with_engine_counts() -> None:
    async def hook(engine: Engine) -> None:
        await asyncio.sleep(0.001 * engine.calls)

    batch, _ = collected(Plan(on_generate=hook, seconds=0.5), 4)
    assert [sampled.number for sampled in batch.sampled] == [0, 1, 2, 3]
    assert batch.incarnation == 3
    assert batch.stats.sampled_tokens == 8
    assert all(len(sampled.whole.rollouts) == 2 for sampled in batch.sampled)


def test_a_group_does_not_wait_for_one_that_takes_long() -> None:
    async def hook(engine: Engine) -> None:
        await asyncio.sleep(60 if engine.calls > 1 else 0)

    batch, seconds = collected(Plan(on_generate=hook), 2)
    assert [sampled.number for sampled in batch.sampled] == [0]
    assert seconds < 5


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 0.0), (0.2, 0.01), (2.0, 0.1), (3600.0, 0.1)])
def test_a_finished_group_waits_briefly_for_others(seconds: float, expected: float) -> None:
    assert patience(seconds) == pytest.approx(expected)


def test_parts_are_told_of_the_groups_that_are_not_finished() -> None:
    async def run() -> SampledBatch:
        actor = SamplerActor(lambda: make_sampler(Plan()), "keep")
        await actor.begin(Jobs(tickets(1), incarnation=3, kept={}))
        actor._tell(tickets(2)[1], "completion", 0, "of another")
        await asyncio.gather(*actor._under_way)
        return await actor.collect()

    batch = asyncio.run(run())
    assert [sampled.number for sampled in batch.sampled] == [0]
    assert batch.parts == (SampledPart(1, 0, "completion", 0, "of another"),)


def test_a_sampler_that_lives_and_samples_nothing_does_not_work() -> None:
    signs: list[bool] = []
    slot, tokens = SimpleNamespace(incarnation=1, is_alive=True), [4, 3, 3]

    async def ping(name: str) -> tuple[int, int, int]:
        found = tokens.pop()
        slot.is_alive = bool(tokens)
        return 1, 0, found

    slot.call = ping
    pool = SimpleNamespace(_limits=PoolLimits(1, silence=0.01), _on_life=signs.append)
    asyncio.run(SamplerPool._watch(pool, slot))  # type: ignore[arg-type] # these are all that it reads
    assert signs == [True, False, True]


def test_weights_take_their_bytes_and_a_thousand_for_each_name() -> None:
    one = ("float32", (2,), np.zeros(2, np.float32))
    assert WeightArrays(0, {"a": one, "b": one}, "", None, False).num_bytes == 2016  # type: ignore[arg-type] # no probe


def test_what_was_raised_comes_beside_what_was_not() -> None:
    async def hook(engine: Engine) -> None:
        if engine.calls == 1:
            raise ValueError("too long")

    batch, _ = collected(Plan(on_generate=hook, seconds=0.0), 2)
    failed, fine = sorted(batch.sampled, key=lambda sampled: sampled.number)
    assert failed == SampledGroup(0, 0, error=("ValueError", "prompt p0: too long"))
    assert (fine.number, fine.error, len(fine.whole.rollouts)) == (1, None, 2)


def test_a_lost_engine_is_told_instead_of_a_batch() -> None:
    async def hook(engine: Engine) -> None:
        raise EngineLost("half of the weights are new")

    with pytest.raises(EngineLost, match="half of the weights"):
        collected(Plan(on_generate=hook), 1)


def test_a_successor_is_told_nothing_that_its_predecessor_had_not_been_told() -> None:
    slot = SamplerSlot(0)
    slot.begin(TicketCall(tickets(1)[0], lambda results: None, Ticket.next_attempt))
    assert [call.ticket.number for call in slot.give_up()] == [0]
    assert slot.take_unsent().tickets == ()


def test_seconds_without_a_group_are_counted_once() -> None:
    slot = SamplerSlot(0, is_alive=True)
    slot.idle_since -= 1000
    assert slot.take_idle_seconds() >= 1000
    assert slot.take_idle_seconds() < 500


def test_a_slot_estimates_when_a_further_group_would_end() -> None:
    """A group that took 4 s beside another took 2 s of its own; what was learnt before weighs four fifths."""
    slot = SamplerSlot(3, incarnation=1, is_alive=True)
    assert slot.expected_end() == (0.001, 0, 3)
    for ticket in tickets(2):
        slot.begin(TicketCall(ticket, lambda results: None, Ticket.next_attempt))
    slot._learn_speed(4.0)
    assert slot.expected_end() == (6.0, 2, 3)
    slot._learn_speed(8.0)
    assert slot.seconds_per_group == pytest.approx(0.8 * 2 + 0.2 * 4)


def test_a_slot_is_idle_from_its_last_group_on_and_says_what_it_does() -> None:
    slot = SamplerSlot(0)
    assert slot.status()["state"] == "starting"
    slot.incarnation, slot.is_alive = 2, True
    assert (slot.status()["state"], slot.status()["restarts"]) == ("waiting", 1)
    slot.begin(TicketCall(tickets(1)[0], lambda results: None, Ticket.next_attempt))
    assert (slot.status()["state"], slot.status()["groups_under_way"]) == ("sampling", 1)
    slot.idle_since -= 1000
    slot.finish(SampledBatch(2, (SampledGroup(0, 0),), EngineStats(sampled_tokens=5)))
    assert slot.take_idle_seconds() < 500
    assert (slot.status()["state"], slot.status()["tokens"]) == ("waiting", 5)


def test_every_group_of_a_batch_that_comes_too_late_is_counted() -> None:
    async def run() -> int:
        slot = SamplerSlot(0)
        answer = asyncio.ensure_future(
            asyncio.sleep(0, SampledBatch(1, (SampledGroup(0, 0), SampledGroup(1, 0)), EngineStats()))
        )
        await answer
        slot._refuse(answer)
        return slot.take_late_results()

    assert asyncio.run(run()) == 2


def test_ranks_share_groups_evenly_in_order_and_keep_what_they_have_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covey.system.collectives.world_size", lambda: 3)
    assert [shares(n) for n in (1, 4, 7)] == [[2], [0, 1, 2, 2], [0, 0, 1, 1, 2, 2, 2]]
    group = Group(Prompt("p", "e", "", {}), (), ())
    early = [GroupPart({11: (2, group)}, is_last=False)]
    assert ranks_of([10, 11, 13], early) == {10: 0, 11: 2, 13: 2}


def test_a_row_has_what_came_since_the_last_one(policy: Policy) -> None:
    with training(policy) as run:
        run.advance(1)
        run.wait_until(lambda: not run.source._buffer.waiting)
        run.source.take_metrics()
        run.source._ages, run.source._spans, run.source._wait.seconds = [0, 1, 1, 2], [1, 1, 2, 2], 3.0
        run.pool._counts.update(pushes=4, tokens=9)
        run.pool._push_seconds, run.pool._idle_seconds = 8.0, 2000.0
        found, next_one = run.source.take_metrics(), run.source.take_metrics()
    wanted = {
        "staleness/mean": (1.0, 0.0),
        "staleness/max": (2.0, 0.0),
        "staleness/versions_per_completion": (1.5, 1.0),
        "trainer_waited_seconds": (3.0, 0.0),
        "samplers/push_seconds": (2.0, 0.0),
        "samplers/tokens": (9.0, 0.0),
        "buffer/finished": (8.0, 8.0),
        "buffer/pending": (8.0, 8.0),
    }
    assert {name: (found[name], next_one.get(name, 0.0)) for name in wanted} == wanted
    assert 1000 <= found["samplers/waited_seconds"] < 1500 < 2000 > next_one["samplers/waited_seconds"]


def test_groups_are_sampled_in_order_and_idle_time_is_counted(policy: Policy) -> None:
    done: list[int] = []
    with training(policy, samplers=1, groups_per_sampler=1) as run:
        run.wait_until(lambda: run.pool.is_ready)
        asked = [replace(ticket, prompt=run.source.stream.prompts[ticket.number]) for ticket in tickets(3)]
        run.pool._slots[0].idle_since -= 1000
        run.pool.submit(
            [
                TicketCall(
                    ticket, lambda results: done.extend(one.ticket.number for one in results), Ticket.next_attempt
                )
                for ticket in reversed(asked)
            ]
        )
        run.wait_until(lambda: len(done) == 3)
        waited = run.pool.take_metrics()["samplers/waited_seconds"]
    assert done == [0, 1, 2]
    assert waited >= 1000


def test_every_sign_of_work_restarts_the_watchdog_while_the_trainer_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.001)
    looks = 0
    progress: list[tuple[int, bool]] = []
    watchdog = SimpleNamespace(
        deadline=lambda what, setting: nullcontext(), progress=lambda: progress.append((looks, wait.is_on))
    )
    wait = waiting.SamplerWait(watchdog)  # type: ignore[arg-type] # these two are all that it asks of one

    def is_done() -> bool:
        nonlocal looks
        looks += 1
        if looks != 2:
            wait.notice()
        return looks == 4

    wait.until(is_done, "groups", lambda: None)
    assert (progress, wait.is_on) == ([(1, True), (3, True)], False)


def test_the_schedule_names_published_versions_and_the_status_live_ones(
    policy: Policy,
) -> None:
    found = []
    with training(policy, bound=Bound(4, 1, publish_every=2)) as run:
        for _ in range(5):
            run.advance(1)
            found.append(run.source.take_schedule()["weights"])
        run.wait_until(lambda: not run.source._buffer.waiting)
        trainer = run.source.status()["trainer"]
    assert [digest is None for digest in found] == [True, False, True, False, True]
    assert trainer == {
        "step": 5,
        "state": "training",
        "version": 4,
        "groups_finished": 12,
        "groups_pending": 12,
    }


@pytest.mark.parametrize(("attempt", "incarnation"), [(0, 2), (1, 1)])
def test_what_another_incarnation_or_attempt_made_is_refused_and_counted(attempt: int, incarnation: int) -> None:
    slot = SamplerSlot(0, incarnation=2)
    told: list[Any] = []
    kept = KeptGroup(tell=lambda *part: told.append(part))
    slot.begin(TicketCall(tickets(1)[0].next_attempt(), lambda results: None, Ticket.next_attempt, kept))
    part = SampledPart(0, attempt, "completion", 0, None)
    assert slot.finish(SampledBatch(incarnation, (SampledGroup(0, attempt),), EngineStats(), (part,))) == []
    assert (slot.late_results, told) == (1, [])
    [(call, result)] = slot.finish(SampledBatch(2, (SampledGroup(0, 1),), EngineStats(sampled_tokens=5)))
    assert (call.ticket.attempt, result.ticket.attempt, slot.under_way) == (1, 1, {})


def test_a_group_is_the_same_after_its_way_to_the_trainer() -> None:
    long = Rollout(
        input_ids=(5, 6, 8),
        target_ids=(6, 8, 2),
        loss_mask=(False, True, True),
        sampler_logprobs=(0.0, -0.1, -0.7),
        reward=Reward(0.5, {"format": 0.25, "right": 0.25}, {"seconds": "2"}),
        text="8",
        finish_reason="stop",
        policy_version=3,
        messages=({"role": "user", "content": "more"},),
        spans=(Span(3, 0, 1), Span(4, 1, 2)),
        turns=(Turn(0, 2),),
        stop_reason="completed",
        branches=(0,),
        re_encoded_tokens=7,
    )
    (ticket,) = tickets(1)
    group = Group(ticket.prompt, (long, replace(long, input_length=3, branches=())), (Failure("judge timed out"),))
    sent = pickle.loads(pickle.dumps(SampledGroup(0, 0, SavedGroup.of(group)))).whole.group(ticket.prompt)
    assert sent == group
    assert [(rollout.re_encoded_tokens, rollout.reward.extra) for rollout in sent.rollouts] == [
        (7, {"seconds": "2"})
    ] * 2


def test_the_status_is_of_now_while_samplers_have_nothing_to_do(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "STATUS_SECONDS", 0.0)
    file = tmp_path / "status.json"
    with training(policy, bound=Bound(4, 0), silence=0.4) as run:
        run.source.report_to(file)
        run.take()
        time.sleep(0.05)  # the last group has been noticed
        run.in_pool(lambda: file.unlink(missing_ok=True))
        run.wait_until(file.exists)
        trainer = json.loads(file.read_text())["trainer"]
    assert (trainer["step"], trainer["state"]) == (1, "training")
