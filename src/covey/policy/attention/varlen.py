"""Packed streams through FlashAttention (arXiv 2307.08691) over sequences of any lengths: one call a layer, on a GPU.

Each segment of the stream, such as a prompt or a completion behind it, is one sequence of queries; its keys are those
of what it continues, gathered for it, and its own. The causal mask is aligned at the ends, so there is no mask tensor,
no padding, and no shape that a kernel would be planned or compiled for anew. Who sees whom is the same as in `packed`.

Shapes: T tokens of the stream, S keys of all sequences, N sequences, H query heads, K key/value heads, D head width.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from covey.policy.attention.base import Rule, within
from covey.policy.attention.packed import Segment, places_of
from covey.policy.transfer import to_device

HALF = (torch.bfloat16, torch.float16)
MULTIPLE, MAX_WIDTH = 8, 256
"""Widths of heads that FlashAttention computes."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Where the sequences of one call lie."""

    query_end_N: Tensor
    """int32 (N + 1), from 0: where the queries of each sequence end."""
    key_end_N: Tensor
    longest_query: int
    longest_key: int


@dataclass(frozen=True, slots=True)
class VarlenLayout:
    """One stream (B = 1) of segments. Who sees whom is the same as in `packed.PackedLayout`."""

    lengths: Lengths
    key_place_S: Tensor
    """Places in the stream, sequence after sequence: what it continues, then itself."""

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        assert rule.is_plain, "chosen for plain attention"
        query_THD, key_TKD, value_TKD = (heads[0].transpose(0, 1) for heads in (query_BHTD, key_BKTD, value_BKTD))
        key_SKD, value_SKD = (heads.index_select(0, self.key_place_S) for heads in (key_TKD, value_TKD))
        # Under autocast rotary positions leave queries and keys in float32; values are what products are computed in.
        query_THD, key_SKD = query_THD.to(value_SKD.dtype), key_SKD.to(value_SKD.dtype)
        compute = flash if query_THD.device.type == "cuda" else reference
        return compute(query_THD, key_SKD, value_SKD, self.lengths, rule).transpose(0, 1)[None]


def varlen_layout(segments: Sequence[Segment], device: torch.device) -> VarlenLayout:
    """Return the layout of a stream that consists of these segments, in order."""
    places = [torch.from_numpy(places_of(segment.stretches)) for segment in segments]
    own_N = torch.tensor([segment.length for segment in segments])
    seen_N = torch.tensor([len(of_segment) for of_segment in places])
    ends = (torch.nn.functional.pad(lengths_N.cumsum(0), (1, 0)).to(torch.int32) for lengths_N in (own_N, seen_N))
    query_end_N, key_end_N = (to_device(end_N, device) for end_N in ends)
    lengths = Lengths(query_end_N, key_end_N, int(own_N.max()), int(seen_N.max()))
    return VarlenLayout(lengths, to_device(torch.cat(places), device))


def flash(query_THD: Tensor, key_SKD: Tensor, value_SKD: Tensor, lengths: Lengths, rule: Rule) -> Tensor:
    """Return (T, H, D) from FlashAttention: the last query of each sequence sees its last key, and all before."""
    from torch.nn.attention.varlen import varlen_attn

    # A rule's window counts the query itself, that of torch does not
    before = -1 if rule.window is None else rule.window - 1
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
        enable_gqa=True,
    )
    assert isinstance(out, Tensor), "nothing else is asked for"
    return out


def reference(query_THD: Tensor, key_SKD: Tensor, value_SKD: Tensor, lengths: Lengths, rule: Rule) -> Tensor:
    """Return what `flash` does, in plain operations of any type on any device, one sequence after the other."""
    outputs = []
    queries, keys = (end_N.diff().tolist() for end_N in (lengths.query_end_N, lengths.key_end_N))
    parts = query_THD.split(queries), key_SKD.split(keys), value_SKD.split(keys)
    for query_QHD, key_PKD, value_PKD in zip(*parts, strict=True):
        # Repeat keys and values over grouped queries
        group = query_QHD.shape[1] // key_PKD.shape[1]
        query_HQD = query_QHD.transpose(0, 1)
        key_HPD, value_HPD = (x.transpose(0, 1).repeat_interleave(group, dim=0) for x in (key_PKD, value_PKD))
        # Mask causally, aligned so that the last query sees the last key
        place_P = torch.arange(len(key_PKD), device=query_THD.device)
        back_QP = place_P[len(key_PKD) - len(query_QHD) :, None] - place_P
        hidden_QP = ~((back_QP >= 0) & within(back_QP, rule.window))
        # Softmax attention over the visible keys
        score_HQP = (query_HQD @ key_HPD.mT * rule.scaling).masked_fill(hidden_QP, -torch.inf)
        outputs.append((score_HQP.softmax(dim=-1) @ value_HPD).transpose(0, 1))
    return torch.cat(outputs)


@cache
def is_there() -> bool:
    """Tell whether this torch has the function, with windows and grouped heads (2.11 and later)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()
