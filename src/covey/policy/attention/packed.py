"""Attention over packed streams: many segments in one sequence, in a few large operations.

A segment is a prefix and branches that continue it. Subsequences of like size are attended together as one rectangular
block; which subsequences form a block is decided once for a micro-batch, not in every layer.

Shapes: H query heads, K key/value heads, T tokens of the stream, D head width; R subsequences of a block, Q tokens of
the longest of them, P tokens of the prefix they share the length of.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.policy.attention.base import Rule, causal_attention


@dataclass(frozen=True, slots=True)
class Segment:
    """A subsequence of the packed stream: a prefix, then branches that each continue it and don't see each other."""

    start: int
    prefix_length: int
    branch_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Subsequence:
    """Consecutive tokens that are causal among themselves and see all of a prefix."""

    start: int
    length: int
    prefix_start: int
    prefix_length: int


@dataclass(frozen=True, slots=True)
class Block:
    """Subsequences with prefixes of one length, padded on the right to the longest; no real token looks right."""

    query_RQ: Tensor
    """Positions in the stream; padding repeats position 0."""
    prefix_RP: Tensor

    def attend(self, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        """Return the outputs of all positions of the block, padding included: (1, H, R * Q, D)."""
        query_RHQD = _take(query_BHTD, self.query_RQ)
        rows_RS = torch.cat([self.prefix_RP, self.query_RQ], dim=1)
        out_RHQD = causal_attention(query_RHQD, _take(key_BKTD, rows_RS), _take(value_BKTD, rows_RS), rule)
        return out_RHQD.transpose(0, 1).flatten(1, 2)[None]


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """One stream (B = 1) of segments; attention never crosses from one to another, nor between branches."""

    blocks: tuple[Block, ...]
    order_T: Tensor
    """For each token of the stream, its place among the outputs of all blocks."""

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        outputs = [block.attend(query_BHTD, key_BKTD, value_BKTD, rule) for block in self.blocks]
        return torch.cat(outputs, dim=2).index_select(2, self.order_T)


def packed_layout(segments: Sequence[Segment], device: torch.device) -> PackedLayout:
    """Return the layout of a stream that consists of these segments, in order."""
    buckets: dict[tuple[int, int], list[Subsequence]] = defaultdict(list)
    for subsequence in (s for segment in segments for s in subsequences_of(segment)):
        buckets[subsequence.prefix_length, subsequence.length.bit_length()].append(subsequence)
    order: dict[int, int] = {}
    blocks = []
    num_outputs = 0
    for subsequences in buckets.values():
        longest = max(subsequence.length for subsequence in subsequences)
        for index, subsequence in enumerate(subsequences):
            first = num_outputs + index * longest
            order.update(
                zip(
                    range(subsequence.start, subsequence.start + subsequence.length),
                    range(first, first + subsequence.length),
                    strict=True,
                )
            )
        num_outputs += len(subsequences) * longest
        blocks.append(_block(subsequences, longest, device))
    places = torch.tensor([order[position] for position in range(len(order))], dtype=torch.int64, device=device)
    return PackedLayout(tuple(blocks), places)


def subsequences_of(segment: Segment) -> list[Subsequence]:
    """Return the prefix and the branches that hold tokens, in order."""
    subsequences = [Subsequence(segment.start, segment.prefix_length, 0, 0)]
    position = segment.start + segment.prefix_length
    for length in segment.branch_lengths:
        if length > 0:
            subsequences.append(Subsequence(position, length, segment.start, segment.prefix_length))
        position += length
    return subsequences


def _block(subsequences: Sequence[Subsequence], longest: int, device: torch.device) -> Block:
    query = [[*range(s.start, s.start + s.length), *[0] * (longest - s.length)] for s in subsequences]
    prefix = [list(range(s.prefix_start, s.prefix_start + s.prefix_length)) for s in subsequences]
    return Block(
        torch.tensor(query, dtype=torch.int64, device=device),
        torch.tensor(prefix, dtype=torch.int64, device=device).reshape(len(subsequences), -1),
    )


def _take(values_BHTD: Tensor, positions_RS: Tensor) -> Tensor:
    """(1, H, T, D) -> (R, H, S, D)."""
    taken = values_BHTD[0].index_select(1, positions_RS.flatten())
    return taken.unflatten(1, positions_RS.shape).transpose(0, 1)
