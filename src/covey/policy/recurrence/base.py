"""The gated linear recurrence that today's layers with a state share.

Gated DeltaNet (arXiv 2412.06464), Kimi Delta Attention (arXiv 2510.26692) and Mamba 2 (arXiv 2405.21060) are one
formula. With a state S of N x P numbers in each head:

    S_t = a_t S_{t-1} + k_t u_t^T,  o_t = S_t^T q_t,  u_t = v_t  or, with beta,  b_t (v_t - (a_t S_{t-1})^T k_t)

Shapes: T tokens of a stream, S segments, K heads of queries and keys, H heads of values (H / K adjacent ones share one
of K), N key width, P value width, M holders of a state, C channels, W width of a convolution.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from covey.policy.attention.base import DenseLayout, Layout, Rule
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

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return all but beta."""
        return self.query_TKN, self.key_TKN, self.value_THP, self.decay_THX


@dataclass(frozen=True, slots=True)
class Convolution:
    """A causal convolution of each channel by itself, computed in float32."""

    x_TC: Tensor
    weight_CW: Tensor
    bias_C: Tensor | None
    has_silu: bool


@dataclass(frozen=True, slots=True)
class Holders:
    """States that outlive a pass: those of a cache."""

    state_MHNP: Tensor
    """(M, H, N, P), or the newest inputs of a convolution (M, W - 1, C), oldest first."""
    read_S: Tensor
    """Holder of the state before each segment, -1: its parent's, or none."""
    write_S: Tensor
    """Holder that takes the state after each segment, -1: none. It may be the one that is read."""


def segment_rows(segments: Sequence[StreamSegment]) -> Tensor:
    """Return each segment's first token, length and parent's place (S, 3).

    The place of no parent is -1.
    """
    place = {segment: index for index, segment in enumerate(segments)}
    rows = [(each.start, each.length, -1 if each.parent is None else place[each.parent]) for each in segments]
    return torch.tensor(rows, dtype=torch.int64).view(-1, 3)


class Operations(Protocol):
    """Compute both over a forest of segments (S, 3)."""

    def gated_scan(self, given: Recurrence, rows_S3: Tensor, holders: Holders | None) -> Tensor:
        """Return (T, H, P) in float32."""

    def causal_conv(
        self,
        x_TC: Tensor,
        weight_CW: Tensor,
        bias_C: Tensor | None,
        rows_S3: Tensor,
        holders: Holders | None,
        silu: bool,
    ) -> Tensor:
        """Return (T, C) in the type of x."""


class AnyForest(Protocol):
    """Lead layers with a state over a stream."""

    def convolve(self, place: int, given: Convolution, operations: Operations) -> Tensor:
        """Return (T, C); `place` numbers the layers with a state."""

    def recur(self, place: int, given: Recurrence, operations: Operations) -> Tensor:
        """Return (T, H, P)."""


@dataclass(frozen=True, slots=True)
class States:
    """States of a cache by place, and their holders."""

    inputs: Mapping[int, Tensor]
    """Newest inputs of convolutions, (M, W - 1, C) each."""
    states: Mapping[int, Tensor]
    """States of recurrences, (M, H, N, P) each."""
    read_S: Tensor
    """Holders that each segment reads and writes (`Holders`)."""
    write_S: Tensor


@dataclass(frozen=True, slots=True)
class Forest:
    """Segments, and states that outlive the pass, if any."""

    rows_S3: Tensor
    states: States | None = None

    def convolve(self, place: int, given: Convolution, operations: Operations) -> Tensor:
        holders = self._holders(place, of_inputs=True)
        return operations.causal_conv(
            given.x_TC, given.weight_CW, given.bias_C, self.rows_S3, holders, silu=given.has_silu
        )

    def recur(self, place: int, given: Recurrence, operations: Operations) -> Tensor:
        return operations.gated_scan(given, self.rows_S3, self._holders(place, of_inputs=False))

    def _holders(self, place: int, *, of_inputs: bool) -> Holders | None:
        if self.states is None:
            return None
        held = self.states.inputs if of_inputs else self.states.states
        return Holders(held[place], self.states.read_S, self.states.write_S)


@runtime_checkable
class ForestLayout(Protocol):
    """A layout of one stream (B = 1) of segments."""

    @property
    def forest(self) -> AnyForest: ...


def forest_of(layout: Layout, num_rows: int, num_tokens: int) -> AnyForest:
    """Return the layout's forest, or that of B rows of T tokens."""
    if isinstance(layout, ForestLayout):
        return layout.forest
    assert isinstance(layout, DenseLayout), f"{type(layout).__name__} is for models without states"
    return Forest(segment_rows([StreamSegment(row * num_tokens, num_tokens) for row in range(num_rows)]))


@dataclass(frozen=True, slots=True)
class StreamLayout:
    """Attention over a stream, and the segments for layers with a state."""

    attention: Layout
    forest: Forest

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        return self.attention.attend(layer, query_BHTD, key_BKTD, value_BKTD, rule)


def stream_layout(attention: Layout, segments: Sequence[StreamSegment]) -> StreamLayout:
    return StreamLayout(attention, Forest(segment_rows(segments)))
