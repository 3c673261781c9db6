"""A sampler that dies, hangs, refuses or lies is replaced, and nothing is lost, trained twice or too old for it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from covey.cluster import pool, start
from covey.cluster.settings import DevicesConfig
from covey.engine.base import MOST_LOSSES, EngineLost, PushRefused, WeightSet
from covey.engine.weights import await_probe
from covey.policy.policy import Policy
from covey.rollouts.buffer import Bound
from covey.rollouts.stream import PromptStream
from covey.types import RunStopped

from ..support.fake_ray import fake_ray
from ..support.small import TOKENIZER
from .faulty import PATIENCE, Engine, Plan, environment, training

Hook = Callable[[Engine], Awaitable[None]]


def at_call(number: int, call: int, work: Callable[[Engine], None]) -> Hook:
    """Does something in the call of one sampler."""

    async def hook(engine: Engine) -> None:
        if (engine.number, engine.calls) == (number, call):
            work(engine)

    return hook


def die(engine: Engine) -> None:
    engine.actor.die()


def freeze(engine: Engine) -> None:
    engine.actor.is_frozen = True


def lose(engine: Engine) -> None:
    raise EngineLost("half of the weights are new")


@pytest.mark.parametrize("what", [die, freeze, lose])
def test_groups_of_a_sampler_that_is_lost_are_sampled_by_others(policy: Policy, what: Callable[[Engine], None]) -> None:
    with training(policy, Plan(on_generate=at_call(0, 6, what)), silence=1.0) as run:
        run.advance(8)
        assert run.counted["samplers/lost"] == 1
        assert run.counted["samplers/groups_sent_again"] >= 1
        run.wait_until(lambda: all(row["state"] != "starting" for row in run.pool.status()))
        assert sorted(row["restarts"] for row in run.pool.status()) == [0, 1]


async def proved(engine: Engine, weights: WeightSet) -> None:
    await await_probe(weights.probe)


def test_the_only_sampler_that_dies_is_replaced_and_takes_up_what_it_had(policy: Policy) -> None:
    """Its successor is told the proof of weights that were proved before it was there."""
    plan = Plan(on_generate=at_call(0, 3, die), on_update=proved)
    with training(policy, plan, Bound(4, 2), samplers=1, silence=2.0) as run:
        run.advance(5)
        assert run.counted["samplers/lost"] == 1
        assert run.source._buffer.admitted == 5 * 4 + 3 * 4  # the window of (max_staleness + 1) steps is full again


def test_losses_count_from_the_last_group_that_a_sampler_has_finished(policy: Policy) -> None:
    async def hook(engine: Engine) -> None:
        if engine.calls == 3:
            engine.actor.die()

    with training(policy, Plan(on_generate=hook), samplers=1, groups_per_sampler=1) as run:
        run.advance(4)
        assert run.counted["samplers/lost"] > MOST_LOSSES


def test_a_sampler_that_dies_at_a_push_is_replaced_on_that_version(policy: Policy) -> None:
    async def hook(engine: Engine, weights: WeightSet) -> None:
        if engine.number == 0 and weights.version == 2:
            engine.actor.die()
            await asyncio.sleep(60)

    with training(policy, Plan(on_update=hook), Bound(4, 0), samplers=1) as run:
        run.advance(6)
        assert run.counted["samplers/lost"] == 1
        assert run.ages == [0] * len(run.ages)


@pytest.mark.parametrize("error", [PushRefused, EngineLost, ValueError, TimeoutError, KeyboardInterrupt])
def test_a_sampler_that_fails_at_a_push_is_replaced(policy: Policy, error: type[BaseException]) -> None:
    async def hook(engine: Engine, weights: WeightSet) -> None:
        if engine.number == 0 and weights.version == 2:
            raise error("the probe differs by 0.5 nats")

    with training(policy, Plan(on_update=hook), Bound(4, 0), samplers=1) as run:
        run.advance(5)
        assert run.counted["samplers/lost"] == 1


@pytest.mark.long
def test_a_sampler_that_never_takes_weights_is_replaced_after_the_limit(policy: Policy) -> None:
    async def hook(engine: Engine, weights: WeightSet) -> None:
        if engine.number == 0 and weights.version == 2:
            await asyncio.sleep(60)

    with training(policy, Plan(on_update=hook), Bound(4, 0), samplers=1, silence=1.0) as run:
        started = time.monotonic()
        run.advance(5)
        assert run.counted["samplers/lost"] == 1
        assert time.monotonic() - started >= 1.0


def test_a_sampler_that_keeps_refusing_weights_ends_the_run_with_the_reason(policy: Policy) -> None:
    async def hook(engine: Engine, weights: WeightSet) -> None:
        if weights.version == 2:
            raise PushRefused("version 2 gives the probe other log-probs than the trainer, 0.5 nats apart")

    with (
        training(policy, Plan(on_update=hook), Bound(4, 0), samplers=1) as run,
        pytest.raises(RunStopped, match=r"^sampler 0 was lost 5 times in a row: version 2 gives the probe other "),
    ):
        run.advance(5)


def test_samplers_that_always_die_end_the_run_with_one_line(policy: Policy) -> None:
    async def hook(engine: Engine) -> None:
        engine.actor.die()

    with (
        training(policy, Plan(on_generate=hook)) as run,
        pytest.raises(RunStopped, match=r"^sampler \d was lost 5 times in a row: The actor died unexpectedly"),
    ):
        run.advance(1)


def test_a_prompt_that_kills_every_sampler_ends_the_run_by_its_name(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "MOST_LOSSES", 100)  # as where others are finished in between
    drawn = PromptStream(environment(Plan()).prompts("train"), seed=0, shuffle=True).draw(6)
    poison = drawn[5][0]

    async def hook(engine: Engine) -> None:
        if engine.prompt_ids == tuple(TOKENIZER(poison.text)["input_ids"]):
            engine.actor.die()

    with (
        training(policy, Plan(on_generate=hook), groups_per_sampler=1) as run,
        pytest.raises(RunStopped, match=rf"^prompt {poison.id} was lost with its sampler 10 times: The actor died"),
    ):
        run.advance(2)


def test_a_result_of_a_sampler_that_was_given_up_is_refused_and_counted(policy: Policy) -> None:
    """The node was cut off: Ray says that the actor is dead, and it goes on working."""
    woken = asyncio.Event()

    async def hook(engine: Engine) -> None:
        if (engine.number, engine.calls) == (0, 2):
            engine.actor.is_deaf = True
            await woken.wait()

    with training(policy, Plan(on_generate=hook), groups_per_sampler=1) as run, ThreadPoolExecutor(1) as threads:
        steps = threads.submit(run.advance, 3)
        run.wait_until(lambda: run.plan.ray.actors and run.plan.ray.actors[0].is_deaf)
        run.in_pool(lambda: run.pool._lose(run.pool._slots[0], 1, "its node is cut off"))
        steps.result(PATIENCE)
        run.in_pool(woken.set)
        run.wait_until(lambda: run.pool._slots[0].late_results == 1)
        run.advance(3)
        assert run.counted["samplers/late_results_refused"] == 1


@pytest.mark.long
def test_a_frozen_sampler_is_replaced_within_the_limit_of_silence(policy: Policy) -> None:
    with training(policy, Plan(on_generate=at_call(0, 1, freeze)), Bound(4, 0), samplers=1, silence=1.0) as run:
        started = time.monotonic()
        run.advance(1)
        assert 1.0 <= time.monotonic() - started < 5


# ------------------------------------------------------------------------------------------------------- at start


def test_a_sampler_that_dies_at_its_first_start_ends_the_run_with_the_reason(policy: Policy) -> None:
    plan = Plan()

    def on_start(number: int) -> None:
        plan.ray.actors[number].is_dead = True

    plan.on_start = on_start
    with (
        training(policy, plan, samplers=1) as run,
        pytest.raises(RunStopped, match=r"^sampler 0 could not start: The actor died unexpectedly"),
    ):
        run.advance(1)


def test_a_sampler_that_is_not_ready_in_time_ends_the_run(policy: Policy) -> None:
    plan = Plan()

    def on_start(number: int) -> None:
        plan.ray.actors[number].is_frozen = True

    plan.on_start = on_start
    with (
        training(policy, plan, samplers=1, loading=0.2) as run,
        pytest.raises(RunStopped, match=r"^sampler 0 could not start: it was not ready within 0.2 s"),
    ):
        run.advance(1)


def test_a_sampler_that_does_not_start_beside_one_that_is_ready_is_replaced(policy: Policy) -> None:
    plan = Plan()

    def on_start(number: int) -> None:
        plan.ray.actors[number].is_frozen = number == 1

    plan.on_start = on_start
    with training(policy, plan, loading=0.5) as run:
        run.wait_until(lambda: [row["restarts"] for row in run.pool.status()] == [0, 1])
        run.advance(4)
        assert run.counted["samplers/lost"] == 1


def test_a_successor_that_dies_at_its_start_is_followed_by_another(policy: Policy) -> None:
    def on_start(number: int) -> None:
        if number in (1, 2):
            raise MemoryError("cannot allocate")

    with training(policy, Plan(on_generate=at_call(0, 2, die), on_start=on_start), samplers=1) as run:
        run.advance(4)
        assert run.counted["samplers/lost"] == 3


# ------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "expected", "line"),
    [
        (ValueError("prompt p is too long"), ValueError, r"^prompt train-\d+: prompt p is too long"),
        (RunStopped("the judge is gone"), RunStopped, r"^the judge is gone"),
        (KeyError("answer"), RunStopped, r"^a sampler raised KeyError: 'answer'"),
        (SystemExit(3), RunStopped, r"^a sampler raised SystemExit: 3"),
        (asyncio.CancelledError(), RunStopped, r"^a sampler raised CancelledError: $"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_sampler_raises_ends_the_run_by_its_name(
    policy: Policy, error: BaseException, expected: type[Exception], line: str
) -> None:
    async def hook(engine: Engine) -> None:
        raise error

    with training(policy, Plan(on_generate=hook)) as run, pytest.raises(expected, match=line):
        run.advance(1)


def test_a_full_object_store_ends_the_run_with_one_line(policy: Policy) -> None:
    with training(policy) as run:
        run.advance(2)
        run.plan.ray.is_full = True
        line = r"^weights of version 3 could not be put into Ray's object store: The object store is full"
        with pytest.raises(RunStopped, match=line):
            run.advance(1)


def test_a_stop_while_waiting_ends_the_samplers(policy: Policy) -> None:
    async def hook(engine: Engine) -> None:
        await asyncio.sleep(60)

    with training(policy, Plan(on_generate=hook)) as run:

        def stop() -> None:
            raise KeyboardInterrupt

        run.source._wait.changed.wait = lambda seconds: stop()  # type: ignore[assignment, method-assign]
        with pytest.raises(KeyboardInterrupt):
            run.take()
        saved = run.source.state_dict()
        assert len(saved["buffer"]["pending"]) == 8
        run.source.close()
        run.source.close()
        assert all(actor.is_dead for actor in run.plan.ray.actors)


def test_metrics_are_taken_while_samplers_count(policy: Policy) -> None:
    """From another thread than the one that counts."""
    with training(policy, Plan(seconds=0.0)) as run, ThreadPoolExecutor(1) as threads:
        taking = threads.submit(lambda: [run.pool.take_metrics() for _ in range(200)])
        tokens = 0.0
        for _ in range(20):
            run.take()
            run.step += 1
            run.source.publish(run.step)
        tokens += sum(found.get("samplers/tokens", 0.0) for found in taking.result(20))
        tokens += run.pool.take_metrics().get("samplers/tokens", 0.0)
        run.wait_until(lambda: len(run.source._buffer.finished) == 8)
        tokens += run.pool.take_metrics().get("samplers/tokens", 0.0)
        assert tokens == 2 * (20 * 4 + 8)


# ------------------------------------------------------------------------------------------------------- the cluster


def hangs_where(is_gone: Callable[[Engine], bool]) -> Hook:
    async def hook(engine: Engine) -> None:
        while is_gone(engine):
            await asyncio.sleep(0.01)

    return hook


def test_a_cluster_without_a_node_ends_the_run_with_one_line(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "LOOK_SECONDS", 0.05)
    with training(policy, Plan(on_generate=hangs_where(lambda engine: not engine.plan.ray.alive))) as run:
        run.advance(2)
        run.plan.ray.alive = False
        with pytest.raises(RunStopped, match=r"^no node of the Ray cluster is alive$"):
            run.advance(10)


def test_a_sampler_lost_with_its_node_has_no_successor(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends whoever has something in the store of a dead node, sooner than the next look of the watch."""
    monkeypatch.setattr(start, "LOOK_SECONDS", 60.0)

    async def die_with_the_node(engine: Engine) -> None:
        if engine.calls == 5:
            engine.plan.ray.alive = False
            engine.actor.die_soon()

    with training(policy, Plan(on_generate=die_with_the_node), samplers=1) as run:
        with pytest.raises(RunStopped, match=r"^no node of the Ray cluster is alive$"):
            run.advance(10)
        assert run.plan.num_started == 1
        assert run.pool._weights is None


def test_an_unresponsive_cluster_ends_the_run_within_the_limit(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(start, "CLUSTER_SECONDS", 0.5)
    with training(policy, Plan(on_generate=hangs_where(lambda engine: engine.plan.ray.is_cut_off))) as run:
        run.advance(2)
        run.plan.ray.is_cut_off = True
        started = time.monotonic()
        with pytest.raises(RunStopped, match=r"^the Ray cluster gave no sign of life for 0.5 s$"):
            run.advance(10)
        assert 0.4 <= time.monotonic() - started < 5
        run.source.close()
        run.plan.ray.is_cut_off = False


def test_an_own_cluster_without_the_requested_resources_is_stopped() -> None:
    with fake_ray(resources={"CPU": 4.0}) as ray:
        line = r"^devices.trainer=1 \(0\) and devices.sampler=2 \(2\) need 2 GPUs, the cluster has 0$"
        with pytest.raises(ValueError, match=line):
            start.connect(DevicesConfig(sampler=2, gpus_per_sampler=1), weight_bytes=0)
        assert ray.started_with == {}
