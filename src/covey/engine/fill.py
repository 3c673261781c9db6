"""Fill the masked tokens of inputs, in one or several passes.

Concurrent calls of generate() share passes; the fills of one input share its first. Each pass fills the positions of
which the policy is most certain, chosen before anything is drawn, so the order follows from the weights alone.

Shapes: S different positions of the inputs of a pass, F positions filled in by it (one per row), V vocabulary.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from covey.engine.base import EngineStats, UpdateMode, WeightSet, check_call
from covey.engine.weights import await_probe, check_pushed, replace_weights, shapes_of, trained_tensors
from covey.policy.attention.bidirectional import inputs_layout
from covey.policy.policy import Policy, inference, to_device
from covey.policy.sampling import chosen_logprobs, filtered_logprobs, partition, random_uniform, row_key, sample
from covey.system.waits.watchdog import Watchdog
from covey.types import Completion, Sampling


@dataclass(eq=False)
class Fill:
    """A running sample."""

    request: "FillRequest"
    key: int
    input_ids: list[int]
    """Input of the next pass."""
    open: list[int]
    """Positions still masked."""
    filled: dict[int, tuple[int, float, int]] = field(default_factory=dict)
    """Position -> token, log-probability, pass."""


@dataclass(eq=False)
class FillRequest:
    """One call of generate()."""

    prompt_ids: tuple[int, ...]
    masked: list[int]
    n: int
    sampling: Sampling
    version: int
    future: asyncio.Future[list[Completion]]

    def fills(self) -> list[Fill]:
        first = self.sampling.first_sample
        keys = [row_key(self.sampling.seed, index) for index in range(first, first + self.n)]
        return [Fill(self, key, list(self.prompt_ids), list(self.masked)) for key in keys]

    def completion(self, fill: Fill) -> Completion:
        chosen = [fill.filled[position] for position in self.masked]
        passes = tuple(number for _, _, number in chosen)
        return Completion(
            token_ids=tuple(token_id for token_id, _, _ in chosen),
            logprobs=tuple(logprob for _, logprob, _ in chosen),
            finish_reason="stop",
            policy_version=self.version,
            passes=passes if any(passes) else (),
        )


@dataclass(frozen=True, slots=True)
class Read:
    """The logits of one pass."""

    logits_SV: Tensor
    place: dict[tuple[tuple[int, ...], int], int]
    """(input, position) -> row of the logits."""

    def rows(self, wanted: Sequence[tuple[Fill, int]]) -> Tensor:
        """Return logits (F, V) of one position per fill."""
        index = [self.place[tuple(fill.input_ids), position] for fill, position in wanted]
        return self.logits_SV[to_device(index, self.logits_SV.device, torch.int64)]


class FillEngine:
    """Samples from the trained weights; completions carry `version`."""

    def __init__(self, policy: Policy, max_rows: int) -> None:
        """Bound the completions filled at once by `max_rows`; calls stay whole."""
        if policy.mask_id is None:
            raise ValueError("engine.name=fill needs model.kind=masked, got model.kind=causal")
        self.version = 0
        self._policy = policy
        self._mask_id = policy.mask_id
        self._max_rows = max_rows
        self._waiting: list[FillRequest] = []
        self._driver: asyncio.Task[None] | None = None
        self._stats = EngineStats()
        self._watchdog = Watchdog()

    def watched_by(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    async def generate(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
        """Return n fills in sample order: masked positions' tokens, left to right.

        An input without masked tokens has empty completions. ValueError where the input is too long.
        """
        loop = asyncio.get_running_loop()
        request = self._request(prompt_ids, n, sampling, loop.create_future())
        if self._driver is None or self._driver.done() or self._driver.get_loop() is not loop:
            self._waiting.clear()  # of a loop that was closed
            self._driver = loop.create_task(self._drive())
        self._waiting.append(request)
        return await request.future

    def load_weights(self, version: int) -> None:
        """Take the new version; the weights are the trained policy's."""
        self.version = version

    def take_stats(self) -> EngineStats:
        stats, self._stats = self._stats, EngineStats()
        return stats

    def _request(
        self, prompt_ids: Sequence[int], n: int, sampling: Sampling, future: asyncio.Future[list[Completion]]
    ) -> FillRequest:
        check_call(prompt_ids, n)
        if len(prompt_ids) > self._policy.max_length:
            raise ValueError(
                f"an input of {len(prompt_ids)} tokens, the policy has {self._policy.max_length} positions"
            )
        masked = [position for position, token_id in enumerate(prompt_ids) if token_id == self._mask_id]
        if len(masked) > sampling.max_tokens:
            raise ValueError(f"max_tokens must be >= the {len(masked)} masked tokens, got {sampling.max_tokens}")
        return FillRequest(tuple(prompt_ids), masked, n, sampling, self.version, future)

    async def _drive(self) -> None:
        """Fill while calls wait; a failure ends every waiting call."""
        taken: list[FillRequest] = []
        try:
            await asyncio.sleep(0)  # calls made at the same time are answered together
            while self._waiting:
                taken = self._next()
                with self._watchdog.deadline("the engine to fill in", "timeouts.sampling"):
                    self._answer(taken)
                await asyncio.sleep(0)
        except BaseException as error:
            for request in (*taken, *self._waiting):
                if not request.future.done():
                    request.future.set_exception(error) if isinstance(error, Exception) else request.future.cancel()
            self._waiting.clear()
            if not isinstance(error, Exception):
                raise

    def _next(self) -> list[FillRequest]:
        taken = [self._waiting.pop(0)]
        num_rows = taken[0].n
        while self._waiting and num_rows + self._waiting[0].n <= self._max_rows:
            taken.append(self._waiting.pop(0))
            num_rows += taken[-1].n
        return taken

    def _answer(self, requests: Sequence[FillRequest]) -> None:
        started = time.perf_counter()
        fills = [(request, request.fills()) for request in requests]
        with inference(self._policy.model):
            fill_in(self._policy, [fill for _, own in fills for fill in own])
        for request, own in fills:
            if not request.future.done():
                request.future.set_result([request.completion(fill) for fill in own])
        self._stats += EngineStats(
            prompt_tokens=sum(len(request.prompt_ids) for request in requests),
            sampled_tokens=sum(request.n * len(request.masked) for request in requests),
            seconds=time.perf_counter() - started,
            peak_rows=sum(request.n for request in requests),
        )


class OwnWeightsFillEngine(FillEngine):
    """The engine on weights of its own. No completion mixes two versions."""

    async def update(self, weights: WeightSet, how: UpdateMode) -> None:
        """Take new weights (`UpdatableEngine.update`); waiting calls are filled with them."""
        check_pushed(weights, shapes_of(trained_tensors(self._policy)), self.version)
        proved = replace(weights, probe=await await_probe(weights.probe))  # nothing is filled in on what is not proved
        await replace_weights(self._policy, proved, self._policy, lambda: None)
        self.version = weights.version
        for request in self._waiting:
            request.version = weights.version


def fill_in(policy: Policy, fills: Sequence[Fill]) -> None:
    """Run all passes of the fills."""
    first: Read | None = None
    number = 0
    while any(fill.open for fill in fills):
        read = _read(policy, [fill for fill in fills if fill.open])
        first = first or read
        wanted = [(fill, position) for fill in fills for position in _most_confident(read, fill, number)]
        token_F, logprob_F = _draw(read, wanted)
        for (fill, position), token_id, logprob in zip(wanted, token_F.tolist(), logprob_F.tolist(), strict=True):
            fill.filled[position] = (token_id, logprob, number)
        for fill, position in wanted:
            fill.input_ids[position] = fill.filled[position][0]
            fill.open.remove(position)
        number += 1
    if first is not None and number > 1:
        _score_in_one_step(first, [fill for fill in fills if fill.request.sampling.likelihood == "one_step"])


def _read(policy: Policy, fills: Sequence[Fill]) -> Read:
    # Equal inputs are read once. If a mask was drawn as a token, fills of equal inputs have other positions open
    inputs: dict[tuple[int, ...], set[int]] = {}
    for fill in fills:
        inputs.setdefault(tuple(fill.input_ids), set()).update(fill.open)
    place: dict[tuple[tuple[int, ...], int], int] = {}
    sources: list[int] = []
    start = 0
    for ids, masked in inputs.items():
        for position in sorted(masked):
            place[ids, position] = len(sources)
            sources.append(start + position)
        start += len(ids)
    stream = [token_id for ids in inputs for token_id in ids]
    positions = [position for ids in inputs for position in range(len(ids))]
    ids_1T, position_1T, source_S = (to_device(v, policy.device) for v in ([stream], [positions], sources))
    layout = inputs_layout([len(ids) for ids in inputs], policy.device)
    if policy.head_is_linear:

        def make() -> Tensor:
            return policy.head(policy.hidden(ids_1T, position_1T, layout)[0].index_select(0, source_S))

        return Read(policy.run_forward(make), place)
    return Read(policy.logits(ids_1T, position_1T, layout).index_select(0, source_S), place)


def _most_confident(read: Read, fill: Fill, number: int) -> list[int]:
    """Return this pass's share of positions, the most certain first."""
    share = -(-len(fill.open) // max(1, fill.request.sampling.num_passes - number))
    if share >= len(fill.open):
        return list(fill.open)
    sampling = fill.request.sampling
    logits = read.rows([(fill, position) for position in fill.open])
    certainty = filtered_logprobs(logits, sampling.temperature).amax(dim=-1)
    order = torch.sort(certainty, descending=True, stable=True).indices[:share].tolist()
    return sorted(fill.open[index] for index in order)


def _draw(read: Read, wanted: Sequence[tuple[Fill, int]]) -> tuple[Tensor, Tensor]:
    """Draw tokens and log-probs (F,), by seed, sample and position."""
    logits_FV = read.rows(wanted)
    device = logits_FV.device
    key_F = to_device([fill.key for fill, _ in wanted], device)
    position_F = to_device([position for _, position in wanted], device)
    parts = partition((fill.request.sampling for fill, _ in wanted), device)
    return sample(logits_FV, parts, random_uniform(key_F, position_F))


def _score_in_one_step(first: Read, fills: Sequence[Fill]) -> None:
    """Set log-probs to those of the first pass (arXiv 2504.12216)."""
    for fill in fills:
        sampling, masked = fill.request.sampling, fill.request.masked
        fill.input_ids = list(fill.request.prompt_ids)
        token_F = to_device([fill.filled[position][0] for position in masked], first.logits_SV.device)
        logits_FV = first.rows([(fill, position) for position in masked])
        logprobs = chosen_logprobs(logits_FV, token_F, sampling).tolist()
        for position, logprob in zip(masked, logprobs, strict=True):
            fill.filled[position] = (fill.filled[position][0], logprob, 0)
