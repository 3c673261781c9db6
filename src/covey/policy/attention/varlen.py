"""Packed streams through FlashAttention (arXiv 2307.08691) with variable lengths, on a GPU.

Each segment is one sequence of queries; its keys are its own and, gathered, those of the tokens it continues. The
causal mask is aligned at the ends, so there is no mask tensor, no padding, and no shape to compile for. The mask is
that of `packed`.

Shapes: T tokens of the stream, S keys of all sequences, N sequences, H query heads, K key/value heads, D head width.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from covey.policy.attention.base import Rule, within
from covey.policy.attention.packed import StreamSegment, places_of
from covey.policy.policy import to_device

HALF = (torch.bfloat16, torch.float16)
MULTIPLE, MAX_WIDTH = 8, 256
"""Widths of heads that FlashAttention computes."""
LEAST_CAPABILITY = (8, 0)
"""Least compute capability of a GPU: Ampere, as torch's FlashAttention asks for."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The positions of the sequences of one call."""

    query_end_N: Tensor
    """int32 (N + 1), from 0: where the queries of each sequence end."""
    key_end_N: Tensor
    longest_query: int
    longest_key: int


@dataclass(frozen=True, slots=True)
class VarlenLayout:
    """One stream (B = 1) of segments, masked as `packed.PackedLayout`."""

    lengths: Lengths
    key_place_S: Tensor
    """Places in the stream, sequence after sequence: its prefix, then itself."""

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        assert rule.is_plain, "chosen for plain attention"
        query_THD, key_TKD, value_TKD = (heads[0].transpose(0, 1) for heads in (query_BHTD, key_BKTD, value_BKTD))
        key_SKD, value_SKD = (heads.index_select(0, self.key_place_S) for heads in (key_TKD, value_TKD))
        # Under autocast rotary positions leave queries and keys in float32; values are what products are computed in.
        query_THD, key_SKD = query_THD.to(value_SKD.dtype), key_SKD.to(value_SKD.dtype)
        compute = flash if query_THD.device.type == "cuda" else reference
        return compute(query_THD, key_SKD, value_SKD, self.lengths, rule).transpose(0, 1)[None]


def varlen_layout(segments: Sequence[StreamSegment], device: torch.device) -> VarlenLayout:
    """Return the layout of a stream of these segments, in order."""
    places = [torch.from_numpy(places_of(segment.stretches)) for segment in segments]
    own_N = torch.tensor([segment.length for segment in segments])
    seen_N = torch.tensor([len(of_segment) for of_segment in places])
    ends = (torch.nn.functional.pad(lengths_N.cumsum(0), (1, 0)).to(torch.int32) for lengths_N in (own_N, seen_N))
    query_end_N, key_end_N = (to_device(end_N, device) for end_N in ends)
    lengths = Lengths(query_end_N, key_end_N, int(own_N.max()), int(seen_N.max()))
    return VarlenLayout(lengths, to_device(torch.cat(places), device))


def flash(query_THD: Tensor, key_SKD: Tensor, value_SKD: Tensor, lengths: Lengths, rule: Rule) -> Tensor:
    """Return FlashAttention's (T, H, D), causal, aligned at the sequences' ends."""
    from torch.nn.attention.varlen import varlen_attn

    # A rule's window counts the query itself, that of torch does not
    before = -1 if rule.window is None else rule.window - 1
    # torch 2.11 groups heads without being told to
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _parameters() else {}
    out = varlen_attn(
        query_THD,
        key_SKD,
        value_SKD,
        lengths.query_end_N,
        lengths.key_end_N,
        lengths.longest_query,
        lengths.longest_key,
        scale=rule.scaling,
        window_size=(before, 0),
        **grouped,
    )
    assert isinstance(out, Tensor), "nothing else is asked for"
    return out


@dataclass(frozen=True, slots=True)
class CachedRows:
    """Cached keys and values: one sequence per row and key head."""

    query_end_N: Tensor
    """int32 (N + 1), N = R * K, from 0: one token each."""
    first_key_N: Tensor
    """int32 (N + 1): tokens from the cache's first to each sequence's first."""
    length_N: Tensor
    """int32 (N,): cached tokens of each, the newest among them. Slots behind them are not read."""


def cached_rows(length_R: Tensor, num_heads: int, num_slots: int) -> CachedRows:
    """Return the rows of a cache of shape (R, heads, slots, D)."""
    sequence_N = torch.arange(len(length_R) * num_heads + 1, dtype=torch.int32, device=length_R.device)
    length_N = length_R.to(torch.int32)[:, None].expand(-1, num_heads).flatten()
    return CachedRows(sequence_N, sequence_N * num_slots, length_N)


def flash_rows(query_RHD: Tensor, keys_RKSD: Tensor, values_RKSD: Tensor, rows: CachedRows, rule: Rule) -> Tensor:
    """Return FlashAttention's (R, H, D) over cached keys and values, without gradient."""
    num_rows, num_keys, num_slots, width = (*query_RHD.shape[:1], *keys_RKSD.shape[1:])
    query = query_RHD.reshape(num_rows * num_keys, -1, width)
    keys, values = (cached.view(-1, 1, cached.shape[-1]) for cached in (keys_RKSD, values_RKSD))
    before, after = (-1, -1) if rule.window is None else (rule.window - 1, 0)
    # torch's public function takes lengths of cached rows from 2.13 on, this one before that too
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        keys,
        values,
        rows.query_end_N,
        rows.first_key_N,
        1,
        num_slots,
        0.0,
        False,
        False,
        scale=rule.scaling,
        window_size_left=before,
        window_size_right=after,
        seqused_k=rows.length_N,
    )[0]
    return out.reshape(num_rows, -1, out.shape[-1])


def reference(query_THD: Tensor, key_SKD: Tensor, value_SKD: Tensor, lengths: Lengths, rule: Rule) -> Tensor:
    """Compute `flash` in plain operations, sequence by sequence."""
    outputs = []
    queries, keys = (end_N.diff().tolist() for end_N in (lengths.query_end_N, lengths.key_end_N))
    parts = query_THD.split(queries), key_SKD.split(keys), value_SKD.split(keys)
    for query_QHD, key_PKD, value_PKD in zip(*parts, strict=True):
        group = query_QHD.shape[1] // key_PKD.shape[1]
        query_HQD = query_QHD.transpose(0, 1)
        key_HPD, value_HPD = (x.transpose(0, 1).repeat_interleave(group, dim=0) for x in (key_PKD, value_PKD))
        place_P = torch.arange(len(key_PKD), device=query_THD.device)
        back_QP = place_P[len(key_PKD) - len(query_QHD) :, None] - place_P
        hidden_QP = ~((back_QP >= 0) & within(back_QP, rule.window))
        score_HQP = (query_HQD @ key_HPD.mT * rule.scaling).masked_fill(hidden_QP, -torch.inf)
        outputs.append((score_HQP.softmax(dim=-1) @ value_HPD).transpose(0, 1))
    return torch.cat(outputs)


def is_there() -> bool:
    """Return True where torch has the function, windows and scale (2.11+)."""
    return {"window_size", "scale"} <= _parameters()


@cache
def _parameters() -> frozenset[str]:
    """Return the parameter names of torch's function, none where it is missing."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)
