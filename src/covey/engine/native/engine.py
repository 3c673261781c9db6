"""The engine in the trainer's process, on the trained weights.

Concurrent calls of generate() and turns of sessions are batched. One driver task steps the batch while there is work,
and yields to the event loop whenever a call is answered, so that finished groups are scored while others are sampled.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from covey.engine.base import Begun, EngineStats, check_call, check_length
from covey.engine.drafts.drafter import Drafter
from covey.engine.native import graph
from covey.engine.native.cache import COMPILED_GROWTH, TORCH_GROWTH, Cache, CacheShape, budget
from covey.engine.native.compiled import is_compiled
from covey.engine.native.decode_weights import build_decode_policy, is_fused, is_wanted, refresh, release
from covey.engine.native.models import joined
from covey.engine.native.rows import DecodeRow, SamplingRequest
from covey.engine.native.runner import Runner, detect_capabilities
from covey.engine.native.scheduler import Admission, Capacity, Scheduler
from covey.engine.native.sessions import NativeSession, PendingTurns
from covey.engine.native.stops import QuietTokens
from covey.policy.policy import Policy, inference
from covey.system.text.format import memory
from covey.system.waits.watchdog import Watchdog
from covey.types import Completion, Sampling

LOGGER = logging.getLogger(__name__)
TOLD_SECONDS = 1.0
TURN_SECONDS = 0.06
"""Longest time between two looks at the event loop, if one step is not longer."""


CACHED = 2**26
"""Bytes of weights that a processor may hold between two passes: reading them is what drafts save."""


class NativeEngine:
    """Samples by continuous batching; a group shares its prompt's cache.

    Completions carry `version`; set it (or call load_weights) when the weights change. `kernels` is "compiled" or
    "torch".
    """

    def __init__(
        self,
        policy: Policy,
        cache_bytes: int | None,
        max_rows: int,
        kernels: str = "auto",
        speculation: str = "auto",
        weights: str = "trained",
    ) -> None:
        """Bound cached keys and values by `cache_bytes`, running completions by `max_rows`.

        cache_bytes None follows the free memory of a GPU whenever sampling begins (`cache.budget`). `kernels` is
        model.kernels, `speculation` engine.speculation, `weights` engine.weights.
        """
        self.version = 0
        self._trained, self._is_rounded = policy, weights == "int8"
        self._prepare(policy, kernels)
        self._drafter = Drafter(always=speculation == "on") if self._drafts(speculation) else None
        self._cache_bytes = cache_bytes
        self._limits = self._capacity(max_rows, self._shape.max_slots(budget(cache_bytes, policy.device)))
        self._has_told = False
        self._quiet: dict[tuple[str, ...], QuietTokens] = {}
        """Quiet tokens by stop strings."""
        self._futures: dict[SamplingRequest, asyncio.Future[list[Completion]]] = {}
        self._turns = PendingTurns()
        self._driver: asyncio.Task[None] | None = None
        self._stats = EngineStats()
        self._told = -math.inf
        """Time of the last report of unfinished completions."""
        self._watchdog = Watchdog()
        self._admits = True
        """Whether rows that wait may begin."""
        self._set_up()

    def _set_up(self) -> None:
        """Make scheduler and runner, once all is known."""
        self._release_weights()
        self._reset()

    def _prepare(self, policy: Policy, kernels: str) -> None:
        """Choose the decode policy, its kernels and its cache."""
        probe = detect_capabilities(policy)
        self._shape: CacheShape = probe.shape(policy.device)
        self.kernels = "compiled" if is_compiled(kernels, self._shape, probe.rules.values()) else "torch"
        fusable = probe.rules if self.kernels == "compiled" or joined.is_wanted(policy) else {}
        dtype = torch.int8 if self._is_rounded else policy.precision
        self._policy = build_decode_policy(policy, fusable, dtype) if is_wanted(policy, fusable) else policy
        if self._is_rounded and not is_fused(self._policy):
            raise not_in_eight_bits(policy)
        self._is_graph = graph.is_wanted(policy) and not self._shape.held

    @property
    def _keeps_bits(self) -> bool:
        """Return True where a token's bits are independent of its pass."""
        return self.kernels == "compiled" and is_fused(self._policy) and not self._shape.held

    def _drafts(self, speculation: str) -> bool:
        """Return True where drafts are wanted and change no bits."""
        is_large = self._trained.num_weights * self._trained.precision.itemsize > CACHED
        return self._keeps_bits and (speculation == "on" or (speculation == "auto" and is_large))

    def _capacity(self, max_rows: int, max_slots: int) -> Capacity:
        return Capacity(max_rows, max_slots, rows_hold_prompts=self._is_graph, state_slots=self._shape.state_slots)

    def watched_by(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    async def generate(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
        """Return n completions of one prompt, in sample order.

        ValueError where prompt and completion cannot fit.
        """
        return await self.generate_telling(prompt_ids, n, sampling, lambda index, completion: None)

    async def generate_telling(
        self,
        prompt_ids: Sequence[int],
        n: int,
        sampling: Sampling,
        tell: Callable[[int, Completion], None],
        begun: Begun | None = None,
    ) -> list[Completion]:
        """Return n completions as `generate` does, each told before by its index."""
        request = self._request(prompt_ids, n, sampling)
        request.tell, request.begun = tell, begun if self._keeps_bits else None
        self._adopt(asyncio.get_running_loop())
        self._scheduler.submit(request)
        future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._futures[request] = future
        self._start_driving()
        try:
            return await future
        # A caller that gives up frees its rows
        finally:
            if self._futures.pop(request, None) is not None:
                self._scheduler.cancel(request)

    def open(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[NativeSession]:
        """Begin n attempts at one prompt (`SessionEngine.open`), in an event loop."""
        request = self._request(prompt_ids, n, sampling)
        request.keep_rows()
        self._adopt(asyncio.get_running_loop())
        self._scheduler.submit(request)
        self._turns.open(request)
        self._start_driving()
        return [NativeSession(self, row, self._turns.under_way[row]) for row in request.sessions]

    def extend(self, row: DecodeRow, token_ids: Sequence[int], sampling: Sampling) -> "asyncio.Future[Completion]":
        """Queue a session's next turn. ValueError where it cannot fit."""
        self._adopt(asyncio.get_running_loop())
        self._go_on(self._scheduler, row, token_ids, sampling)
        self._start_driving()
        return self._turns.begin(row)

    def close_session(self, row: DecodeRow) -> None:
        """Release a session's kept tokens or running row; idempotent."""
        if row.closed:
            return
        self._turns.close(row)
        self._scheduler.close(row)
        if not self._is_driving:
            self._tidy()

    def abandon(self, row: DecodeRow) -> None:
        """Close an unreferenced session between two turns of the engine."""
        if self._driver is not None and self._is_driving and not self._driver.get_loop().is_closed():
            self._driver.get_loop().call_soon_threadsafe(self.close_session, row)
        else:
            self.close_session(row)

    def load_weights(self, version: int) -> None:
        """Take the new version while nothing runs: no completion mixes versions."""
        in_flight = len(self._futures) + len(self._turns.under_way)
        assert not in_flight, f"{in_flight} calls of generate() in flight while weights change"
        self._forget_kept()
        self._reset()
        self.version = version

    @property
    def cache_bytes_used(self) -> int:
        """Return the bytes of cached keys and values, 0 when idle."""
        return self._runner.cache.num_bytes

    def take_stats(self) -> EngineStats:
        stats, self._stats = self._stats, EngineStats()
        if self._drafter is not None:
            stats += self._drafter.take_stats()
        self._runner.cache.peak_bytes = self.cache_bytes_used
        return stats

    def _request(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> SamplingRequest:
        check_call(prompt_ids, n)
        sampling = sampling.within(len(prompt_ids))
        check_length(len(prompt_ids), sampling.max_tokens, self._policy.max_length)
        quiet = self._quiet_tokens(sampling)
        stop_ids = self._policy.stop_ids if sampling.stop_ids is None else sampling.stop_ids
        return SamplingRequest(tuple(prompt_ids), n, sampling, stop_ids, self._decode, self.version, quiet)

    def _go_on(self, scheduler: Scheduler, row: DecodeRow, token_ids: Sequence[int], sampling: Sampling) -> None:
        """Queue a session's next turn. ValueError where it cannot fit."""
        num_own = row.num_own + len(token_ids)
        num_tokens = len(row.request.prompt_ids) + num_own
        sampling = sampling.within(num_tokens)
        check_length(num_tokens, sampling.max_tokens, self._policy.max_length)
        scheduler.check_extension(row, num_own, sampling.max_tokens)
        row.request.version, row.request.quiet = self.version, self._quiet_tokens(sampling)
        row.extend(token_ids, sampling)
        scheduler.resume(row)

    def _quiet_tokens(self, sampling: Sampling) -> QuietTokens:
        return self._quiet.setdefault(sampling.stop, QuietTokens(sampling.stop, self._decode))

    def _decode(self, token_ids: Sequence[int]) -> str:
        text = self._policy.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    @property
    def _is_driving(self) -> bool:
        return self._driver is not None and not self._driver.done()

    def _start_driving(self) -> None:
        """Start the one task that drives all requests."""
        if not self._is_driving:
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    def _adopt(self, loop: asyncio.AbstractEventLoop) -> None:
        """Drop the unfinished work of a closed loop."""
        if self._driver is None or self._driver.done() or self._driver.get_loop() is loop:
            return
        assert self._driver.get_loop().is_closed(), "the engine is sampling in another event loop"
        self._futures.clear()
        self._turns.under_way.clear()
        self._driver = None
        self._reset()

    async def _drive(self) -> None:
        """Step while there is work; a failure ends every waiting call."""
        try:
            self._begin()
            while self._scheduler.has_work:
                await self._await_weights()
                self._turn()
                await asyncio.sleep(0)
            self._tidy()
        except BaseException as error:
            futures: list[asyncio.Future[Any]] = [*self._futures.values(), *self._turns.under_way.values()]
            self._futures.clear()
            self._turns.under_way.clear()
            self._reset()
            for future in futures:
                _fail(future, error)
            if not isinstance(error, Exception):
                raise

    async def _await_weights(self) -> None:
        """Wait until the weights may be sampled on: always, here."""

    def _begin(self) -> None:
        """Prepare weights and cache, and continue kept sessions if current."""
        if self._turns.version != self.version:
            self._forget_kept()
            self._turns.version = self.version
        if not self._scheduler.kept:
            self._take_weights()
        self._take_room()

    def _tidy(self) -> None:
        """Release unused memory when idle, all of it without kept sessions."""
        with inference(self._policy.model):
            self._depart()
        if not self._scheduler.groups:
            self._runner.drop()
            self._release_weights()

    def _forget_kept(self) -> None:
        """Drop kept tokens of idle sessions after a change of weights."""
        for row in self._turns.at_rest():
            self._scheduler.give_up(row)
            row.forget()
        with inference(self._policy.model):
            self._depart()

    def _take_weights(self) -> None:
        """Refresh the decode weights after training."""
        if self._policy is not self._trained:
            refresh(self._policy, self._trained)

    def _release_weights(self) -> None:
        """Free weights packed for decoding while others train."""
        release(self._policy)

    def _take_room(self) -> None:
        """Set the cache's bound by free memory, unless the settings fix it.

        At least one request must fit; else the GPU's own error says so.
        """
        # A bound that was set stays, and so does one in use
        device = self._policy.device
        if self._cache_bytes is not None or device.type != "cuda" or self.cache_bytes_used:
            return
        num_bytes = budget(None, device)
        max_slots = max(self._shape.max_slots(num_bytes), self._scheduler.most_needed)
        self._limits = replace(self._limits, max_slots=max_slots)
        self._scheduler.limits, self._runner.cache.max_slots = self._limits, self._limits.max_slots
        if not self._has_told:
            LOGGER.info("engine.cache_bytes is %s here, four fifths of what is free on %s", memory(num_bytes), device)
            self._has_told = True

    def _turn(self) -> None:
        """Step until a call is answered, or for TURN_SECONDS."""
        started = time.perf_counter()
        answered = False
        waiting = self._watchdog.deadline("the engine to sample a token", "timeouts.sampling")
        with waiting, inference(self._policy.model):
            while self._scheduler.has_work and not answered:
                answered = self._step()
                if time.perf_counter() - started >= TURN_SECONDS:
                    break
        if started - self._told >= TOLD_SECONDS:
            self._told = started
            self._scheduler.tell_begun()
        seconds = time.perf_counter() - started
        self._stats += EngineStats(seconds=seconds, peak_cache_bytes=self._runner.cache.peak_bytes)

    def _step(self, most: int = graph.LOOK_EVERY) -> bool:
        """Admit rows, then sample tokens, up to `most` by a graph.

        True if a call was answered.
        """
        scheduler, runner = self._scheduler, self._runner
        answered = self._depart()
        while self._admits and scheduler.give_way():
            self._depart()
        admission = scheduler.admit() if self._admits else Admission((), ())
        if admission.rows:
            before = runner.num_encoded
            sampled = runner.start(scheduler, admission)
            self._count(runner.num_encoded - before, len(admission.rows), admission.charge())
            scheduler.advance(admission.rows, *sampled)
            answered |= self._depart()
        if scheduler.rows:
            self._count(0, scheduler.advance(*runner.decode(scheduler, most, TURN_SECONDS)))
        answered |= self._depart()
        return answered

    def _depart(self) -> bool:
        """Remove finished and cancelled rows, and answer complete calls."""
        over = self._scheduler.turns_over()
        self._runner.keep(over, self._scheduler)
        if self._drafter is not None:
            self._drafter.keep(row for row in self._scheduler.rows if row.left and row.completion is not None)
        departure = self._scheduler.depart()
        self._runner.apply(departure, self._scheduler)
        self._turns.answer(over)
        for request in departure.requests:
            future = self._futures.pop(request, None)
            if future is not None and not future.done():
                future.set_result([request.completions[index] for index in range(request.n)])
        return bool(departure.requests or over)

    def _count(self, prompt_tokens: int, sampled_tokens: int, re_encoded_tokens: int = 0) -> None:
        self._stats += EngineStats(
            prompt_tokens, sampled_tokens, peak_rows=len(self._scheduler.rows), re_encoded_tokens=re_encoded_tokens
        )

    def _reset(self) -> None:
        """Clear requests and cache; open sessions will be read again."""
        for request in self._turns.requests:
            request.leave()
        self._scheduler = Scheduler(self._limits)
        self._runner = self._new_runner()

    def _new_runner(self) -> Runner:
        if self._is_graph:
            return graph.GraphRunner(self._policy, Cache(self._shape, self._limits.max_slots))
        is_compiled = self.kernels == "compiled"
        cache = Cache(self._shape, self._limits.max_slots, COMPILED_GROWTH if is_compiled else TORCH_GROWTH)
        return Runner(self._policy, cache, is_compiled, self._keeps_bits, self._drafter)


def _fail(future: "asyncio.Future[Any]", error: BaseException) -> None:
    """Set an error, or cancel where the driver itself was cancelled."""
    if future.done():
        return
    if isinstance(error, Exception):
        future.set_exception(error)
    else:
        future.cancel()


def not_in_eight_bits(policy: Policy) -> ValueError:
    """Return the error of a model that engine.weights=int8 cannot sample."""
    name = type(policy.causal_lm).__name__
    return ValueError(f"engine.weights=int8 needs a model that is decoded in C as a whole, on a CPU, got {name}")
