"""The cache: two rectangles within one budget."""

from dataclasses import replace

import pytest
import torch

from covey.engine.native.cache import Cache, CacheBlock, CacheNeed, CacheShape, HeldShape, LayerShape
from covey.engine.native.rows import SamplingRequest
from covey.types import Sampling

SHAPE = CacheShape((LayerShape(2, 4, 4), LayerShape(1, 8, 4)), torch.float32, torch.device("cpu"))
SLOT_BYTES = 4 * (2 * 8 + 12)


def marked(num_holders: int, length: int) -> CacheBlock:
    """A block in which every slot holds 100 * holder + slot."""
    block = CacheBlock(SHAPE)
    block.resize(num_holders, length)
    mark = 100 * torch.arange(num_holders)[:, None] + torch.arange(length)
    for tensor in (*block.keys, *block.values):
        tensor[:] = mark[:, None, :, None]
    return block


def test_a_slot_costs_keys_and_values_of_all_layers() -> None:
    assert SHAPE.slot_bytes == SLOT_BYTES
    # One tensor (at most 8 numbers wide a slot) exists twice while it is resized.
    assert SHAPE.max_slots(10 * (SLOT_BYTES + 4 * 8)) == 10


def test_resizing_keeps_what_lies_in_both_rectangles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the memory held before, what is new holds 0: a masked NaN would still be one."""
    empty = CacheBlock._empty
    monkeypatch.setattr(CacheBlock, "_empty", lambda *given: empty(*given).fill_(torch.nan))
    block = marked(3, 5)
    block.resize(2, 7)
    for tensor in (*block.keys, *block.values):
        assert tensor.shape[::2] == (2, 7)
        assert tensor[1, 0, :, 0].tolist() == [100, 101, 102, 103, 104, 0, 0]
    block.resize(3, 7)
    assert not any(bool(tensor[2].any()) for tensor in (*block.keys, *block.values))


def test_moving_copies_whole_holders() -> None:
    block = marked(4, 3)
    block.move([(3, 0), (2, 1)], length=2)
    for tensor in (*block.keys, *block.values):
        assert tensor[:2, -1, :, -1].tolist() == [[300, 301, 2], [200, 201, 102]]


def test_rows_grow_up_to_their_reservation_and_memory_is_given_back() -> None:
    cache = Cache(SHAPE, max_slots=10_000)
    lengths = []
    for longest_row in (1, 16, 17, 64, 80, 90):
        cache.fit(CacheNeed(num_groups=1, longest_prompt=6, num_rows=4, longest_row=longest_row, reserved=100))
        lengths.append(cache.rows.length)
    assert lengths == [16, 16, 32, 79, 99, 99]
    assert cache.num_bytes == (6 + 396) * SLOT_BYTES
    cache.drop()
    assert cache.num_bytes == 0


def test_blocks_become_shorter_when_what_was_long_has_left() -> None:
    cache = Cache(SHAPE, max_slots=10_000)
    cache.fit(CacheNeed(num_groups=2, longest_prompt=200, num_rows=4, longest_row=300, reserved=400))
    cache.fit(CacheNeed(num_groups=2, longest_prompt=20, num_rows=4, longest_row=30, reserved=400))
    assert (cache.prompts.length, cache.rows.length) == (20, 45)


def test_a_tight_budget_is_met_by_giving_up_idle_holders() -> None:
    cache = Cache(SHAPE, max_slots=1000)
    cache.fit(CacheNeed(num_groups=1, longest_prompt=40, num_rows=9, longest_row=100, reserved=100))
    cache.fit(CacheNeed(num_groups=5, longest_prompt=40, num_rows=6, longest_row=80, reserved=100))
    assert (cache.prompts.num_holders, cache.prompts.length) == (5, 40)
    assert (cache.rows.num_holders, cache.rows.length) == (6, 100)


def test_bytes_stay_within_the_budget_while_one_block_shrinks_and_the_other_grows() -> None:
    max_slots = 1000
    cache = Cache(SHAPE, max_slots)
    few_long_rows = CacheNeed(num_groups=1, longest_prompt=10, num_rows=9, longest_row=100, reserved=110)
    many_prompts = CacheNeed(num_groups=9, longest_prompt=100, num_rows=1, longest_row=1, reserved=100)
    for need in (few_long_rows, many_prompts, few_long_rows):
        cache.fit(need)
        assert cache.num_bytes <= max_slots * SLOT_BYTES
    assert (cache.prompts.num_holders, cache.rows.num_holders) == (1, 9)
    assert cache.peak_bytes <= max_slots * (SLOT_BYTES + 4 * 8)


def test_a_kept_session_counts_the_slots_of_its_state_too() -> None:
    held = HeldShape(place=0, is_input=False, size=(30,), dtype=torch.float32)
    shape = replace(SHAPE, held=(held,))  # 120 bytes, at 112 a slot
    request = SamplingRequest((1,), 2, Sampling(max_tokens=8), frozenset(), str, version=0)
    first, second = request.new_row(0), request.new_row(1)
    cache = Cache(shape, max_slots=100)
    cache.fit(CacheNeed(num_groups=1, longest_prompt=4, num_rows=2, longest_row=8, reserved=8))
    counts = []
    for row, length in ((first, 3), (second, 2)):
        cache.keep(row, slot=0, first=0, length=length)
        counts.append(cache.kept_slots)
    cache.keep_only([second])
    counts.append(cache.kept_slots)
    cache.put_back(second, slot=0, first=0)
    assert [shape.state_slots, *counts, cache.kept_slots] == [2, 5, 9, 4, 0]


def test_what_sessions_keep_counts_until_it_is_put_back_or_let_go_of() -> None:
    request = SamplingRequest((1,), 2, Sampling(max_tokens=8), frozenset(), str, version=0)
    first, second = request.new_row(0), request.new_row(1)
    cache = Cache(SHAPE, max_slots=100)
    cache.fit(CacheNeed(num_groups=1, longest_prompt=4, num_rows=2, longest_row=8, reserved=8))
    cache.rows = marked(2, 8)
    cache.keep(first, slot=0, first=1, length=3)
    cache.keep(second, slot=1, first=0, length=2)
    assert (cache.kept_slots, cache.num_slots) == (5, 4 + 16 + 5)
    cache.put_back(first, slot=1, first=4)
    assert cache.rows.keys[0][1, 0, :, 0].tolist() == [100, 101, 102, 103, 1, 2, 3, 107]
    assert cache.kept_slots == 2
    cache.keep_only(())
    assert cache.kept_slots == 0
