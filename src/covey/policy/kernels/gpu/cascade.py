"""Decode attention in Triton that reads prompts once for their group.

Cached tokens are cut into chunks. A program attends to a chunk with the queries of all rows that see it, stacked to one
product: a tile of rows to their prompt, or one row to its own tokens. A second kernel merges a row's chunks by their
log-sum-exps (arXiv 2501.01005). A row's numbers depend on the lengths of chunks, not on the rows beside it. Import it
only where there is Triton.

Shapes: R rows, T tiles, W rows of a tile, K key/value heads, Q query heads of each, H = K * Q, S slots, D head width.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from covey.policy.attention.base import Rule

STEP = 64
"""Cached tokens of one product."""


class LayerCache(NamedTuple):
    """Hold one layer's cached tokens, and the rows that read them."""

    keys_NKSD: Tensor
    values_NKSD: Tensor
    row_TW: Tensor
    """int32: rows of each tile, -1 for none."""
    holder_T: Tensor
    """int32: holder that the tile reads, -1 for none."""
    first_T: Tensor
    end_T: Tensor
    """Its tokens that are read, from and up to."""


def attend(
    query_RHD: Tensor, shared: LayerCache, own: LayerCache, prompt_R: Tensor, position_R: Tensor, rule: Rule
) -> Tensor:
    """Return attention to prompts and own tokens, (R, H, D).

    Own tokens stand in slots from `prompt_R` on.
    """
    num_rows, num_heads, width = query_RHD.shape
    query_RHD = query_RHD.contiguous()
    chunk = chunk_of(num_rows * own.keys_NKSD.shape[1])
    counts = [triton.cdiv(cached.keys_NKSD.shape[2], chunk) for cached in (shared, own)]
    part_CRHD = query_RHD.new_empty((sum(counts), num_rows, num_heads, width), dtype=torch.float32)
    logsum_CRH = part_CRHD.new_empty(part_CRHD.shape[:-1])
    wide, first = max(16, triton.next_power_of_2(width)), 0
    for cached, count in zip((shared, own), counts, strict=True):
        keys, values, rows, *tables = cached
        num_keys, slots, tile = keys.shape[1], keys.shape[2], rows.shape[1]
        queries = num_heads // num_keys
        stacked = max(16, triton.next_power_of_2(tile * queries))
        _attend[(len(rows), num_keys, count)](
            *(query_RHD, keys, values, rows, *tables, position_R, part_CRHD[first:], logsum_CRH[first:]),
            *(num_rows, num_keys, slots, rule.scaling),
            *(rule.window or 0, tile, queries, width, wide, stacked, chunk, STEP),
            num_warps=8 if stacked > 64 else 4,
        )
        first += count
    out_RHD = torch.empty_like(query_RHD)
    _merge[(num_rows, num_heads)](
        part_CRHD, logsum_CRH, prompt_R, position_R, out_RHD, num_rows, num_heads, counts[0], chunk, width, wide
    )
    return out_RHD


def chunk_of(num_programs: int) -> int:
    """Return the cached tokens of a program, fewer for few programs."""
    return 512 if num_programs >= 512 else 128


@triton.jit
def _attend(
    query: Any,
    keys: Any,
    values: Any,
    rows: Any,
    holders: Any,
    firsts: Any,
    ends: Any,
    positions: Any,
    parts: Any,
    logsums: Any,
    num_rows: Any,
    num_keys: Any,
    slots: Any,
    scaling: Any,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    STACKED: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    tile, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    holder = tl.load(holders + tile)
    start = tl.load(firsts + tile).to(tl.int32) + chunk * CHUNK
    end = tl.minimum(tl.load(ends + tile).to(tl.int32), start + CHUNK)
    if (holder >= 0) & (start < end):
        line, place = tl.arange(0, STACKED), tl.arange(0, WIDE)
        row = tl.load(rows + tile * TILE + line // QUERIES, mask=line < TILE * QUERIES, other=-1)
        is_row, is_inside = row >= 0, place < WIDTH
        at = tl.load(positions + row, mask=is_row, other=0).to(tl.int32)
        of_query = row.to(tl.int64) * num_keys * QUERIES + head * QUERIES + line % QUERIES
        is_query = is_row[:, None] & is_inside[None, :]
        q = tl.load(query + of_query[:, None] * WIDTH + place[None, :], mask=is_query, other=0.0)
        base = (holder.to(tl.int64) * num_keys + head) * slots * WIDTH
        top = tl.full([STACKED], -float("inf"), tl.float32)
        total = tl.zeros([STACKED], tl.float32)
        out = tl.zeros([STACKED, WIDE], tl.float32)
        for begin in range(start, end, STEP):
            slot = begin + tl.arange(0, STEP)
            is_there = slot < end
            spot = base + slot[:, None] * WIDTH + place[None, :]
            is_read = is_there[:, None] & is_inside[None, :]
            k = tl.load(keys + spot, mask=is_read, other=0.0)
            v = tl.load(values + spot, mask=is_read, other=0.0)
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
            is_seen = is_there[None, :] & (slot[None, :] <= at[:, None])
            if WINDOW > 0:
                is_seen = is_seen & (at[:, None] - slot[None, :] < WINDOW)
            score = tl.where(is_seen, score, -float("inf"))
            higher = tl.maximum(top, tl.max(score, axis=1))
            shift = tl.where(higher == -float("inf"), 0.0, higher)
            weight, shrink = tl.exp(score - shift[:, None]), tl.exp(top - shift)
            total = total * shrink + tl.sum(weight, axis=1)
            out = out * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
            top = higher
        target = chunk.to(tl.int64) * num_rows * num_keys * QUERIES + of_query
        out = out / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(parts + target[:, None] * WIDTH + place[None, :], out, mask=is_query)
        tl.store(logsums + target, tl.where(total > 0, top + tl.log(total), -float("inf")), mask=is_row)


@triton.jit
def _merge(
    parts: Any,
    logsums: Any,
    prompts: Any,
    positions: Any,
    out: Any,
    num_rows: Any,
    num_heads: Any,
    first_own: Any,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    row, head, place = tl.program_id(0), tl.program_id(1), tl.arange(0, WIDE)
    prompt = tl.load(prompts + row).to(tl.int32)
    own = tl.load(positions + row).to(tl.int32) + 1 - prompt
    num_shared = tl.cdiv(prompt, CHUNK)
    top, total, sums = -float("inf"), 0.0, tl.zeros([WIDE], tl.float32)
    for index in range(0, num_shared + tl.cdiv(own, CHUNK)):
        chunk = tl.where(index < num_shared, index, first_own + index - num_shared)
        source = (chunk.to(tl.int64) * num_rows + row) * num_heads + head
        logsum = tl.load(logsums + source)
        part = tl.load(parts + source * WIDTH + place, mask=place < WIDTH, other=0.0)
        higher = tl.maximum(top, logsum)
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        weight, shrink = tl.exp(logsum - shift), tl.exp(top - shift)
        total, sums, top = total * shrink + weight, sums * shrink + part * weight, higher
    target = (row.to(tl.int64) * num_heads + head) * WIDTH + place
    tl.store(out + target, (sums / total).to(out.dtype.element_ty), mask=place < WIDTH)
