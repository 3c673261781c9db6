"""Layouts of masked policies: every token of an input sees every other, and none of another input.

Shapes: B sequences, H query heads, K key/value heads, T tokens, D head width; R inputs of a block, Q tokens of the
longest of them.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.policy.attention.base import Rule, masked_attention, within
from covey.policy.attention.packed import take
from covey.policy.transfer import to_device


def bidirectional_attention(
    query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule, real_BT: Tensor | None = None
) -> Tensor:
    """Let every position see all real ones, within the window of either side if there is one."""
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
    """Every sequence is one input. `real_BT` is False on padding, None where there is none."""

    real_BT: Tensor | None = None

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        return bidirectional_attention(query_BHTD, key_BKTD, value_BKTD, rule, self.real_BT)


WHOLE = WholeLayout()


@dataclass(frozen=True, slots=True)
class Block:
    """Inputs of like length, padded on the right to the longest."""

    token_RQ: Tensor
    """Positions in the stream; padding repeats position 0."""
    real_RQ: Tensor | None
    """False on padding; None where there is none."""

    def attend(self, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        """Return the outputs of all positions of the block, padding included: (1, H, R * Q, D)."""
        query, key, value = (take(values, self.token_RQ) for values in (query_BHTD, key_BKTD, value_BKTD))
        out_RHQD = bidirectional_attention(query, key, value, rule, self.real_RQ)
        return out_RHQD.transpose(0, 1).flatten(1, 2)[None]


@dataclass(frozen=True, slots=True)
class InputsLayout:
    """One stream (B = 1) of inputs, one after the other."""

    blocks: tuple[Block, ...]
    order_T: Tensor
    """For each token of the stream, its place among the outputs of all blocks."""

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        outputs = [block.attend(query_BHTD, key_BKTD, value_BKTD, rule) for block in self.blocks]
        return torch.cat(outputs, dim=2).index_select(2, self.order_T)


def inputs_layout(lengths: Sequence[int], device: torch.device) -> InputsLayout:
    """Lay out a stream of inputs of these lengths, in order.

    Lengths within a factor of two share a block.
    """
    # Inputs of similar length share a block, padded to its longest
    buckets: dict[int, list[range]] = defaultdict(list)
    start = 0
    for length in lengths:
        buckets[length.bit_length()].append(range(start, start + length))
        start += length
    # Tokens find their place in the blocks
    order = [0] * start
    blocks, num_outputs = [], 0
    for inputs in buckets.values():
        longest = max(map(len, inputs))
        for index, tokens in enumerate(inputs):
            first = num_outputs + index * longest
            order[tokens.start : tokens.stop] = range(first, first + len(tokens))
        num_outputs += len(inputs) * longest
        blocks.append(_block(inputs, longest, device))
    return InputsLayout(tuple(blocks), to_device(order, device, torch.int64))


def _block(inputs: Sequence[range], longest: int, device: torch.device) -> Block:
    tokens = to_device([[*i, *[0] * (longest - len(i))] for i in inputs], device, torch.int64)
    if all(len(i) == longest for i in inputs):
        return Block(tokens, None)
    length_R1 = to_device([[len(i)] for i in inputs], device)
    return Block(tokens, torch.arange(longest, device=device) < length_R1)
