"""The gated linear recurrence that today's layers with a state share.

Gated DeltaNet (arXiv 2412.06464), Kimi Delta Attention (arXiv 2510.26692) and Mamba 2 (arXiv 2405.21060) are one
formula. With a state S of N x P numbers in each head:

    S_t = a_t S_{t-1} + k_t u_t^T,  o_t = S_t^T q_t,  u_t = v_t  or, with beta,  b_t (v_t - (a_t S_{t-1})^T k_t)

Shapes: T tokens of a stream, S segments, K heads of queries and keys, H heads of values (H / K adjacent ones share one
of K), N key width, P value width, M holders of a state, C channels, W width of a convolution.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.policy.attention.packed import StreamSegment


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Inputs of a layer's recurrence, computed in float32."""

    query_TKN: Tensor
    key_TKN: Tensor
    value_THP: Tensor
    decay_THX: Tensor
    """Logarithms of a_t, at most 0: X is 1, or N for one of each key channel."""
    beta_TH: Tensor | None = None
    """Rate of the delta rule. None: values are added as they are."""


@dataclass(frozen=True, slots=True)
class Holders:
    """States that outlive a pass: those of a cache."""

    state_MHNP: Tensor
    read_S: Tensor
    """Holder of the state before each segment, -1: its parent's, or none."""
    write_S: Tensor
    """Holder that takes the state after each segment, -1: none. It may be the one that is read."""


def segment_rows(segments: Sequence[StreamSegment]) -> Tensor:
    """Return (S, 3): first token, length, and the place of the parent, -1 for none."""
    place = {segment: index for index, segment in enumerate(segments)}
    rows = [(each.start, each.length, -1 if each.parent is None else place[each.parent]) for each in segments]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 3)
