"""Attention over packed streams: trees of segments in few operations.

A segment sees all that it continues and none of its siblings. Segments of similar size are attended together as one
rectangular block; the blocks are chosen once per micro-batch, not per layer.

Shapes: H query heads, K key/value heads, T tokens of the stream, D head width; R segments of a block, Q tokens of the
longest of them, P tokens before each of them.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from covey.policy.attention.base import Rule, causal_attention
from covey.policy.policy import to_device


@dataclass(frozen=True, slots=True, eq=False)
class StreamSegment:
    """Consecutive tokens, causal among themselves, that see all they continue."""

    start: int
    length: int
    """Length in tokens, at least one."""
    parent: "StreamSegment | None" = None
    """Segment that it continues; None where it begins a sequence."""

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """Return (start, length) of the visible tokens, in the sequence's order."""
        found = [(self.start, self.length)]
        before = self.parent
        while before is not None:
            found.append((before.start, before.length))
            before = before.parent
        return found[::-1]


def star(start: int, length: int, branch_lengths: Sequence[int] = ()) -> Iterator[StreamSegment]:
    """Yield a segment and its branches, without empty ones.

    >>> [(each.start, each.length, each.parent is None) for each in star(0, 3, (2, 1))]
    [(0, 3, True), (3, 2, False), (5, 1, False)]
    """
    root = StreamSegment(start, length) if length else None
    if root is not None:
        yield root
    start += length
    for own in branch_lengths:
        if own:
            yield StreamSegment(start, own, root)
        start += own


@dataclass(frozen=True, slots=True)
class SegmentBlock:
    """Segments with equally many tokens before them, padded to the longest."""

    query_RQ: Tensor
    """Positions in the stream; padding repeats position 0."""
    prefix_RP: Tensor

    def attend(self, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        """Return the outputs of all positions, padding included: (1, H, R*Q, D)."""
        query_RHQD = take(query_BHTD, self.query_RQ)
        rows_RS = torch.cat([self.prefix_RP, self.query_RQ], dim=1)
        out_RHQD = causal_attention(query_RHQD, take(key_BKTD, rows_RS), take(value_BKTD, rows_RS), rule)
        return out_RHQD.transpose(0, 1).flatten(1, 2)[None]


class AnyBlock(Protocol):
    def attend(self, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        """Return the outputs of all positions, padding included: (1, H, R*Q, D)."""


@dataclass(frozen=True, slots=True)
class BlocksLayout:
    """One stream (B = 1), attended block by block."""

    blocks: tuple[AnyBlock, ...]
    order_T: Tensor
    """Place of each token of the stream among the outputs of all blocks."""

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        outputs = [block.attend(query_BHTD, key_BKTD, value_BKTD, rule) for block in self.blocks]
        return torch.cat(outputs, dim=2).index_select(2, self.order_T)


class PackedLayout(BlocksLayout):
    """Segments that see only themselves and the tokens they continue."""


def packed_layout(segments: Sequence[StreamSegment], device: torch.device) -> PackedLayout:
    """Return the layout of a stream of these segments, in order."""
    buckets: dict[tuple[int, int], list[tuple[StreamSegment, np.ndarray]]] = defaultdict(list)
    for segment in segments:
        places = places_of(segment.stretches[:-1])
        buckets[len(places), segment.length.bit_length()].append((segment, places))
    padded, order_T = in_rectangles([[segment for segment, _ in bucket] for bucket in buckets.values()])
    blocks = []
    for (query_RQ, _), bucket in zip(padded, buckets.values(), strict=True):
        prefix_RP = torch.from_numpy(np.stack([places for _, places in bucket]))
        blocks.append(SegmentBlock(to_device(query_RQ, device), to_device(prefix_RP, device)))
    return PackedLayout(tuple(blocks), to_device(order_T, device))


def in_rectangles(buckets: Collection[Sequence[StreamSegment]]) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Return the buckets as rectangles, and each token's place in them.

    A rectangle is (R, Q) positions in the stream, 0 on padding, with a mask of real ones.
    """
    order_T = torch.empty(sum(segment.length for bucket in buckets for segment in bucket), dtype=torch.int64)
    rectangles, num_places = [], 0
    for bucket in buckets:
        start_R1, length_R1 = torch.tensor([(s.start, s.length) for s in bucket])[..., None].unbind(1)
        place_Q = torch.arange(int(length_R1.max()))
        real_RQ = place_Q < length_R1
        position_RQ = (start_R1 + place_Q).where(real_RQ, 0)
        rectangles.append((position_RQ, real_RQ))
        order_T[position_RQ[real_RQ]] = num_places + real_RQ.flatten().nonzero()[:, 0]
        num_places += real_RQ.numel()
    return rectangles, order_T


def places_of(stretches: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return all positions of the stretches (start, length), int64."""
    pieces = [np.arange(start, start + length) for start, length in stretches]
    return np.concatenate([np.empty(0, np.int64), *pieces])


def take(values_BHTD: Tensor, positions_RS: Tensor) -> Tensor:
    """Take positions of the stream, (R, H, S, D)."""
    taken = values_BHTD[0].index_select(1, positions_RS.flatten())
    return taken.unflatten(1, positions_RS.shape).transpose(0, 1)
