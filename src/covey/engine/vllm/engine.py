"""The vLLM engine, on weights that change during completions.

A push is a transaction. Names and shapes are checked first; then vLLM is paused, loads, continues under the new
version, and scores the probe. No completion with a token of the new version is returned before the probe agrees. If
it does not, or a worker fails during loading, the engine is lost: EngineLost, and the caller makes another.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from covey.engine.base import (
    EngineLost,
    EngineStats,
    Probe,
    PushRefused,
    UpdateMode,
    WeightSet,
    check_call,
    check_length,
)
from covey.engine.vllm.files import Tensors, push_folder, write_push
from covey.engine.vllm.loop_thread import LoopThread
from covey.engine.vllm.wire import Sample, Wire, sampling_params
from covey.engine.weights import Shapes, await_probe, defect, difference, disproof, refuse, shapes_of
from covey.system.text.format import first_line
from covey.types import Completion, Sampling, Span

T = TypeVar("T")

START_SECONDS = 900.0
"""vLLM reads the weights, captures graphs and reserves its memory."""
CLOSE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Served:
    """The facts about the policy that the engine needs."""

    max_length: int
    """Positions of prompt and completion."""
    stop_ids: frozenset[int]
    dtype: torch.dtype
    """Type that vLLM computes in; weights are pushed in it."""
    max_rows: int
    adapter: Path | None = None
    """The folder of the LoRA adapter, where only that is trained and pushed."""
    shapes: Shapes | None = None
    """Names and shapes of the trained weights; a push must hold them all."""
    as_saved: Callable[[Tensors], Tensors] = dict
    """Turns trained weights into those of the folder that vLLM started from."""
    name: str = "vLLM"
    """Name in errors."""
    deadline: float = 120.0
    """Seconds within which it must answer; a completion may take longer, as long as its engine loop answers a ping."""
    sleep_level: int = 0
    """Memory that `rest` frees: none (0), the cache, with weights kept by the host (1) or dropped (2)."""


class VLLMEngine:
    """Samples with vLLM (`UpdatableEngine`); calls may come from any event loop."""

    version: int

    def __init__(
        self,
        open_wire: Callable[[], Coroutine[Any, Any, Wire]],
        served: Served,
        *,
        version: int = 0,
        collect: Callable[[int, Sequence[int]], WeightSet] | None = None,
        how: UpdateMode = "keep",
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Start vLLM, which takes a minute. EngineLost where it does not start.

        `collect` makes the weight set of a version, with a probe on the given prompt, for `load_weights`, which takes
        it as `how` says. `on_close` is called once vLLM is gone.
        """
        self.version = version
        self._served = served
        self._collect = collect
        self._how = how
        self._on_close = on_close
        self._lost = ""
        """Reason why the engine is lost, "" while it is not."""
        self._is_closed = False
        self._is_asleep = False
        self._waking = threading.Lock()
        self._seen: Sequence[int] = ()
        """The prompt asked for last."""
        self._proof: asyncio.Future[None] | None = None
        self._stats = EngineStats()
        self._rows = 0
        self._busy_since = 0.0
        self._thread = LoopThread("covey-vllm")
        try:
            self._wire: Wire = self._thread.submit(self._open(open_wire)).result(START_SECONDS)
        except BaseException as error:
            self._thread.close(CLOSE_SECONDS)
            on_close()
            if isinstance(error, EngineLost) or not isinstance(error, Exception):
                raise
            raise EngineLost(f"{served.name} did not start: {first_line(error)}") from None

    async def generate(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
        """Return n completions of one prompt, in sample order.

        ValueError where prompt and completion cannot fit. EngineLost where vLLM died.
        """
        check_call(prompt_ids, n)
        sampling = sampling.within(len(prompt_ids))
        check_length(len(prompt_ids), sampling.max_tokens, self._served.max_length)
        self._raise_if_lost()
        if self._is_asleep:
            await asyncio.to_thread(self._wake)
        self._seen = tuple(prompt_ids)
        return await asyncio.wrap_future(self._submit(self._generate(tuple(prompt_ids), n, sampling)))

    async def _generate(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
        draws = [asyncio.create_task(self._draw(prompt_ids, index, sampling)) for index in range(n)]
        try:
            with self._count_running(n):
                completions = list(await asyncio.gather(*draws))
        finally:
            for draw in draws:
                draw.cancel()
        self._stats += EngineStats(len(prompt_ids), sum(len(completion.token_ids) for completion in completions))
        return completions

    async def _draw(self, prompt_ids: Sequence[int], index: int, sampling: Sampling) -> Completion:
        """Draw one completion, again if aborted, held during a proof."""
        params = sampling_params(sampling, index, self._served.stop_ids)
        while True:
            self._raise_if_lost()
            sample = await self._watch(self._wire.sample(prompt_ids, params))
            if self._proof is not None:
                await asyncio.shield(self._proof)
            if sample.ended == "abort":
                continue
            if wrong := _defect(sample, params["max_tokens"]):
                raise self._lose(f"{self._served.name} {wrong}")
            return _completion(sample)

    async def update(self, weights: WeightSet, how: UpdateMode) -> None:
        """Take new weights as a transaction (`UpdatableEngine.update`)."""
        self._raise_if_lost()
        await asyncio.wrap_future(self._submit(self._update(weights, how)))

    def load_weights(self, version: int) -> None:
        """Wake on current weights. PushRefused and EngineLost as in `update`."""
        if self._collect is None:
            raise PushRefused(f"vLLM takes version {version} as a set with its probe, not as loose tensors")
        self._raise_if_lost()
        self._submit(self._update(self._collect(version, self._seen), self._how)).result()

    def rest(self) -> None:
        """Release memory to the trainer until weights or completions are requested."""
        if self._served.sleep_level == 0 or self._is_asleep:
            return
        self._raise_if_lost()
        self._submit(self._within(self._wire.sleep(self._served.sleep_level), "fall asleep")).result()
        self._is_asleep = True

    def _wake(self) -> None:
        """Load the current version again, once for all callers."""
        with self._waking:
            if self._is_asleep:
                self.load_weights(self.version)

    def prove(self, probe: Probe) -> None:
        """Check vLLM's weights by the probe. EngineLost where they differ."""
        self._raise_if_lost()
        self._submit(self._prove(probe, "")).result()

    async def _update(self, weights: WeightSet, how: UpdateMode) -> None:
        if self._proof is not None:
            raise PushRefused(f"version {weights.version} came while another was being loaded")
        self._proof = asyncio.get_running_loop().create_future()
        self._proof.add_done_callback(lambda proof: proof.exception())  # it may have no waiter
        try:
            # Refuse what could not be taken whole, before anything changes.
            refuse(weights.version, await asyncio.to_thread(defect, weights, self.version))
            await self._push(weights, how)
            self._proof.set_result(None)
        except EngineLost as error:
            self._proof.set_exception(error)
            raise
        finally:
            if not self._proof.done():  # refused: waiting samples continue on the old version
                self._proof.set_result(None)
            self._proof = None

    async def _push(self, weights: WeightSet, how: UpdateMode) -> None:
        served = self._served
        if served.shapes is not None:
            refuse(weights.version, difference(shapes_of(weights.tensors), served.shapes))
        tensors = weights.tensors if served.adapter is not None else served.as_saved(weights.tensors)
        with push_folder(tensors) as folder:
            await asyncio.to_thread(write_push, tensors, folder, served.dtype, served.adapter)
            if served.adapter is None:
                check = self._wire.call("covey_refusal", str(folder))
                for reason in await self._within(check, "check weights"):
                    refuse(weights.version, reason)
            try:
                await self._replace(folder, weights, how)
            except asyncio.CancelledError:
                raise self._lose(f"the push of version {weights.version} was cut off") from None

    async def _replace(self, folder: Path, weights: WeightSet, how: UpdateMode) -> None:
        """Load, label and prove; any failure from here loses the engine."""
        was_asleep = self._is_asleep
        if was_asleep:  # nothing runs, nothing is cached
            await self._within(self._wire.wake("weights"), "wake up")
        else:
            await self._watch(self._wire.pause(how))
        if self._served.adapter is None:
            await self._within(self._wire.call("covey_load", str(folder)), "load weights")
        else:
            await self._within(self._wire.load_adapter(folder), "load an adapter")
        await self._within(self._wire.label(weights.version), "take a version")
        if was_asleep:
            await self._within(self._wire.wake("kv_cache"), "wake up")
            self._is_asleep = False
        else:
            await self._within(self._wire.resume(), "go on sampling")
        await self._prove(weights.probe, f"after the push of version {weights.version} ")
        self.version = weights.version

    async def _prove(self, probe: Probe, when: str) -> None:
        found = await self._within(self._wire.score(probe.token_ids), "score the probe")
        if wrong := disproof(found, await await_probe(probe)):
            raise self._lose(f"{when}{self._served.name} {wrong}")

    def take_stats(self) -> EngineStats:
        """Return the counters since the last call."""
        now = time.monotonic()
        stats = self._stats
        if self._rows:
            stats = replace(stats, seconds=stats.seconds + now - self._busy_since)
            self._busy_since = now
        self._stats = EngineStats(peak_rows=min(self._rows, self._served.max_rows))
        return stats

    def close(self) -> None:
        """End vLLM and its thread; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._lost = self._lost or "the engine was closed"
        try:
            self._thread.submit(self._wire.close()).result(CLOSE_SECONDS)
        finally:
            self._thread.close(CLOSE_SECONDS)
            self._on_close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start work in the engine's loop; EngineLost once it is closed."""

        async def heard() -> T:
            try:
                return await work
            except asyncio.CancelledError:
                self._raise_if_lost()
                raise

        try:
            return self._thread.submit(heard())
        except RuntimeError:
            work.close()
            raise EngineLost(self._lost) from None

    async def _open(self, open_wire: Callable[[], Coroutine[Any, Any, Wire]]) -> Wire:
        wire = await asyncio.wait_for(open_wire(), START_SECONDS)
        if self._served.adapter is not None:
            await asyncio.wait_for(wire.load_adapter(self._served.adapter), self._served.deadline)
        await asyncio.wait_for(wire.label(self.version), self._served.deadline)
        return wire

    @contextmanager
    def _count_running(self, num_rows: int) -> Iterator[None]:
        """Count running rows, and the seconds in which there are any."""
        if self._rows == 0:
            self._busy_since = time.monotonic()
        self._rows += num_rows
        self._stats += EngineStats(peak_rows=min(self._rows, self._served.max_rows))
        try:
            yield
        finally:
            self._rows -= num_rows
            if self._rows == 0:
                self._stats += EngineStats(seconds=time.monotonic() - self._busy_since)

    async def _watch(self, work: Awaitable[T]) -> T:
        """Wait as long as vLLM's engine loop answers; completions have no deadline.

        It is pinged every half deadline, so silence is reported after one and a half.
        """
        self._raise_if_lost()
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                done, _ = await asyncio.wait({task}, timeout=self._served.deadline / 2)
                if not done:
                    await self._within(self._wire.ping(), "answer a ping")
            return task.result()
        except EngineLost as error:
            raise self._lose(first_line(error)) from None
        finally:
            task.cancel()

    async def _within(self, work: Awaitable[T], doing: str) -> T:
        """Wait for an answer of vLLM, up to the deadline."""
        self._raise_if_lost()
        try:
            return await asyncio.wait_for(work, self._served.deadline)
        except TimeoutError:
            raise self._lose(f"{self._served.name} did not {doing} within {self._served.deadline:g} s") from None
        except EngineLost as error:
            raise self._lose(first_line(error)) from None

    def _lose(self, reason: str) -> EngineLost:
        """Mark the engine as lost; later calls raise the same reason."""
        self._lost = self._lost or reason
        return EngineLost(self._lost)

    def _raise_if_lost(self) -> None:
        if self._lost:
            raise EngineLost(self._lost)


def _defect(sample: Sample, max_tokens: int) -> str:
    """Return a sample's defect, "" if tokens have log-probs and versions."""
    num = len(sample.token_ids)
    if sample.ended not in ("stop", "length"):
        return f"ended a completion after {num} tokens by {sample.ended!r}"
    if not 0 < num <= max_tokens or len(sample.logprobs) != num:
        return f"gave {num} tokens and {len(sample.logprobs)} log-probs where at most {max_tokens} of each are due"
    if [0, *(span.end for span in sample.spans)] != [*(span.start for span in sample.spans), num]:
        return f"gave {num} tokens whose versions are {[(s.version, s.start, s.end) for s in sample.spans]}"
    return ""


def _completion(sample: Sample) -> Completion:
    versions = [span.version for span in sample.spans]
    spans: tuple[Span, ...] = sample.spans if len(set(versions)) > 1 else ()
    return Completion(
        sample.token_ids,
        sample.logprobs,
        "stop" if sample.ended == "stop" else "length",
        min(versions),
        spans=spans,
        cached_tokens=sample.cached_tokens,
    )
