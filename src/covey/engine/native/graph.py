"""Decoding on a GPU by CUDA graphs.

Rows are a static block, each with its prompt's keys and values before its own. Newest tokens, lengths and finished
flags are tensors that a step updates in place, so that CUDA captures a step as a graph for each number of rows (8, 16,
32, ...) and length of the block. Rows that finish between two looks, and padding rows, idle.

On a CPU the same code runs uncaptured. The draw is a pure function of row and position (`sampling.random_uniform`), so
rollouts do not depend on when the host looks.

Shapes: B rows of the block in use, R of them with a completion, K key/value heads, Q query heads of each, S slots.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from covey.engine.native.cache import Cache, CacheBlock, CacheNeed, CacheShape
from covey.engine.native.layouts import sinks_of, slots_in, write_tokens
from covey.engine.native.models import joined
from covey.engine.native.rows import DecodeRow
from covey.engine.native.runner import Runner, Sampled, on_host
from covey.engine.native.scheduler import Scheduler
from covey.policy.attention.base import Heads, Rule, apply_softcap, within, without_sink
from covey.policy.attention.choice import varlen_obstacle
from covey.policy.attention.varlen import CachedRows, cached_rows, flash_rows
from covey.policy.kernels.gpu.inductor import compile_once
from covey.policy.policy import Policy, to_device
from covey.policy.sampling import (
    Distribution,
    SampleAlike,
    partition,
    random_uniform,
    sample,
    sample_compiled,
    sample_same_params,
)

LOGGER = logging.getLogger(__name__)
LOOK_EVERY = 8
"""Steps between two looks of the host."""
FEWEST_ROWS = 8
SLOT_UNIT = 256
"""Growth of rows where attention reads idle slots too; every growth is another capture."""
NOBODY = -1
"""Stands for a stop token where the policy has none; never drawn."""


def is_wanted(policy: Policy) -> bool:
    """Return True on GPUs."""
    return policy.device.type == "cuda"


class GraphRunner(Runner):
    """Draws several tokens of every row between two looks of the host."""

    holds_prompts = True

    def __init__(self, policy: Policy, cache: Cache) -> None:
        super().__init__(policy, cache, is_compiled=False)
        self._sample_alike = sample_compiled if joined.is_wanted(policy) else sample_same_params
        self._states: dict[int, RowState] = {}
        """Row states by number of rows: graphs read and write these very tensors."""
        self._written: tuple[int, int] | None = None
        """Number of rows of the state that is up to date, and the changes of the scheduler it has seen."""
        self._parts: list[tuple[Distribution, Tensor | None]] = []
        self._graphs: dict[tuple[int, Distribution], Callable[[], None]] = {}
        self._pool: Any = None
        """Memory pool of the graphs' intermediate values: one for all, since one graph runs at a time."""
        self._captures = can_capture(policy.device)
        self._reads_idle = not reads_exactly(policy, cache.shape)
        """Whether attention reads slots that are not in use yet."""

    def fit(self, scheduler: Scheduler) -> None:
        """Make room for all rows and prompts up to the next look."""
        length = self._length(scheduler)
        num_groups, longest_prompt = len(scheduler.groups), scheduler.longest_prompt
        num_rows = bucket(len(scheduler.rows))
        if num_rows * scheduler.row_slots + num_groups * longest_prompt + self.cache.kept_slots > self.cache.max_slots:
            num_rows = len(scheduler.rows)
        before = self.cache.rows.keys[0]
        self.cache.fit(CacheNeed(num_groups, longest_prompt, num_rows, length, length))
        self._forget_graphs_of_another(before)

    def _length(self, scheduler: Scheduler) -> int:
        """Return each row's slots: its maximum, or up to the next look."""
        if not self._reads_idle and not any(request.sessions for request in scheduler.groups):
            return scheduler.row_slots
        longest = max((self._count_cached(row) for row in scheduler.rows), default=0) + 1 + LOOK_EVERY
        return min(scheduler.row_slots, -(-longest // SLOT_UNIT) * SLOT_UNIT)

    def _shrink(self, scheduler: Scheduler) -> None:
        longest = max((self._count_cached(row) for row in scheduler.rows), default=0)
        before = self.cache.rows.keys[0]
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

    def decode(self, scheduler: Scheduler, most: int) -> list[Sampled]:
        """Draw up to `most` tokens of every row, waiting once."""
        rows = scheduler.rows
        self.fit(scheduler)
        state = self._place_state(scheduler)
        steps = min(most, LOOK_EVERY, max(row.sampling.max_tokens - len(row.token_ids) for row in rows))
        state.count_1.zero_()
        for _ in range(steps):
            self._launch(state)
        found = torch.stack((state.token_SB.to(torch.float64), state.logprob_SB))[:, :steps, : len(rows)].tolist()
        return [on_host(token_ids, logprobs) for token_ids, logprobs in zip(*found, strict=True)]

    def drop(self) -> None:
        """Release the memory, graphs included."""
        self._forget_graphs()
        self._states.clear()
        self._written = None
        super().drop()

    def _place_state(self, scheduler: Scheduler) -> "RowState":
        """Return the state on the device, rewritten where rows changed."""
        rows, num_rows = scheduler.rows, min(bucket(len(scheduler.rows)), self.cache.rows.num_holders)
        state = self._states.setdefault(num_rows, RowState(num_rows, self._policy))
        if self._written != (num_rows, scheduler.changes):
            state.write(rows)
            samplings = [row.sampling for row in rows]
            self._parts = partition(samplings + samplings[:1] * (num_rows - len(rows)), self._policy.device)
            self._written = (num_rows, scheduler.changes)
        return state

    def _launch(self, state: "RowState") -> None:
        """Run a step; repeats with one distribution run as a graph."""
        parts, place = self._parts, (state.num_rows, self._parts[0][0])
        if place in self._graphs:
            self._graphs[place]()
            return
        one_step(self._policy, self.cache.rows, state, parts, self._sample_alike)
        if not self._captures or len(parts) > 1:
            return
        block = self.cache.rows
        try:
            again = partial(one_step, self._policy, block, state, parts, self._sample_alike)
            self._graphs[place], self._pool = capture(again, self._pool)
        except RuntimeError as error:  # an operation that the host must wait for, as some architectures have
            self._captures = False
            LOGGER.warning(
                "CUDA graph capture is disabled, so decoding is slower: %s", str(error).strip().splitlines()[0]
            )

    def _forget_graphs_of_another(self, keys: Tensor) -> None:
        """Drop the graphs of a block that has been replaced."""
        if self.cache.rows.keys[0] is not keys:
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


def one_step(
    policy: Policy,
    block: CacheBlock,
    state: RowState,
    parts: Sequence[tuple[Distribution, Tensor | None]],
    alike: SampleAlike = sample_same_params,
) -> None:
    """Feed every row its newest token and draw the next."""
    position_B = state.prompt_B + state.length_B - 1
    layout = RowLayout(block, position_B)
    logits_BV = policy.logits(state.newest_B[None], position_B[None], layout)
    uniform_B = (compile_once(random_uniform) if alike is sample_compiled else random_uniform)(
        state.key_B, state.length_B
    )
    token_B, logprob_B = sample(logits_BV, parts, uniform_B, alike)
    state.token_SB.index_copy_(0, state.count_1, token_B[None])
    state.logprob_SB.index_copy_(0, state.count_1, logprob_B[None].to(torch.float64))
    state.count_1.add_(1)
    # Finished rows stand still
    state.newest_B.copy_(torch.where(state.finished_B > 0, state.newest_B, token_B))
    state.length_B.add_(1 - state.finished_B)
    is_last_B = (token_B[:, None] == state.stop_N).any(dim=1) | (state.length_B >= state.limit_B)
    state.finished_B.bitwise_or_(is_last_B)


class RowLayout:
    """One token per row, stored behind the row's prompt.

    A token's position is its slot.
    """

    def __init__(self, block: CacheBlock, position_B: Tensor) -> None:
        self._block = block
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


def can_capture(device: torch.device) -> bool:
    """Return True on a device that captures graphs."""
    return device.type == "cuda" and torch.cuda.is_available()


def capture(step: Callable[[], None], pool: Any) -> tuple[Callable[[], None], Any]:
    """Capture a step; return its launcher and memory pool.

    RuntimeError where a step asks the host for something.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()
    return graph.replay, graph.pool()
