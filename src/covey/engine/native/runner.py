"""Computes what the scheduler decided: prompts into the cache, one token a row, tokens to the host once a pass.

Shapes: N prompts encoded now, R rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.engine.native import compiled
from covey.engine.native.cache import Block, Cache, CacheShape, Need
from covey.engine.native.compiled import CompiledDecodeLayout
from covey.engine.native.layouts import DecodeLayout, Grid, PrefillLayout, ProbeLayout
from covey.engine.native.scheduler import Admission, Departure, Request, Row, Scheduler
from covey.policy import sampling
from covey.policy.policy import Policy, inference
from covey.policy.sampling import Distribution, partition, random_uniform, sample
from covey.policy.transfer import to_device


@dataclass(frozen=True, slots=True)
class Draws:
    """How each of some rows draws its tokens."""

    key_R: Tensor
    parts: list[tuple[Distribution, Tensor | None]]

    @staticmethod
    def of(rows: Sequence[Row], device: torch.device) -> "Draws":
        key_R = to_device([row.key for row in rows], device)
        return Draws(key_R, partition((row.request.sampling for row in rows), device))


Sampled = tuple[list[int], list[float]]
"""A token of each of some rows, and its log-probability."""


class Runner:
    """Owns the cache. Must be called without gradients (`policy.inference`)."""

    def __init__(self, policy: Policy, cache: Cache, is_compiled: bool) -> None:
        self._policy = policy
        self._decode_layout = CompiledDecodeLayout if is_compiled else DecodeLayout
        self._sample_alike = compiled.sample_same_params if is_compiled else sampling.sample_same_params
        self.cache = cache
        self._held: tuple[Request, Tensor] | None = None
        """The request that waits to start more rows (there is at most one), and the logits these begin with."""
        self._grid: Grid | None = None
        self._draws: Draws | None = None
        self._changes_seen = -1

    def start(self, scheduler: Scheduler, admission: Admission) -> Sampled:
        """Encode the new prompts, and draw the first token and its log-probability for every new row."""
        # Make room, then encode the prompts
        self.fit(scheduler)
        rows = admission.rows
        requests = list(dict.fromkeys(row.request for row in rows))
        pieces = [self._encode(admission.prompts)] if admission.prompts else []
        # A group that enters in waves keeps its last logits for the rows that follow
        if requests[0] not in admission.prompts:
            assert self._held is not None
            assert self._held[0] is requests[0], "rows are admitted in the order of their requests"
            pieces.insert(0, self._held[1][None])
        logits_NV = torch.cat(pieces)
        last = requests[-1]
        self._held = (last, logits_NV[-1].clone()) if last.to_start else None
        # Give each row the logits of its prompt
        index_of = {request: index for index, request in enumerate(requests)}
        source_R = to_device([index_of[row.request] for row in rows], logits_NV.device)
        position_R = torch.zeros_like(source_R)
        return self._draw(logits_NV[source_R], Draws.of(rows, logits_NV.device), position_R)

    def fit(self, scheduler: Scheduler) -> None:
        """Make room in the cache for the next pass."""
        self.cache.fit(_need(scheduler))

    def decode(self, scheduler: Scheduler, most: int) -> list[Sampled]:
        """Feed every row its newest token and draw the next one, so many times at most."""
        rows, device = scheduler.rows, self._policy.device
        self.fit(scheduler)
        grid, draws = self._composition(scheduler)
        lengths = [len(row.token_ids) for row in rows]
        newest_R, length_R = to_device([[row.token_ids[-1] for row in rows], lengths], device)
        layout = self._decode_layout(self.cache, grid, length_R, min(lengths), max(lengths))
        every_R = torch.arange(len(rows), device=device)
        logits_RV = self._policy.logits(newest_R[None], layout.position_R[None], layout, every_R)
        return [self._draw(logits_RV, draws, length_R)]

    def drop(self) -> None:
        """Give the memory back."""
        self.cache.drop()

    def encode_again(self, scheduler: Scheduler) -> None:
        """Cache keys and values anew, on the weights there are now.

        Each prompt and each row is encoded alone, so its numbers do not depend on what else is under way.
        """
        self.drop()
        self.fit(scheduler)
        for request in scheduler.groups:
            logits_1V = self._encode([request])
            if self._held is not None and self._held[0] is request:
                self._held = (request, logits_1V[-1].clone())
        for slot, row in enumerate(scheduler.rows):
            # The newest token is not cached yet: the next pass feeds it.
            self._encode_row(slot, row.request.prompt_ids, row.token_ids[:-1])

    def _encode_row(self, slot: int, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Write the keys and values of a row's own tokens, read after its prompt."""
        if not token_ids:
            return
        # Encode prompt and row as one prefill
        first, length = len(prompt_ids), len(prompt_ids) + len(token_ids)
        block = Block(self.cache.shape)
        block.resize(1, length)
        layout = PrefillLayout(block, 0, [length])
        input_ids_1T = to_device([[*prompt_ids, *token_ids]], self._policy.device)
        self._policy.logits(input_ids_1T, layout.position_T[None], layout, layout.end_N)
        self._keep_row(slot, block, first, length)

    def _keep_row(self, slot: int, encoded: Block, first: int, length: int) -> None:
        """Keep the part of an encoded prompt and row that is the row's own."""
        rows = self.cache.rows
        for target, source in zip((*rows.keys, *rows.values), (*encoded.keys, *encoded.values), strict=True):
            target[slot, :, : length - first] = source[0, :, first:length]

    def apply(self, departure: Departure, scheduler: Scheduler) -> None:
        """Move cached keys and values along with the rows and groups that moved."""
        cached = [self._cached(scheduler.rows[target]) for _, target in departure.row_moves]
        self.cache.rows.move(departure.row_moves, max(cached, default=0))
        prompts = [len(scheduler.groups[target].prompt_ids) for _, target in departure.group_moves]
        self.cache.prompts.move(departure.group_moves, max(prompts, default=0))

    def _cached(self, row: Row) -> int:
        """Count the slots of a row that are in use: its newest token is not cached yet."""
        return len(row.token_ids) - 1

    def _encode(self, prompts: Sequence[Request]) -> Tensor:
        """Write the prompts' keys and values. Logits (N, V) after each prompt."""
        layout = PrefillLayout(self.cache.prompts, prompts[0].slot, [len(request.prompt_ids) for request in prompts])
        stream = [token_id for request in prompts for token_id in request.prompt_ids]
        input_ids_1T = to_device([stream], self._policy.device)
        return self._policy.logits(input_ids_1T, layout.position_T[None], layout, layout.end_N)

    def _draw(self, logits_RV: Tensor, draws: Draws, position_R: Tensor) -> Sampled:
        token_R, logprob_R = sample(logits_RV, draws.parts, random_uniform(draws.key_R, position_R), self._sample_alike)
        # One transfer for both: token ids are exact in float64.
        return on_host(*torch.stack((token_R.to(torch.float64), logprob_R.to(torch.float64))).tolist())

    def _composition(self, scheduler: Scheduler) -> tuple[Grid, Draws]:
        """Tensors that change only when rows or groups come, go or move."""
        if self._grid is None or self._draws is None or self._changes_seen != scheduler.changes:
            rows, device = scheduler.rows, self._policy.device
            prompt_lengths = [len(request.prompt_ids) for request in scheduler.groups]
            self._grid = Grid.of([row.request.slot for row in rows], prompt_lengths, device)
            self._draws = Draws.of(rows, device)
            self._changes_seen = scheduler.changes
        return self._grid, self._draws


def on_host(token_ids: list[float], logprobs: list[float]) -> Sampled:
    """Return tokens as numbers of their kind. ValueError where a log-probability is not finite."""
    if not math.isfinite(sum(logprobs)):
        raise ValueError("log-probabilities of sampled tokens must be finite, got nan; the policy has diverged")
    return [int(token_id) for token_id in token_ids], logprobs


def cache_shape(policy: Policy) -> CacheShape:
    """Return what the policy's layers cache for a token. See `detect_capabilities`."""
    return detect_capabilities(policy).shape(policy.device)


@torch.no_grad()
def detect_capabilities(policy: Policy) -> ProbeLayout:
    """Return what the policy's layers cache for a token, and how each attends, seen in a pass over one token.

    ValueError where a layer has a state of another kind, which this engine would lose.
    """
    layout = ProbeLayout()
    zero_11 = torch.zeros((1, 1), dtype=torch.int64, device=policy.device)
    with inference(policy.model):
        policy.logits(zero_11, zero_11, layout, zero_11[0])
    num_layers = policy.causal_lm.config.get_text_config(decoder=True).num_hidden_layers
    if len(layout.layers) != num_layers:
        name = type(policy.causal_lm).__name__
        raise ValueError(
            f"engine=native needs attention in every layer, {name} has it in {len(layout.layers)} of {num_layers}"
        )
    return layout


def _need(scheduler: Scheduler) -> Need:
    return Need(
        num_groups=len(scheduler.groups),
        longest_prompt=scheduler.longest_prompt,
        num_rows=len(scheduler.rows),
        longest_row=max((len(row.token_ids) for row in scheduler.rows), default=0),
        reserved=scheduler.longest_row,
    )
