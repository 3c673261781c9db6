"""Layouts of masked policies: bidirectional attention within an input, none across inputs.

Shapes: B sequences, H query heads, K key/value heads, T tokens, D head width; R inputs of a block, Q tokens of the
longest of them.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from covey.policy.attention.base import Rule, masked_attention, within
from covey.policy.attention.packed import BlocksLayout, StreamSegment, in_rectangles, take
from covey.policy.policy import to_device


def bidirectional_attention(
    query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule, real_BT: Tensor | None = None
) -> Tensor:
    """Attend to all real positions, within the window on either side."""
    mask = None if real_BT is None else real_BT[:, None, None, :]
    if rule.window is not None:
        position_T = torch.arange(query_BHTD.shape[-2], device=query_BHTD.device)
        distance_TT = (position_T[:, None] - position_T[None, :]).abs()
        near_TT = within(distance_TT, rule.window)
        # Padding that no real token is near to sees itself: a softmax over nothing is no number.
        mask = near_TT if mask is None else (mask & near_TT) | (distance_TT == 0)
    return masked_attention(query_BHTD, key_BKTD, value_BKTD, rule, mask)


@dataclass(frozen=True, slots=True)
class WholeLayout:
    """One input per sequence; `real_BT` is False on padding, None without padding."""

    real_BT: Tensor | None = None

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        return bidirectional_attention(query_BHTD, key_BKTD, value_BKTD, rule, self.real_BT)


WHOLE = WholeLayout()


@dataclass(frozen=True, slots=True)
class InputBlock:
    """Inputs of similar length, padded on the right to the longest."""

    token_RQ: Tensor
    """Positions in the stream; padding repeats position 0."""
    real_RQ: Tensor | None
    """False on padding; None without padding."""

    def attend(self, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        """Return the outputs of all positions, padding included: (1, H, R*Q, D)."""
        query, key, value = (take(values, self.token_RQ) for values in (query_BHTD, key_BKTD, value_BKTD))
        out_RHQD = bidirectional_attention(query, key, value, rule, self.real_RQ)
        return out_RHQD.transpose(0, 1).flatten(1, 2)[None]


class InputsLayout(BlocksLayout):
    """Inputs, one after the other."""


def inputs_layout(lengths: Sequence[int], device: torch.device) -> InputsLayout:
    """Lay out a stream of inputs; lengths within twofold share a block."""
    buckets: dict[int, list[StreamSegment]] = defaultdict(list)
    for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        buckets[length.bit_length()].append(StreamSegment(start, length))
    padded, order_T = in_rectangles(buckets.values())
    blocks = [
        InputBlock(to_device(token_RQ, device), None if bool(real_RQ.all()) else to_device(real_RQ, device))
        for token_RQ, real_RQ in padded
    ]
    return InputsLayout(tuple(blocks), to_device(order_T, device))
