"""The samplers of a run: assignment, weights, recovery.

An event loop in its own thread sends prompts to free places, pushes weights during completions, and watches signs of
life; the trainer waits for groups alone. A sampler that dies, is silent for too long or refuses weights is replaced;
its running work is sampled again, and its late results are dropped.
"""

import asyncio
import heapq
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from covey.cluster.roles import Allotment, role_of
from covey.cluster.sampler import SamplerActor
from covey.cluster.settings import DevicesConfig
from covey.cluster.slot import PoolLimits, SamplerLost, SamplerSlot, TicketCall
from covey.cluster.start import (
    SWITCH_SECONDS,
    ClusterLost,
    import_ray,
    inline_bytes,
    loss_of_cluster,
    put,
    watch_cluster,
    worker_environment,
)
from covey.cluster.waiting import hand_over
from covey.cluster.wire import Proof, TicketResult, copy_arrays, pack
from covey.engine.base import MOST_LOSSES, EngineStats, UpdateMode, WeightSet
from covey.rollouts.sampler import Sampler
from covey.types import RunStopped

LOGGER = logging.getLogger(__name__)

PING_SECONDS = 2.0
"""Seconds between two checks whether a sampler lives."""
MOST_ATTEMPTS = 10
"""Most losses of one prompt with its sampler before the run ends: the prompt may kill samplers."""
ANSWER_SECONDS = 1.0
"""Longest wait of a row for logs of samplers' environments."""
CLOSE_SECONDS = 5.0
"""Seconds for samplers to let go of their worker processes."""


class SamplerPool:
    """Samplers as Ray actors; public methods may be called from any thread."""

    def __init__(
        self,
        make_sampler: Callable[[], Sampler],
        devices: DevicesConfig,
        how: UpdateMode,
        limits: PoolLimits,
        on_life: Callable[[bool], None] = lambda has_worked: None,
        on_loss: Callable[[ClusterLost], None] = lambda lost: None,
    ) -> None:
        """Set callbacks: `make_sampler` runs in each sampler's process.

        `on_life` receives every sign of life, and whether it was work; `on_loss` the loss of the cluster.
        """
        self._ray = import_ray()
        self._make, self._devices, self._how, self._limits = make_sampler, devices, how, limits
        self._on_life, self._on_loss = on_life, on_loss
        self._places = Allotment(self._ray, devices, role_of(devices, "sampler"))
        self._slots = [SamplerSlot(index) for index in range(devices.sampler)]
        self._queue: list[tuple[int, int, TicketCall]] = []
        self._numbers = count()
        self._weights: tuple[int, Any] | None = None
        self._inline_bytes = inline_bytes()
        self._proof: Proof = (-1, ())
        """Proof of the newest weights that have one."""
        self._follow: tuple[int, int, float] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: list[Future[dict[str, float]]] = []
        self._counts: Counter[str] = Counter()
        self._done = EngineStats()
        self._push_seconds = self._idle_seconds = 0.0
        self.error: Exception | None = None
        """Error that ended the pool; the run ends with it."""
        self._switch_seconds = sys.getswitchinterval()
        """Switch interval of the interpreter beforehand, seconds."""
        sys.setswitchinterval(SWITCH_SECONDS)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="samplers", daemon=True)
        self._thread.start()
        for slot in self._slots:
            self._soon(self._start, slot)
        self._is_closing = threading.Event()
        watch_cluster(limits.silence, self._fail, self._is_closing)

    @property
    def is_ready(self) -> bool:
        return any(slot.is_alive for slot in self._slots)

    def submit(self, calls: Sequence[TicketCall]) -> None:
        """Sample the groups of tickets, lower numbers first."""
        hand_over(self._loop, lambda: self._enqueue(calls))

    def push(self, weights: WeightSet) -> None:
        """Start pushing a copy of new weights to every sampler."""
        packed, what = pack(weights), f"weights of version {weights.version}"
        try:
            kept = copy_arrays(packed) if packed.num_bytes < self._inline_bytes else put(packed, what)
        except ClusterLost as error:
            self._fail(error)
            raise
        hand_over(self._loop, lambda: self._set_weights((weights.version, kept)))
        # Their proof follows once the trainer has it
        logprobs = weights.probe.logprobs
        if isinstance(logprobs, Future):
            logprobs.add_done_callback(
                lambda known: self._loop.call_soon_threadsafe(self._set_proof, (weights.version, known.result()))
            )

    def follow(self, step: int, num_steps: int, epochs: float) -> None:
        """Set the progress of training in all environments."""

        def tell() -> None:
            self._follow = (step, num_steps, epochs)
            self._soon_for_each(self._tell)

        self._loop.call_soon_threadsafe(tell)

    def ask_environments(self) -> None:
        """Request every environment's metrics, without waiting."""
        self._asked += [asyncio.run_coroutine_threadsafe(s.environment_metrics(), self._loop) for s in self._slots]

    def take_environment_metrics(self) -> list[dict[str, float]]:
        """Return the metrics that arrived, one mapping per sampler; late ones follow."""
        if not self._asked:
            self.ask_environments()
        asked, late = self._asked, wait(self._asked, ANSWER_SECONDS).not_done
        self._asked = [one for one in asked if one in late]
        return [one.result() for one in asked if one not in late]

    def take_metrics(self) -> dict[str, float]:
        """Return the samplers' counters since the last call, from the pool's thread."""

        async def take() -> dict[str, float]:
            counts, self._counts = self._counts, Counter()
            done, self._done = self._done, EngineStats()
            pushed, self._push_seconds = self._push_seconds, 0.0
            idle, self._idle_seconds = self._idle_seconds + sum(slot.take_idle_seconds() for slot in self._slots), 0.0
            counts["late_results_refused"] += sum(slot.take_late_results() for slot in self._slots)
            return {
                **{f"samplers/{name}": float(number) for name, number in counts.items() if number},
                **done.metrics(),
                "samplers/alive": float(sum(slot.is_alive for slot in self._slots)),
                "samplers/waited_seconds": idle / len(self._slots),
                "samplers/push_seconds": pushed / max(1, counts["pushes"]),
            }

        return asyncio.run_coroutine_threadsafe(take(), self._loop).result()

    def status(self) -> list[dict[str, Any]]:
        return [slot.status() for slot in self._slots]

    def close(self) -> None:
        """End all samplers, and their children."""

        async def end() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if is_gone:
                return
            actors = [slot.actor for slot in self._slots if slot.actor is not None and slot.is_alive]
            with suppress(Exception):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await asyncio.gather(*(actor.close.remote() for actor in actors), return_exceptions=True)
            for slot in self._slots:
                self._kill(slot.actor)
            self._places.close()

        if self._loop.is_closed():
            return
        self._is_closing.set()
        sys.setswitchinterval(self._switch_seconds)
        is_gone = isinstance(self.error, ClusterLost)  # no process is left, and calls of Ray may block this thread
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(1.0 if is_gone else CLOSE_SECONDS + 5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1.0 if is_gone else CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    def _soon(self, work: Callable[[Any], Awaitable[None]], about: Any) -> None:
        """Start a coroutine in the pool's thread; its exception ends the pool."""

        async def guarded() -> None:
            try:
                await work(about)
            except Exception as error:
                self._fail(error)

        def create() -> None:
            task = self._loop.create_task(guarded())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(create)

    def _soon_for_each(self, work: Callable[[SamplerSlot], Awaitable[None]]) -> None:
        for slot in self._slots:
            if slot.is_alive:
                self._soon(work, slot)

    def _fail(self, error: Exception) -> None:
        self.error = self.error or error
        if isinstance(error, ClusterLost):
            self._weights = None  # Ray ends processes with objects in a store that is gone
            self._on_loss(error)
        self._on_life(True)

    def _enqueue(self, calls: Sequence[TicketCall]) -> None:
        for call in calls:
            heapq.heappush(self._queue, (call.ticket.number, next(self._numbers), call))
        self._assign()

    def _assign(self) -> None:
        """Assign waiting calls, in order, to the sampler expected to finish first."""
        most = self._devices.groups_per_sampler
        while self._queue and (free := [s for s in self._slots if s.is_alive and len(s.under_way) < most]):
            slot = min(free, key=SamplerSlot.expected_end)
            if not slot.under_way:
                self._idle_seconds += time.monotonic() - slot.idle_since
            slot.begin(heapq.heappop(self._queue)[-1])
        for slot in self._slots:
            if slot.unsent:
                self._soon(self._send, slot)

    async def _send(self, slot: SamplerSlot) -> None:
        if not slot.unsent:
            return
        if not slot.is_collecting:
            slot.is_collecting = True
            self._soon(self._collect, slot)
        await self._ask(slot, "begin", slot.take_unsent())

    async def _ask(self, slot: SamplerSlot, method: str, *given: Any) -> Any:
        """Call a sampler; return None once it is lost and given up."""
        incarnation = slot.incarnation
        try:
            return await slot.call(method, *given)
        except SamplerLost as lost:
            self._lose(slot, incarnation, str(lost))

    async def _collect(self, slot: SamplerSlot) -> None:
        """Collect the results of one incarnation while it has work."""
        incarnation = slot.incarnation
        while slot.incarnation == incarnation and slot.under_way:
            if (batch := await self._ask(slot, "collect")) is None:
                return
            self._counts["tokens"] += batch.stats.sampled_tokens
            self._done += batch.stats
            settled: dict[Callable[[Sequence[TicketResult]], None], list[TicketResult]] = {}
            for call, result in slot.finish(batch):
                settled.setdefault(call.settle, []).append(result)
            self._assign()
            for settle, results in settled.items():
                settle(results)
        if slot.incarnation == incarnation:
            slot.is_collecting = False

    async def _tell(self, slot: SamplerSlot) -> None:
        if self._follow is not None:
            await self._ask(slot, "follow", *self._follow)

    async def _start(self, slot: SamplerSlot) -> None:
        """Start a sampler in a slot and bring it up to date."""
        slot.incarnation += 1
        incarnation = slot.incarnation
        slot.lost, slot.version, slot.is_collecting = self._loop.create_future(), -1, False
        actor = self._ray.remote(SamplerActor)
        slot.actor = actor.options(
            **self._places.options(slot.index),
            max_concurrency=1000,
            max_restarts=0,
            runtime_env=worker_environment(self._devices.cpus_per_sampler, self._devices.python),
        ).remote(self._make, self._how)
        try:
            async with asyncio.timeout(self._limits.loading):
                slot.pid, slot.version, _ = await slot.call("ping")
        except (SamplerLost, TimeoutError) as error:
            why = f"it was not ready within {self._limits.loading:g} s" if isinstance(error, TimeoutError) else error
            if slot.incarnation == 1 and not self.is_ready:  # what keeps the first from starting keeps all others
                raise RunStopped(f"sampler {slot.index} could not start: {why}") from error
            self._lose(slot, incarnation, str(why))
            return
        slot.is_alive = True
        slot.idle_since = time.monotonic()
        self._on_life(True)
        self._soon(self._tell, slot)
        if self._weights is not None:
            self._soon(self._update, slot)
        self._soon(self._watch, slot)
        self._assign()

    async def _watch(self, slot: SamplerSlot) -> None:
        incarnation, tokens = slot.incarnation, -1
        while slot.incarnation == incarnation and slot.is_alive:
            await asyncio.sleep(min(PING_SECONDS, self._limits.silence / 4))
            try:
                async with asyncio.timeout(self._limits.silence):
                    _, _, found = await slot.call("ping")
            except TimeoutError:
                self._lose(slot, incarnation, f"it gave no sign of life for {self._limits.silence:g} s")
            except SamplerLost as lost:
                self._lose(slot, incarnation, str(lost))
            else:
                self._on_life(found != tokens)
                tokens = found

    def _set_weights(self, latest: tuple[int, Any]) -> None:
        if isinstance(self.error, ClusterLost):
            return
        self._weights = latest
        self._soon_for_each(self._update)

    def _set_proof(self, proof: Proof) -> None:
        self._proof = proof
        self._soon_for_each(partial(self._prove, proof))

    async def _prove(self, proof: Proof, slot: SamplerSlot) -> None:
        await self._ask(slot, "prove", *proof)

    async def _update(self, slot: SamplerSlot) -> None:
        """Push weights until the slot has the newest, skipping versions between."""
        incarnation = slot.incarnation
        async with slot.pushing:
            while self._weights is not None and slot.is_alive and slot.incarnation == incarnation:
                version, ref = self._weights
                if slot.version == version:
                    return
                if self._proof[0] == version:  # known before: it has not been told to who starts now
                    self._soon(partial(self._prove, self._proof), slot)
                started = time.monotonic()
                if refused := await slot.update(version, ref, self._limits.silence):
                    self._lose(slot, incarnation, refused)
                    return
                slot.version = version
                self._push_seconds += time.monotonic() - started
                self._counts["pushes"] += 1

    def _lose(self, slot: SamplerSlot, incarnation: int, why: str) -> None:
        """Give an incarnation up and start the next."""
        if slot.incarnation != incarnation or (slot.lost is not None and slot.lost.done()):
            return
        assert slot.lost is not None
        slot.is_alive = False
        slot.lost.set_result(None)
        slot.losses += 1
        self._counts["lost"] += 1
        self._kill(slot.actor)
        self._send_again(slot.give_up(), why)
        if slot.losses >= MOST_LOSSES:
            self._fail(RunStopped(f"sampler {slot.index} was lost {slot.losses} times in a row: {why}"))
            return
        self._soon(partial(self._replace, why), slot)

    async def _replace(self, why: str, slot: SamplerSlot) -> None:
        if (lost := await asyncio.to_thread(loss_of_cluster, self._limits.silence)) is not None:
            self._fail(lost)
            return
        LOGGER.warning("sampler %d is lost and replaced: %s", slot.index, why)
        await self._start(slot)

    def _send_again(self, calls: Sequence[TicketCall], why: str) -> None:
        again = [replace(call, ticket=call.give_up(call.ticket)) for call in calls]
        self._counts["groups_sent_again"] += len(again)
        for ticket in [call.ticket for call in again]:
            if ticket.attempt >= MOST_ATTEMPTS:
                lost = f"prompt {ticket.prompt.id} was lost with its sampler {ticket.attempt} times"
                self._fail(RunStopped(f"{lost}: {why}"))
        self._enqueue(again)

    def _kill(self, actor: Any) -> None:
        with suppress(Exception):
            self._ray.kill(actor, no_restart=True)
