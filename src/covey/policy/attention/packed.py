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
from covey.policy.transfer import to_device


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
    """Subsequences with prefixes of one length, padded on the right to the longest. No real token looks right."""

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
    """One stream (B = 1) of segments. Attention never crosses from one to another, nor between branches."""

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
    order_T = torch.empty(sum(map(num_tokens_of, segments)), dtype=torch.int64)
    blocks = []
    num_outputs = 0
    for subsequences in buckets.values():
        # Take each subsequence's positions, padded to the longest
        facts = [(s.start, s.length, s.prefix_start) for s in subsequences]
        start_R1, length_R1, prefix_R1 = torch.tensor(facts)[..., None].unbind(1)
        place_Q = torch.arange(int(length_R1.max()))
        real_RQ = place_Q < length_R1
        query_RQ = (start_R1 + place_Q).where(real_RQ, 0)
        prefix_RP = prefix_R1 + torch.arange(subsequences[0].prefix_length)
        blocks.append(Block(to_device(query_RQ, device), to_device(prefix_RP, device)))
        # Note where their outputs lie
        output_RQ = num_outputs + torch.arange(query_RQ.numel()).view_as(query_RQ)
        order_T[query_RQ[real_RQ]] = output_RQ[real_RQ]
        num_outputs += query_RQ.numel()
    return PackedLayout(tuple(blocks), to_device(order_T, device))


def num_tokens_of(segment: Segment) -> int:
    """Count the tokens of a segment, prefix and branches."""
    return segment.prefix_length + sum(segment.branch_lengths)


def subsequences_of(segment: Segment) -> list[Subsequence]:
    """Return the prefix and the branches that hold tokens, in order."""
    subsequences = [Subsequence(segment.start, segment.prefix_length, 0, 0)]
    position = segment.start + segment.prefix_length
    for length in segment.branch_lengths:
        if length > 0:
            subsequences.append(Subsequence(position, length, segment.start, segment.prefix_length))
        position += length
    return subsequences


def _take(values_BHTD: Tensor, positions_RS: Tensor) -> Tensor:
    """(1, H, T, D) -> (R, H, S, D)."""
    taken = values_BHTD[0].index_select(1, positions_RS.flatten())
    return taken.unflatten(1, positions_RS.shape).transpose(0, 1)
