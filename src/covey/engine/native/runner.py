"""Run the scheduler's decisions: prefill, then one token per row.

Shapes: N prompts encoded now, R rows, V vocabulary.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat

import torch
from torch import Tensor

from covey.engine.drafts.drafter import MOST, Drafter, Drawn, accept
from covey.engine.lockstep.reader import state_shape
from covey.engine.native import compiled
from covey.engine.native.cache import Cache, CacheBlock, CacheNeed, CacheShape
from covey.engine.native.compiled import CompiledDecodeLayout, CompiledPrefillLayout
from covey.engine.native.layouts import DecodeLayout, ExtendLayout, Grid, PrefillLayout, ProbeLayout
from covey.engine.native.rows import DecodeRow, RowDraws, SamplingRequest
from covey.engine.native.scheduler import Admission, Departure, Scheduler
from covey.engine.native.steps import DecodeSteps, Sampled, on_host
from covey.policy import sampling
from covey.policy.kernels.gpu.inductor import without_compiling
from covey.policy.policy import Policy, inference, to_device
from covey.policy.sampling import Distribution, partition, random_uniform, sample


@dataclass(frozen=True, slots=True)
class Draws:
    """The draws of some rows."""

    key_R: Tensor
    parts: list[tuple[Distribution, Tensor | None]]

    @staticmethod
    def of(rows: Sequence[DecodeRow], device: torch.device) -> "Draws":
        key_R = to_device([row.key for row in rows], device)
        return Draws(key_R, partition((row.sampling for row in rows), device))


MOST_KNOWN = 256
"""Tokens of a former process that are fed in one pass, all rows together: each has logits of its own."""


class Runner:
    """Owns the cache; call it without gradients (`policy.inference`)."""

    holds_prompts = False
    """Whether each row has its prompt before its own tokens, in its own slots."""

    def __init__(
        self, policy: Policy, cache: Cache, is_compiled: bool, keeps_bits: bool = False, drafter: Drafter | None = None
    ) -> None:
        """Decode in C if `is_compiled`.

        With `keeps_bits`, a token's bits do not depend on others of its pass. A drafter needs both.
        """
        self._policy, self._keeps_bits, self._drafter = policy, keeps_bits, drafter
        self._decode_layout = CompiledDecodeLayout if is_compiled else DecodeLayout
        self._prefill_layout = CompiledPrefillLayout if is_compiled else PrefillLayout
        self._steps = DecodeSteps.of(policy) if is_compiled else None
        self._step_seconds = math.inf
        """Seconds that each of the latest steps in C took."""
        self._sample_alike = compiled.sample_same_params if is_compiled else sampling.sample_same_params
        self.cache = cache
        self.repeats_bits = False
        """Whether evicted tokens are read again as they were read before, pass by pass: slow, and the same bits."""
        self.num_encoded = 0
        """Tokens that were read so far, other than by decoding or `encode_again`."""
        self._held: dict[SamplingRequest, Tensor] = {}
        """Requests that wait to start more rows, and the logits these begin with."""
        self._composed: tuple[Grid, Draws, RowDraws | None] | None = None
        """Tensors that change only with the rows or groups; the last for draws in C."""
        self._changes_seen = -1

    def start(self, scheduler: Scheduler, admission: Admission) -> Sampled:
        """Encode admitted prompts and unread tokens, and draw first tokens."""
        self.fit(scheduler)
        rows, prompts, num_resumed = admission.rows, admission.prompts, admission.num_resumed
        first = len(scheduler.rows) - len(rows)
        logits_of = self._held | (dict(zip(prompts, self._encode(prompts), strict=True)) if prompts else {})
        self._place_prompts(scheduler, first)
        pieces = [self._resume(scheduler, first, num_resumed)] if num_resumed else []
        # Groups that enter in waves keep their last logits for the rows that follow
        half_in = [request for request in logits_of if request.to_start and request.slot >= 0]
        self._held = {request: logits_of[request].clone() for request in half_in if not request.cancelled}
        if len(rows) > num_resumed:
            requests = list(dict.fromkeys(row.request for row in rows[num_resumed:]))
            index_of = {request: index for index, request in enumerate(requests)}
            source_R = to_device([index_of[row.request] for row in rows[num_resumed:]], self._policy.device)
            pieces.append(torch.stack([logits_of[request] for request in requests])[source_R])
        draws = Draws.of(rows, self._policy.device)
        return self._draw(torch.cat(pieces), draws, torch.zeros_like(draws.key_R))

    def fit(self, scheduler: Scheduler) -> None:
        """Make room in the cache for the next pass."""
        self.cache.fit(_need(scheduler))

    def decode(self, scheduler: Scheduler, most: int, seconds: float = 0.0) -> Drawn:
        """Feed every row its newest token and drafts; draw up to `most`.

        Steps in one call of C are to take no longer than `seconds`, if one does not.
        """
        rows = scheduler.rows
        if self._keeps_bits and any(row.known for row in rows):
            known = [row.known_next(max(1, MOST_KNOWN // len(rows))) for row in rows]
            if any(known):
                return self._draw_known(scheduler, known)
        if self._drafter is None or most == 1:
            return self._decode_plain(scheduler, most, seconds)
        started, is_drafted = time.perf_counter(), self._drafter.is_wanted(len(rows))
        if is_drafted:
            drawn = self._decode_drafted(scheduler, self._drafter, most, seconds)
        else:
            drawn = self._decode_plain(scheduler, most, seconds)
        self._drafter.note(len(rows), is_drafted, (time.perf_counter() - started) / len(drawn[1]))
        return drawn

    def _decode_plain(self, scheduler: Scheduler, most: int, seconds: float) -> Drawn:
        """Feed every row its newest token; draw one, or several in C."""
        rows, started = scheduler.rows, time.perf_counter()
        left = min(row.sampling.max_tokens - len(row.token_ids) for row in rows)
        _, draws, in_c = self._compose(scheduler)
        num_steps = max(1, min(most, left, int(seconds / self._step_seconds))) if in_c else 1
        self.cache.fit(_need(scheduler, [range(num_steps - 1)] * len(rows)))
        turns = [[row.token_ids[-1] for row in rows], [len(row.token_ids) for row in rows]]
        newest_R, turn_R = to_device(turns, self._policy.device)
        layout = self._layout(scheduler)
        if in_c is not None and self._steps is not None and isinstance(layout, CompiledDecodeLayout):
            found = self._steps.run(in_c, layout, newest_R, turn_R, num_steps)
            self._step_seconds = (time.perf_counter() - started) / len(found[0])
            token_ids, logprobs = (each.flatten().tolist() for each in found)
            return [*rows] * len(found[0]), *on_host(token_ids, logprobs)
        every_R = torch.arange(len(rows), device=self._policy.device)
        logits_RV = self._policy.logits(newest_R[None], layout.position_R[None], layout, every_R)
        return rows, *self._draw(logits_RV, draws, turn_R)

    def _decode_drafted(self, scheduler: Scheduler, drafter: Drafter, most: int, seconds: float) -> Drawn:
        """Feed every row its newest token and drafts."""
        rows, started = scheduler.rows, time.perf_counter()
        _, _, in_c = self._compose(scheduler)
        num_steps = max(1, min(most, int(seconds / self._step_seconds))) if in_c else 1
        reach = max(1 + MOST, num_steps * max(1, min(4, 32 // len(rows))))
        drafted = drafter.begin(rows, in_c or RowDraws.of(rows), reach)
        self.cache.fit(_need(scheduler, [range(number - 1) for number in drafted.tensors["left"].tolist()]))
        layout = self._layout(scheduler)
        if in_c is not None and self._steps is not None and isinstance(layout, CompiledDecodeLayout):
            done = self._steps.run_drafted(drafted, layout, num_steps)
            self._step_seconds = (time.perf_counter() - started) / done
        else:
            drafted.judge(*self._verify(scheduler, drafted.look()))
        drawn_rows, token_ids, logprobs = drafted.tokens()
        return drawn_rows, *on_host(token_ids, logprobs)

    def _draw_known(self, scheduler: Scheduler, known: Sequence[Sequence[int]]) -> Drawn:
        """Feed newest tokens and what a former process sampled behind them."""
        self.cache.fit(_need(scheduler, known))
        fed = [[row.token_ids[-1], *own] for row, own in zip(scheduler.rows, known, strict=True)]
        token_ids, logprobs = self._verify(scheduler, fed)
        rows = [row for row, own in zip(scheduler.rows, fed, strict=True) for _ in own]
        stands = accept(known, token_ids)
        sampled = on_host([token_ids[place] for place in stands], [logprobs[place] for place in stands])
        return [rows[place] for place in stands], *sampled

    def _verify(self, scheduler: Scheduler, fed: Sequence[Sequence[int]]) -> tuple[list[float], list[float]]:
        """Feed several tokens a row; draw after each as if fed alone."""
        rows = scheduler.rows
        layout, input_F = self._several(rows, 0, [row.num_own - 1 for row in rows], fed)
        of_position = [row for row, own in zip(rows, fed, strict=True) for _ in own]
        turns = [len(row.token_ids) + place for row, ids in zip(rows, fed, strict=True) for place in range(len(ids))]
        logits_FV = self._policy.logits(input_F[None], layout.position_R[None], layout, torch.arange(len(turns)))
        return self._draw_any(logits_FV, Draws.of(of_position, self._policy.device), torch.tensor(turns))

    def _several(
        self, rows: Sequence[DecodeRow], first: int, starts: Sequence[int], fed: Sequence[Sequence[int]]
    ) -> tuple[CompiledDecodeLayout, Tensor]:
        """Return layout and input of own tokens, as if fed alone.

        Their rows have the slots from `first` on.
        """
        prompt_lengths = [0] * (1 + max(row.request.slot for row in rows))
        columns: list[tuple[int, int, int, int]] = []
        for slot, (row, start, token_ids) in enumerate(zip(rows, starts, fed, strict=True), first):
            prompt_lengths[row.request.slot] = len(row.request.prompt_ids)
            columns += [(slot, row.request.slot, own, each) for own, each in enumerate(token_ids, start + 1)]
        holder_F, _, length_F, input_F = to_device([*zip(*columns, strict=True)], self._policy.device)
        grid = Grid.of([group for _, group, _, _ in columns], prompt_lengths, self._policy.device)
        return CompiledDecodeLayout(self.cache, grid, length_F, 1, 1, holder_F), input_F

    def drop(self) -> None:
        self.cache.drop()

    def encode_again(self, scheduler: Scheduler) -> None:
        """Encode all cached tokens on the current weights, each alone."""
        self.drop()
        self.fit(scheduler)
        num_encoded = self.num_encoded
        for request in scheduler.groups:
            logits_V = self._encode([request])[0]
            if request in self._held:
                self._held[request] = logits_V.clone()
        self._place_prompts(scheduler, 0)
        for slot, row in enumerate(scheduler.rows):
            # The newest token is not cached yet: the next pass feeds it.
            row.together = []
            if row.num_own > 1:
                self._extend(slot, [row], [(0, row.num_own - 1)])
        self.num_encoded = num_encoded

    def keep(self, over: Sequence[tuple[int, DecodeRow]], scheduler: Scheduler) -> None:
        """Keep the tokens of waiting sessions, if there is room."""
        for slot, row in over:
            row.kept, row.read = 0, row.num_own - 1
            room = self.cache.max_slots - row.read - self.cache.shape.state_slots
            if self.cache.num_slots > room:
                self._shrink(scheduler)
            # Who has rested longest gives way
            while self.cache.num_slots > room and self.cache.num_slots - scheduler.kept_slots <= room:
                scheduler.give_up_one()
                self._forget_given_up(scheduler)
            if self.cache.num_slots <= room:
                self.cache.keep(row, slot, len(row.request.prompt_ids) * self.holds_prompts, row.read)
                scheduler.rest(row)

    def apply(self, departure: Departure, scheduler: Scheduler) -> None:
        """Move cached tokens with their rows and groups, and drop evicted ones."""
        cached = [self._count_cached(scheduler.rows[target]) for _, target in departure.row_moves]
        self.cache.rows.move(departure.row_moves, max(cached, default=0))
        prompts = [len(scheduler.groups[target].prompt_ids) for _, target in departure.group_moves]
        self.cache.prompts.move(departure.group_moves, max(prompts, default=0))
        self._forget_given_up(scheduler)

    def _shrink(self, scheduler: Scheduler) -> None:
        """Release reserved slots that are not used yet."""
        self.cache.shrink(_need(scheduler))

    def _forget_given_up(self, scheduler: Scheduler) -> None:
        if len(self.cache.kept) > len(scheduler.kept):
            self.cache.keep_only(scheduler.kept)

    def _count_cached(self, row: DecodeRow) -> int:
        """Count the cached slots of a row, without its newest token."""
        return row.num_own - 1 + len(row.request.prompt_ids) * self.holds_prompts

    def _place_prompts(self, scheduler: Scheduler, first: int) -> None:
        """Give rows from slot `first` on what their prompts left: states."""
        self.cache.rows.begin_as(self.cache.prompts, [row.request.slot for row in scheduler.rows[first:]], first)

    def _resume(self, scheduler: Scheduler, first: int, num_rows: int) -> Tensor:
        """Read rows' unread tokens from slot `first` on; return logits (N, V)."""
        rows = scheduler.rows[first : first + num_rows]
        for slot, row in enumerate(rows, first):
            if row in self.cache.kept:
                self.cache.put_back(row, slot, len(row.request.prompt_ids) * self.holds_prompts)
            elif self.repeats_bits:
                self._read_again(slot, row)
        known = [row.read if row.kept or self.repeats_bits else 0 for row in rows]
        pieces, begin = [], 0
        sizes = [len(row.request.prompt_ids) + len(row.past) for row in rows]
        while begin < num_rows:
            end = begin + 1
            while end < num_rows and (end + 1 - begin) * max(sizes[begin : end + 1]) <= scheduler.limits.max_resume:
                end += 1
            stretches = [(start, len(row.past)) for start, row in zip(known[begin:end], rows[begin:end], strict=True)]
            pieces.append(self._extend(first + begin, rows[begin:end], stretches))
            begin = end
        return torch.cat(pieces)

    def _extend(self, first: int, rows: Sequence[DecodeRow], stretches: Sequence[tuple[int, int]]) -> Tensor:
        """Read rows' stretches of own tokens in one pass: logits (N, V)."""
        texts = [row.own_ids[start:end] for row, (start, end) in zip(rows, stretches, strict=True)]
        for row, (start, end) in zip(rows, stretches, strict=True):
            row.together = [*row.together, (start, end)] if start else [(start, end)]
        self.num_encoded += sum(map(len, texts))
        if self._keeps_bits:
            layout, input_T = self._several(rows, first, [start for start, _ in stretches], texts)
            end_N = to_device([*accumulate(map(len, texts))], self._policy.device) - 1
            return self._policy.logits(input_T[None], layout.position_R[None], layout, end_N)
        groups = [row.request.slot for row in rows]
        prompt_lengths = [len(row.request.prompt_ids) for row in rows]
        behind = ExtendLayout(self.cache, first, groups, prompt_lengths, stretches, self.holds_prompts)
        input_ids_1T = to_device([[token_id for text in texts for token_id in text]], self._policy.device)
        return self._policy.logits(input_ids_1T, behind.position_T[None], behind, behind.end_N)

    def _read_again(self, slot: int, row: DecodeRow) -> None:
        """Read evicted tokens again, with the passes that read them before."""
        place, own_ids = 0, row.own_ids
        for start, end in (*row.together, (row.read, row.read)):
            for index in range(place, start):
                self._feed(slot, row, index, own_ids[index])
            if end > start:
                together = row.together
                self._extend(slot, [row], [(start, end)])
                row.together = together
            place = end

    def _feed(self, slot: int, row: DecodeRow, index: int, token_id: int) -> None:
        """Read one own token of one row, as decoding does."""
        device = self._policy.device
        self.num_encoded += 1
        grid = Grid.of([0], [len(row.request.prompt_ids)], device)
        input_ids_11, length_1 = to_device([[token_id]], device), to_device([index + 1], device)
        layout = self._decode_layout(self.cache.one_row(row.request.slot, slot), grid, length_1, index + 1, index + 1)
        self._policy.logits(input_ids_11, layout.position_R[None], layout, torch.zeros_like(length_1))

    def _encode(self, prompts: Sequence[SamplingRequest]) -> Tensor:
        """Store the prompts' keys and values; return logits (N, V) after each."""
        self.num_encoded += sum(len(request.prompt_ids) for request in prompts)
        token_ids = [request.prompt_ids for request in prompts]
        return encode(self._policy, self._prefill_layout, self.cache.prompts, prompts[0].slot, token_ids)

    def _draw(self, logits_RV: Tensor, draws: Draws, position_R: Tensor) -> Sampled:
        return on_host(*self._draw_any(logits_RV, draws, position_R))

    def _draw_any(self, logits_RV: Tensor, draws: Draws, position_R: Tensor) -> tuple[list[float], list[float]]:
        """Draw tokens and log-probs, finite or not."""
        token_R, logprob_R = sample(logits_RV, draws.parts, random_uniform(draws.key_R, position_R), self._sample_alike)
        # One transfer for both: token ids are exact in float64.
        token_ids, logprobs = torch.stack((token_R.to(torch.float64), logprob_R.to(torch.float64))).tolist()
        return token_ids, logprobs

    def _compose(self, scheduler: Scheduler) -> tuple[Grid, Draws, RowDraws | None]:
        """Return the tensors that change only with the rows or groups."""
        if self._composed is None or self._changes_seen != scheduler.changes:
            rows, device = scheduler.rows, self._policy.device
            prompt_lengths = [len(request.prompt_ids) for request in scheduler.groups]
            grid = Grid.of([row.request.slot for row in rows], prompt_lengths, device)
            in_c = RowDraws.of(rows) if self._steps is not None else None
            self._composed = grid, Draws.of(rows, device), in_c if in_c and in_c.is_plain else None
            self._changes_seen = scheduler.changes
        return self._composed

    def _layout(self, scheduler: Scheduler) -> DecodeLayout | CompiledDecodeLayout:
        """Return the layout of rows' newest tokens."""
        lengths = [row.num_own for row in scheduler.rows]
        grid, _, _ = self._compose(scheduler)
        length_R = to_device(lengths, self._policy.device)
        return self._decode_layout(self.cache, grid, length_R, min(lengths), max(lengths))


def encode(
    policy: Policy, layout_kind: type[PrefillLayout], block: CacheBlock, first: int, prompts: Sequence[Sequence[int]]
) -> Tensor:
    """Store prompts' keys and values; return logits (N, V)."""
    layout = layout_kind(block, first, [len(prompt) for prompt in prompts])
    input_ids_1T = to_device([[token_id for prompt in prompts for token_id in prompt]], policy.device)
    return policy.logits(input_ids_1T, layout.position_T[None], layout, layout.end_N)


def cache_shape(policy: Policy) -> CacheShape:
    """Return the cached shapes of the policy, or of its own cache."""
    if policy.path == "general":
        return state_shape(policy)
    return detect_capabilities(policy).shape(policy.device)


@torch.no_grad()
def detect_capabilities(policy: Policy) -> ProbeLayout:
    """Return the layers' cached shapes and attention rules.

    ValueError where a layer has a state of another kind, which this engine would lose.
    """
    layout = ProbeLayout()
    zero_11 = torch.zeros((1, 1), dtype=torch.int64, device=policy.device)
    with inference(policy.model), without_compiling():
        policy.logits(zero_11, zero_11, layout, zero_11[0])
    num_layers = policy.causal_lm.config.get_text_config(decoder=True).num_hidden_layers
    if len(layout.layers) != num_layers and not layout.held:
        name = type(policy.causal_lm).__name__
        raise ValueError(
            f"engine=native needs attention in every layer, {name} has it in {len(layout.layers)} of {num_layers}"
        )
    return layout


def _need(scheduler: Scheduler, drafts: Sequence[Sequence[int]] = ()) -> CacheNeed:
    drafted = map(len, drafts or repeat((), len(scheduler.rows)))
    return CacheNeed(
        num_groups=len(scheduler.groups),
        longest_prompt=max((len(request.prompt_ids) for request in scheduler.groups), default=0),
        num_rows=len(scheduler.rows),
        longest_row=max((row.num_own + num for row, num in zip(scheduler.rows, drafted, strict=True)), default=0),
        reserved=scheduler.longest_row,
    )
