"""Packed streams through FlexAttention: one call over the whole stream, whose mask skips what nobody sees.

Nothing is gathered and nothing repeated, unlike in the blocks of `packing`; only the end of the stream is padded, so
that streams of like length have one shape and share what torch.compile made. For GPUs: on a CPU FlexAttention has no
compiled backward, and uncompiled it computes all T x T scores.

Shapes: H query heads, K key/value heads, T tokens of the stream, S the same with padding, D head width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from covey.policy.attention.base import Rule
from covey.policy.attention.packed import Segment

MIN_STEP = 128
"""Streams are padded to multiples of this at least, the side of a block of the mask."""
STEPS_AN_OCTAVE = 8
"""Different padded lengths between one power of two and the next; padding adds an eighth at most."""


@dataclass(slots=True)
class FlexLayout:
    """One stream (B = 1) of segments. Who sees whom is the same as in `packing.PackedLayout`."""

    num_tokens: int
    segment_S: Tensor
    """Which segment a token belongs to; -1 in the padding."""
    branch_S: Tensor
    """0 in the prefix of a segment, then 1, 2, .. ."""
    position_S: Tensor
    """Place within prefix and branch."""
    _masks: dict[int | None, BlockMask] = field(default_factory=dict)

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        mask = self._mask(rule.window)
        missing = len(self.segment_S) - self.num_tokens
        padded = [F.pad(tensor, (0, 0, 0, missing)) for tensor in (query_BHTD, key_BKTD, value_BKTD)]
        grouped = query_BHTD.shape[1] != key_BKTD.shape[1]
        attend, _ = kernels(query_BHTD.device.type)
        out_BHSD: Tensor = attend(*padded, block_mask=mask, scale=rule.scaling, enable_gqa=grouped)
        return out_BHSD[:, :, : self.num_tokens]

    def _mask(self, window: int | None) -> BlockMask:
        if window not in self._masks:
            _, make_mask = kernels(self.segment_S.device.type)
            length = len(self.segment_S)
            self._masks[window] = make_mask(
                self._rule(window), None, None, length, length, device=self.segment_S.device.type
            )
        return self._masks[window]

    def _rule(self, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        segment_S, branch_S, position_S = self.segment_S, self.branch_S, self.position_S

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            own = (branch_S[key] == 0) | (branch_S[key] == branch_S[query])
            seen = (segment_S[key] == segment_S[query]) & own & (key <= query)
            return seen if window is None else seen & (position_S[query] - position_S[key] < window)

        return sees


def flex_layout(segments: Sequence[Segment], device: torch.device) -> FlexLayout:
    """Return the layout of a stream that consists of these segments, in order."""
    rows = [row for index, segment in enumerate(segments) for row in _rows(index, segment)]
    padding = [(-1, 0, 0)] * (padded_length(len(rows)) - len(rows))
    columns = torch.tensor([*rows, *padding], dtype=torch.int32, device=device)
    segment_S, branch_S, position_S = columns.unbind(1)
    return FlexLayout(len(rows), segment_S.contiguous(), branch_S.contiguous(), position_S.contiguous())


def padded_length(num_tokens: int) -> int:
    """Return the next of few lengths.

    >>> [padded_length(n) for n in (1, 128, 1025, 5000)]
    [128, 128, 1152, 5120]
    """
    step = max(MIN_STEP, (1 << max(num_tokens - 1, 1).bit_length() - 1) // STEPS_AN_OCTAVE)
    return -(-num_tokens // step) * step


@lru_cache(maxsize=2)
def kernels(device_type: str) -> tuple[Callable[..., Any], Callable[..., BlockMask]]:
    """Return attention and the maker of its mask, compiled where there is a compiled backward."""
    if device_type != "cuda":
        return flex_attention, create_block_mask
    return torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask, dynamic=False)


def _rows(index: int, segment: Segment) -> list[tuple[int, int, int]]:
    """Return (segment, branch, position) of each token."""
    rows = [(index, 0, position) for position in range(segment.prefix_length)]
    for branch, length in enumerate(segment.branch_lengths, start=1):
        first = segment.prefix_length
        rows += [(index, branch, position) for position in range(first, first + length)]
    return rows
