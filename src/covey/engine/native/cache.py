"""Keys, values and states of prompts, rows and sessions, within a budget.

Shapes: G groups, R rows, K key/value heads, S slots (cached tokens) of one holder, D head width.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.engine.native.rows import DecodeRow
from covey.engine.native.scheduler import Move
from covey.engine.settings import cache_budget
from covey.policy.policy import to_device
from covey.policy.recurrence.base import States

MIN_GROWTH = 16
"""Slots by which rows grow at least."""
TORCH_GROWTH, COMPILED_GROWTH = 0.25, 1.0
"""Growth of rows as a share of their length: through torch, attention reads idle slots too."""


def budget(cache_bytes: int | None, device: torch.device) -> int:
    """Return the bytes to cache: `cache_bytes`, or a share of free memory."""
    asks_device = cache_bytes is None and device.type == "cuda"
    return cache_budget(cache_bytes, free_bytes(device) if asks_device else None)


def free_bytes(device: torch.device) -> int:
    """Return a GPU's bytes free for this process, torch's unused ones included."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The cached tensors of one layer, per token.

    A layer without attention has no heads.
    """

    num_heads: int
    key_width: int
    value_width: int


@dataclass(frozen=True, slots=True)
class HeldShape:
    """A tensor that each holder has besides, however long its text."""

    place: int
    """Number of the layer among those with a state."""
    is_input: bool
    """Whether these are the newest inputs of a convolution; else the state of a recurrence."""
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The cached tensors of all layers, per token."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device
    held: tuple[HeldShape, ...] = ()

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of a token, at least one."""
        return max(
            1, self.dtype.itemsize * sum(each.num_heads * (each.key_width + each.value_width) for each in self.layers)
        )

    @property
    def state_bytes(self) -> int:
        return sum(held.num_bytes for held in self.held)

    @property
    def state_slots(self) -> int:
        """Return the slots that a holder's states take."""
        return -(-self.state_bytes // self.slot_bytes)

    def max_slots(self, cache_bytes: int) -> int:
        """Return the slots within the budget, even during a resize."""
        widths = [layer.num_heads * max(layer.key_width, layer.value_width) for layer in self.layers]
        return cache_bytes // (self.slot_bytes + self.dtype.itemsize * max(widths, default=0))


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """The slots of the next pass; `reserved` is a row's maximum."""

    num_groups: int
    longest_prompt: int
    num_rows: int
    longest_row: int
    reserved: int


class CacheBlock:
    """A rectangle of slots, holders x length, in every layer."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.num_holders = 0
        self.length = 0
        self.keys = [self._empty(layer.num_heads, layer.key_width) for layer in shape.layers]
        """Keys by layer, (holders, K, length, D)."""
        self.values = [self._empty(layer.num_heads, layer.value_width) for layer in shape.layers]
        self.held = [self._empty_held(held) for held in shape.held]
        """States of each holder, (holders, ...), by `CacheShape.held`."""

    @property
    def num_slots(self) -> int:
        return count_slots(self.shape, self.num_holders, self.length)

    def states(self, read_S: Tensor, write_S: Tensor) -> States:
        """Return the states of layers, read and written by these holders."""
        by_place: tuple[dict[int, Tensor], dict[int, Tensor]] = ({}, {})
        for held, tensor in zip(self.shape.held, self.held, strict=True):
            by_place[held.is_input][held.place] = tensor
        return States(by_place[True], by_place[False], read_S, write_S)

    def resize(self, num_holders: int, length: int) -> int:
        """Resize tensor by tensor, keeping the overlap; return the peak in bytes."""
        holders, kept = min(num_holders, self.num_holders), min(length, self.length)
        held = most = self.num_slots * self.shape.slot_bytes
        self.num_holders, self.length = num_holders, length
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                new = self._empty(old.shape[1], old.shape[3])
                most = max(most, held + new.nbytes)
                held += new.nbytes - old.nbytes
                new[:holders, :, :kept] = old[:holders, :, :kept]
                # Masked slots are multiplied by 0, and 0 times a stray NaN would be NaN.
                new[:holders, :, kept:] = 0.0
                new[holders:] = 0.0
                tensors[layer] = new
        for index, shape in enumerate(self.shape.held):
            old, new = self.held[index], self._empty_held(shape)
            most = max(most, held + new.nbytes)
            held += new.nbytes - old.nbytes
            new[:holders], new[holders:] = old[:holders], 0.0
            self.held[index] = new
        return most

    def move(self, moves: Sequence[Move], length: int) -> None:
        """Copy the first `length` slots of holders to disjoint ones."""
        if not moves:
            return
        pairs = to_device(moves, self.shape.device)
        for tensor in self.held:
            tensor[pairs[:, 1]] = tensor[pairs[:, 0]]
        for tensor in (*self.keys, *self.values):
            used = tensor[:, :, :length]
            used[pairs[:, 1]] = used[pairs[:, 0]]

    def only(self, holder: int) -> "CacheBlock":
        """Return one holder as a block on the same memory."""
        block = CacheBlock(self.shape)
        block.num_holders, block.length = 1, self.length
        block.keys = [tensor[holder : holder + 1] for tensor in self.keys]
        block.values = [tensor[holder : holder + 1] for tensor in self.values]
        block.held = [tensor[holder : holder + 1] for tensor in self.held]
        return block

    def begin_as(self, prompts: "CacheBlock", prompt_R: Sequence[int], first: int) -> None:
        """Give holders from `first` on the states after their prompts."""
        if not self.held:
            return
        source_R = to_device(prompt_R, self.shape.device, torch.int64)
        for own, shared in zip(self.held, prompts.held, strict=True):
            own[first : first + len(prompt_R)] = shared[source_R]

    def _empty(self, num_heads: int, width: int) -> Tensor:
        size = (self.num_holders, num_heads, self.length, width)
        return torch.empty(size, dtype=self.shape.dtype, device=self.shape.device)

    def _empty_held(self, held: HeldShape) -> Tensor:
        return torch.empty((self.num_holders, *held.size), dtype=held.dtype, device=self.shape.device)


def count_slots(shape: CacheShape, num_holders: int, length: int) -> int:
    return num_holders * (length + shape.state_slots)


class Cache:
    """The prompts' and rows' blocks and idle sessions' copies, within max_slots."""

    def __init__(self, shape: CacheShape, max_slots: int, growth: float = TORCH_GROWTH) -> None:
        """Let rows grow by the share `growth` of their length."""
        self.shape = shape
        self.max_slots = max_slots
        self._growth = growth
        self.prompts = CacheBlock(shape)
        self.rows = CacheBlock(shape)
        self.kept: dict[DecodeRow, tuple[int, list[Tensor], list[Tensor]]] = {}
        """Number of a session's own tokens, their keys, then values, by layer, (K, slots, D) each, and its states."""
        self.kept_slots = 0
        """Slots of all of them."""
        self.peak_bytes = 0

    @property
    def num_slots(self) -> int:
        return self.prompts.num_slots + self.rows.num_slots + self.kept_slots

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.shape.slot_bytes

    def one_row(self, group: int, row: int) -> "Cache":
        """Return the cache of one row, on the same memory."""
        alone = Cache(self.shape, self.max_slots, self._growth)
        alone.prompts, alone.rows = self.prompts.only(group), self.rows.only(row)
        return alone

    def keep(self, row: DecodeRow, slot: int, first: int, length: int) -> None:
        """Copy `length` of a row's slots, from `first` on, and its states."""
        tensors = (*self.rows.keys, *self.rows.values)
        own = [tensor[slot, :, first : first + length].clone() for tensor in tensors]
        self.kept[row] = length, own, [tensor[slot].clone() for tensor in self.rows.held]
        self.kept_slots += length + self.shape.state_slots
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def put_back(self, row: DecodeRow, slot: int, first: int) -> None:
        """Restore a row's kept slots from `first` on, and its states."""
        length, own, held = self.kept.pop(row)
        self.kept_slots -= length + self.shape.state_slots
        for target, source in zip((*self.rows.keys, *self.rows.values), own, strict=True):
            target[slot, :, first : first + length] = source
        for target, source in zip(self.rows.held, held, strict=True):
            target[slot] = source

    def keep_only(self, rows: Container[DecodeRow]) -> None:
        """Drop kept slots of other rows."""
        self.kept = {row: kept for row, kept in self.kept.items() if row in rows}
        self.kept_slots = sum(length + self.shape.state_slots for length, _, _ in self.kept.values())

    def fit(self, need: CacheNeed) -> None:
        """Make room for `need`, giving up idle holders if necessary."""
        prompts = _fit_rectangle(self.prompts, need.num_groups, need.longest_prompt, need.longest_prompt)
        longer = need.longest_row + max(MIN_GROWTH, int(self._growth * need.longest_row)) - 1
        rows = _fit_rectangle(self.rows, need.num_rows, need.longest_row, min(need.reserved, longer))
        room = self.max_slots - self.kept_slots
        if self._count(prompts, rows) > room:
            # At most what was reserved, which fits.
            prompts, rows = (need.num_groups, need.longest_prompt), (need.num_rows, min(rows[1], need.reserved))
        assert self._count(prompts, rows) <= room, f"{need} exceeds {room} of {self.max_slots} slots"
        self._resize(prompts, rows)

    def shrink(self, need: CacheNeed) -> None:
        """Release unused memory."""
        self._resize((need.num_groups, need.longest_prompt), (need.num_rows, need.longest_row))

    def drop(self) -> None:
        """Release everything."""
        self.keep_only(())
        for block in (self.prompts, self.rows):
            block.resize(0, 0)

    def _count(self, *rectangles: tuple[int, int]) -> int:
        return sum(count_slots(self.shape, *size) for size in rectangles)

    def _resize(self, prompts: tuple[int, int], rows: tuple[int, int]) -> None:
        blocks = [(self.prompts, prompts), (self.rows, rows)]
        # Blocks that shrink go first, so that the sum stays within the budget in between.
        for block, size in sorted(blocks, key=lambda pair: self._count(pair[1]) - pair[0].num_slots):
            if size != (block.num_holders, block.length):
                others = self.num_bytes - block.num_slots * self.shape.slot_bytes
                self.peak_bytes = max(self.peak_bytes, others + block.resize(*size))


def _fit_rectangle(block: CacheBlock, num_holders: int, length: int, new_length: int) -> tuple[int, int]:
    """Return the rectangle; its length stays unless short or twice too long."""
    if length <= block.length and 2 * new_length >= block.length:
        return max(block.num_holders, num_holders), block.length
    mostly_idle = 2 * num_holders <= block.num_holders
    return num_holders if mostly_idle else max(block.num_holders, num_holders), new_length
