"""Decoding on a GPU by CUDA graphs.

Rows are a static block, each with its prompt's keys and values before its own. Newest tokens, lengths and finished
flags are tensors that a step updates in place, so that CUDA captures a step as a graph for each number of rows (8, 16,
32, ...) and length of the block. Rows that finish between two looks, and padding rows, idle.

The host reads what eight steps have drawn while the next eight run; what a row drew behind its end is cut. On a CPU the
same code runs uncaptured. The draw is a pure function of row and position (`sampling.random_uniform`), so rollouts do
not depend on when the host looks.

Shapes: B rows of the block in use, R of them with a completion, K key/value heads, Q query heads of each, S slots.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from covey.engine.drafts.drafter import Drawn
from covey.engine.native.cache import Cache, CacheNeed, CacheShape
from covey.engine.native.compiled import NO_FILTERS
from covey.engine.native.layouts import sinks_of, slots_in, write_tokens
from covey.engine.native.rows import DecodeRow
from covey.engine.native.runner import Runner
from covey.engine.native.scheduler import Scheduler
from covey.engine.native.steps import Sampled, UnreadSteps
from covey.policy.attention.base import Heads, Rule, apply_softcap, within, without_sink
from covey.policy.attention.choice import varlen_obstacle
from covey.policy.attention.varlen import CachedRows, cached_rows, flash_rows
from covey.policy.kernels.gpu.inductor import compile_once
from covey.policy.kernels.gpu.tiles import Tiles, repeats_much
from covey.policy.kernels.gpu.trials import computes
from covey.policy.policy import Policy, to_device
from covey.policy.sampling import Distribution, partition, random_uniform, sample

LOGGER = logging.getLogger(__name__)
LOOK_EVERY = 8
"""Steps between two looks of the host."""
FEWEST_ROWS = 8
SLOT_UNIT = 256
"""Growth of rows where attention reads idle slots too; every growth is another capture."""
NOBODY = -1
"""Stands for a stop token where the policy has none; never drawn."""

Draw = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits_BV, key_B, position_B) -> token_B, logprob_B."""


def is_wanted(policy: Policy) -> bool:
    return policy.device.type == "cuda"


class GraphRunner(Runner):
    """Draws several tokens of every row between two looks of the host."""

    holds_prompts = True

    def __init__(self, policy: Policy, cache: Cache) -> None:
        super().__init__(policy, cache, is_compiled=False)
        self._states: dict[int, RowState] = {}
        """Row states by number of rows: graphs read and write these very tensors."""
        self._written: tuple[int, int] | None = None
        """Number of rows of the state that is up to date, and the changes of the scheduler it has seen."""
        self._parts: list[tuple[Distribution, Tensor | None]] = []
        self._can_share = can_share(policy, cache.shape)
        self._shares = False
        """Whether prompts are read where their groups hold them."""
        self._ahead: UnreadSteps | None = None
        """Steps that were launched before the ones that the host has read."""
        self._graphs: dict[tuple[int, Distribution, bool], Callable[[], None]] = {}
        self._pool: Any = None
        """Memory pool of the graphs' intermediate values: one for all, since one graph runs at a time."""
        self._captures = can_capture(policy.device)
        self._reads_idle = not reads_exactly(policy, cache.shape)
        """Whether attention reads slots that are not in use yet."""

    def fit(self, scheduler: Scheduler) -> None:
        """Make room for all rows and prompts, two looks ahead."""
        length = self._length(scheduler)
        num_groups, longest_prompt = len(scheduler.groups), scheduler.longest_prompt
        num_rows = bucket(len(scheduler.rows))
        if num_rows * scheduler.row_slots + num_groups * longest_prompt + self.cache.kept_slots > self.cache.max_slots:
            num_rows = len(scheduler.rows)
        before = self._memory()
        self.cache.fit(CacheNeed(num_groups, longest_prompt, num_rows, length, length))
        self._forget_graphs_of_another(before)

    def _length(self, scheduler: Scheduler) -> int:
        """Return each row's slots: its maximum, or two looks ahead."""
        if not self._reads_idle and not any(request.sessions for request in scheduler.groups):
            return scheduler.row_slots
        longest = max((self._count_cached(row) for row in scheduler.rows), default=0) + 1 + 2 * LOOK_EVERY
        return min(scheduler.row_slots, -(-longest // SLOT_UNIT) * SLOT_UNIT)

    def _shrink(self, scheduler: Scheduler) -> None:
        longest = max((self._count_cached(row) for row in scheduler.rows), default=0)
        before = self._memory()
        self.cache.shrink(
            CacheNeed(len(scheduler.groups), scheduler.longest_prompt, len(scheduler.rows), longest, longest)
        )
        self._forget_graphs_of_another(before)

    def _place_prompts(self, scheduler: Scheduler, first: int) -> None:
        slot_R = to_device([row.request.slot for row in scheduler.rows[first:]], self._policy.device)
        prompts, rows = self.cache.prompts, self.cache.rows
        length = min(prompts.length, rows.length)
        for shared, own in zip((*prompts.keys, *prompts.values), (*rows.keys, *rows.values), strict=True):
            own[first : first + len(slot_R), :, :length] = shared[:, :, :length].index_select(0, slot_R)

    def decode(self, scheduler: Scheduler, most: int, seconds: float = 0.0) -> Drawn:
        """Draw up to `most` tokens of every row; launch more unread.

        Those are returned, too, where a row has ended: rows change then.
        """
        rows = scheduler.rows
        self.fit(scheduler)
        place = min(bucket(len(rows)), self.cache.rows.num_holders), scheduler.changes
        look, self._ahead = self._ahead, None
        if look is None or self._written != place or look.steps > most:
            self._write_state(rows, place)
            look = self._look(rows, min(most, LOOK_EVERY))
        found = []
        if most >= LOOK_EVERY and _most_left(rows) > look.steps:
            self._ahead = self._look(rows, LOOK_EVERY, look.steps)
        found += look.read(len(rows))
        if self._ahead is not None and self._has_ended(rows, found):
            found += self._ahead.read(len(rows))
            self._ahead = None
        token_ids, logprobs = (list(chain(*each)) for each in zip(*found, strict=True))
        return [*rows] * len(found), token_ids, logprobs

    def drop(self) -> None:
        """Release the memory, graphs included."""
        self._forget_graphs()
        self._states.clear()
        self._written = self._ahead = None
        super().drop()

    def _write_state(self, rows: Sequence[DecodeRow], place: tuple[int, int]) -> None:
        """Bring the state on the device to what the host knows."""
        num_rows, _ = place
        self._states.setdefault(num_rows, RowState(num_rows, self._policy)).write(rows)
        samplings = [row.sampling for row in rows]
        self._parts = partition(samplings + samplings[:1] * (num_rows - len(rows)), self._policy.device)
        lengths = [(len(row.request.prompt_ids), row.sampling.max_tokens, row.request.slot) for row in rows]
        self._shares = self._can_share and repeats_much(lengths)
        self._written = place

    def _look(self, rows: Sequence[DecodeRow], most: int, unread: int = 0) -> "UnreadSteps":
        """Launch steps, and the copy of what they draw, behind `unread` ones."""
        assert self._written is not None, "a state was written"
        state = self._states[self._written[0]]
        steps = min(most, _most_left(rows) - unread)
        state.count_1.zero_()
        for _ in range(steps):
            self._launch(state)
        return UnreadSteps.of(torch.stack((state.token_SB.to(torch.float64), state.logprob_SB))[:, :steps])

    def _has_ended(self, rows: Sequence[DecodeRow], found: Sequence[Sampled]) -> bool:
        """Return True where a row drew a stop token or its last."""
        stops = frozenset[int]().union(*(row.request.stop_ids for row in rows))
        return min(map(_count_to_draw, rows)) <= len(found) or any(
            not stops.isdisjoint(token_ids) for token_ids, _ in found
        )

    def _launch(self, state: "RowState") -> None:
        """Run a step; repeats with one distribution run as a graph."""
        place = state.num_rows, self._parts[0][0], self._shares
        if place in self._graphs:
            self._graphs[place]()
            return
        step = partial(one_step, self._policy, self.cache, state, draw_of(self._parts, self._policy), self._shares)
        step()
        if not self._captures or len(self._parts) > 1:
            return
        try:
            self._graphs[place], self._pool = capture(step, self._pool)
        except RuntimeError as error:  # an operation that the host must wait for, as some architectures have
            self._captures = False
            LOGGER.warning(
                "CUDA graph capture is disabled, so decoding is slower: %s", str(error).strip().splitlines()[0]
            )

    def _memory(self) -> list[Tensor]:
        """Return tensors at the addresses that graphs know."""
        return [block.keys[0] for block in (self.cache.prompts, self.cache.rows)]

    def _forget_graphs_of_another(self, memory: Sequence[Tensor]) -> None:
        """Drop the graphs of blocks that have been replaced."""
        rows = slice(None if self._can_share else 1, None)
        if any(now is not then for now, then in zip(self._memory()[rows], memory[rows], strict=True)):
            self._forget_graphs()

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._pool = None


class RowState:
    """The device tensors of B rows that a step reads and writes."""

    def __init__(self, num_rows: int, policy: Policy) -> None:
        device = policy.device
        self.num_rows = num_rows
        self._number_6B = torch.zeros((6, num_rows), dtype=torch.int64, device=device)
        self.newest_B, self.length_B, self.prompt_B, self.limit_B, self.key_B, self.finished_B = self._number_6B
        """Newest token, tokens of this turn, length before it, most tokens of the turn, key of the draw, 1 or 0."""
        self.tiles = Tiles(num_rows, device)
        self._own_stops = to_device(sorted(policy.stop_ids) or [NOBODY], device)
        self.stop_N = self._own_stops.clone()
        self.token_SB = torch.zeros((LOOK_EVERY, num_rows), dtype=torch.int64, device=device)
        self.logprob_SB = torch.zeros((LOOK_EVERY, num_rows), dtype=torch.float64, device=device)
        self.count_1 = torch.zeros(1, dtype=torch.int64, device=device)
        """Steps since the host looked."""

    def write(self, rows: Sequence[DecodeRow]) -> None:
        """Copy the rows' state to the device; padding rows count as finished."""
        numbers = [
            (
                row.token_ids[-1],
                len(row.token_ids),
                len(row.request.prompt_ids) + len(row.past),
                row.sampling.max_tokens,
                row.key,
                0,
            )
            for row in rows
        ]
        fillers = [(0, 1, 0, 1, 0, 1)] * (self.num_rows - len(rows))
        self._number_6B.copy_(to_device([*zip(*numbers, *fillers, strict=True)], self._number_6B.device))
        # Rows with stop tokens of their own are ended by the host alone, a few tokens later
        has_own = any(row.sampling.stop_ids is not None for row in rows)
        self.stop_N.fill_(NOBODY) if has_own else self.stop_N.copy_(self._own_stops)
        self.tiles.write([(row.request.slot, len(row.request.prompt_ids)) for row in rows])


def one_step(policy: Policy, cache: Cache, state: RowState, draw: Draw, shares: bool = False) -> None:
    """Feed every row its newest token and draw the next."""
    position_B = state.prompt_B + state.length_B - 1
    layout = RowLayout(cache, position_B, state.tiles if shares else None)
    logits_BV = policy.logits(state.newest_B[None], position_B[None], layout)
    token_B, logprob_B = draw(logits_BV, state.key_B, state.length_B)
    state.token_SB.index_copy_(0, state.count_1, token_B[None])
    state.logprob_SB.index_copy_(0, state.count_1, logprob_B[None].to(torch.float64))
    state.count_1.add_(1)
    # Finished rows stand still
    state.newest_B.copy_(torch.where(state.finished_B > 0, state.newest_B, token_B))
    state.length_B.add_(1 - state.finished_B)
    is_last_B = (token_B[:, None] == state.stop_N).any(dim=1) | (state.length_B >= state.limit_B)
    state.finished_B.bitwise_or_(is_last_B)


def draw_of(parts: Sequence[tuple[Distribution, Tensor | None]], policy: Policy) -> Draw:
    """Return the draw of rows, as one kernel where possible."""
    temperature, *filters = parts[0][0]
    is_whole = len(parts) == 1 and temperature > 0 and tuple(filters) == NO_FILTERS
    if is_whole and policy.compiles and computes("draw", policy.device):
        from covey.policy.kernels.gpu.draws import draw_tempered  # needs triton

        return lambda logits, key, position: draw_tempered(logits, temperature, key, position)
    uniform = compile_once(random_uniform) if policy.compiles else random_uniform
    return lambda logits, key, position: sample(logits, parts, uniform(key, position))


class RowLayout:
    """One token per row, stored behind the row's prompt.

    A token's position is its slot. With `tiles`, prompts are read where their groups hold them.
    """

    def __init__(self, cache: Cache, position_B: Tensor, tiles: Tiles | None = None) -> None:
        self._block, self._prompts, self._tiles = cache.rows, cache.prompts, tiles
        self._position_B = position_B
        self._places: dict[int, Tensor] = {}
        self._biases: dict[tuple[int | None, int], Tensor] = {}
        self._flash_rows: dict[int, CachedRows] = {}

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        keys, values, place = self.stores(layer, key_BKTD.shape[1])
        for cached, new_BKTD in ((keys, key_BKTD), (values, value_BKTD)):
            write_tokens(cached, new_BKTD, place)
        return self.attend_stored(layer, query_BHTD, rule)

    def stores(self, layer: int, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return cached keys and values (.., D), and new tokens' lines (T*K,)."""
        keys, values = (
            cached[layer].view(-1, cached[layer].shape[-1]) for cached in (self._block.keys, self._block.values)
        )
        return keys, values, self._place(num_heads)

    def attend_stored(self, layer: int, query_BHTD: Tensor, rule: Rule) -> Tensor:
        """Attend to each row's stored tokens, through FlashAttention where it applies."""
        keys, values = self._block.keys[layer], self._block.values[layer]
        num_rows, num_heads = query_BHTD.shape[2], keys.shape[1]
        if can_flash(Heads(keys.dtype, keys.device.type, keys.shape[-1], values.shape[-1], rule.is_plain)):
            query_RHD = query_BHTD[0].transpose(0, 1).to(keys.dtype)
            if self._tiles is not None:
                shared = self._prompts.keys[layer], self._prompts.values[layer]
                out_RHD = self._tiles.attend(query_RHD, shared, (keys, values), self._position_B, rule)
            else:
                out_RHD = flash_rows(query_RHD, keys, values, self._rows(num_heads), rule)
            return out_RHD.transpose(0, 1)[None]
        query = query_BHTD[0].transpose(0, 1).unflatten(1, (num_heads, -1)).flatten(0, 1).to(keys.dtype)
        key, value = (cached[:num_rows].flatten(0, 1) for cached in (keys, values))
        bias = self._bias(rule.window, num_heads)
        if rule.is_plain:
            score = torch.baddbmm(bias, query, key.mT, alpha=rule.scaling)
        else:
            score = apply_softcap(torch.bmm(query, key.mT) * rule.scaling, rule.softcap) + bias
        weight = score.softmax(dim=-1, dtype=torch.promote_types(score.dtype, torch.float32))
        if rule.sink_H is not None:
            logsum = score.logsumexp(dim=-1, keepdim=True)
            weight = weight * without_sink(logsum, sinks_of(rule.sink_H, num_rows, num_heads))
        out = torch.bmm(weight.to(value.dtype), value)
        return out.view(num_rows, -1, out.shape[-1]).transpose(0, 1)[None].to(query_BHTD.dtype)

    def _rows(self, num_heads: int) -> CachedRows:
        """Return the rows of the block for FlashAttention."""
        if num_heads not in self._flash_rows:
            self._flash_rows[num_heads] = cached_rows(self._position_B + 1, num_heads, self._block.length)
        return self._flash_rows[num_heads]

    def _place(self, num_heads: int) -> Tensor:
        if num_heads not in self._places:
            self._places[num_heads] = slots_in(self._block, self._position_B, num_heads)
        return self._places[num_heads]

    def _bias(self, window: int | None, num_heads: int) -> Tensor:
        """Return the bias that hides unused slots, (B*K, 1, S)."""
        key = (window, num_heads)
        if key not in self._biases:
            slot_S = torch.arange(self._block.length, device=self._position_B.device)
            back_BS = self._position_B[:, None] - slot_S
            hidden_BS = ~((back_BS >= 0) & within(back_BS, window))
            dtype = self._block.shape.dtype
            bias_BS = torch.zeros(hidden_BS.shape, dtype=dtype, device=slot_S.device)
            bias_BS.masked_fill_(hidden_BS, -torch.inf)
            self._biases[key] = bias_BS[:, None].repeat_interleave(num_heads, dim=0)
        return self._biases[key]


def bucket(num_rows: int) -> int:
    """Round a number of rows up to 8, 16, 32, ..."""
    return max(FEWEST_ROWS, 1 << (num_rows - 1).bit_length())


def can_flash(heads: Heads) -> bool:
    """Return True where FlashAttention reads such cached rows: NVIDIA, half precision."""
    return heads.device_type == "cuda" and torch.version.hip is None and not varlen_obstacle([heads])


def reads_exactly(policy: Policy, shape: CacheShape) -> bool:
    """Return True where all layers read cached rows through FlashAttention."""
    is_plain, kind = all(heads.is_plain for heads in policy.heads), shape.device.type
    return all(can_flash(Heads(shape.dtype, kind, each.key_width, each.value_width, is_plain)) for each in shape.layers)


def can_share(policy: Policy, shape: CacheShape) -> bool:
    """Return True where Triton reads prompts of all layers for their groups."""
    if not (policy.compiles and reads_exactly(policy, shape)):
        return False
    queries = policy.causal_lm.config.get_text_config(decoder=True).num_attention_heads
    kinds = {(each.num_heads, queries // each.num_heads, each.key_width) for each in shape.layers}
    return all(computes("cascade", shape.device, shape.dtype, *kind) for kind in kinds)


def _count_to_draw(row: DecodeRow) -> int:
    return row.sampling.max_tokens - len(row.token_ids)


def _most_left(rows: Sequence[DecodeRow]) -> int:
    return max(map(_count_to_draw, rows))


def can_capture(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()


def capture(step: Callable[[], None], pool: Any) -> tuple[Callable[[], None], Any]:
    """Capture a step; return its launcher and memory pool.

    RuntimeError where a step asks the host for something.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()
    return graph.replay, graph.pool()
