"""Attention over packed streams in C (attention.c), on a CPU.

Branches share the keys of their prefix without a copy. For the backward pass, outputs and one number per query are
kept. Results are the same for any number of threads, and for a segment beside any others in the stream.

Shapes: H query heads, K key/value heads, T tokens of the stream, D head width.
"""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from covey.policy.attention.base import Rule
from covey.policy.attention.packed import PackedLayout, StreamSegment, packed_layout
from covey.policy.kernels.compiler import KERNELS, library, struct_of
from covey.policy.kernels.support import SUPPORT, with_dense_heads

SOURCE = KERNELS / "attention.c"
CHUNK = 256
"""Tokens of a chunk, as in attention.c."""

BACKWARD_CHUNK = 512
"""Branch tokens whose gradients are summed before they are added to the prefix in memory; more where the prefix is
longer."""
NO_WINDOW = 2**40
Strided = struct_of(SOURCE, "Heads")
"""A tensor with its strides by head and token."""
Attention = struct_of(SOURCE, "Attention", Heads=Strided)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Tasks of one pass."""

    rows: Tensor
    """Columns of each chunk: first token, length, first token and length of its prefix, place of its sums over that."""
    partial_tokens: int
    """Room for those sums, in keys."""


@dataclass(frozen=True, slots=True)
class CompiledLayout:
    """One stream (B = 1) of segments, masked as `packed.PackedLayout`."""

    branch_T: Tensor
    """First token of the segment that a token belongs to."""
    forward: Chunks
    backward: Chunks

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        given = (query_BHTD, key_BKTD, value_BKTD)
        assert {tensor.dtype for tensor in given} <= set(SUPPORT["attention"].dtypes), "chosen for other types"
        assert rule.is_plain, "chosen for plain attention"
        out: Tensor = _Attention.apply(*given, self, rule)
        return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: CompiledLayout, rule: Rule) -> Tensor:
        query, key, value = with_dense_heads(query, key, value)
        (out, rounded), log_sum_HT = _sums_like(query, value.dtype), torch.empty(query.shape[1:3], dtype=torch.float32)
        call = _call(layout.forward, layout.branch_T, rule, query, key)
        call.query, call.key, call.value, call.out = map(_make_strided, (query, key, value, out))
        call.log_sum, call.out_rounded = log_sum_HT.data_ptr(), _make_strided(rounded)
        library(SOURCE).covey_attention(ctypes.byref(call))
        ctx.save_for_backward(query, key, value, out, log_sum_HT)
        ctx.layout, ctx.rule = layout, rule
        return out if rounded is None else rounded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum_HT = ctx.saved_tensors
        (out_gradient,) = with_dense_heads(out_gradient)
        chunks: Chunks = ctx.layout.backward
        given = [_sums_like(tensor, tensor.dtype) for tensor in (query, key, value)]
        sums, rounded = zip(*given, strict=True)
        product_HT = torch.empty_like(log_sum_HT)
        partial = log_sum_HT.new_empty(key.shape[1], 2, chunks.partial_tokens, key.shape[3])
        call = _call(chunks, ctx.layout.branch_T, ctx.rule, query, key)
        call.query, call.key, call.value, call.out = map(_make_strided, (query, key, value, out))
        call.out_gradient = _make_strided(out_gradient)
        call.query_gradient, call.key_gradient, call.value_gradient = map(_make_strided, sums)
        call.query_rounded, call.key_rounded, call.value_rounded = map(_make_strided, rounded)
        call.log_sum, call.product, call.partial = log_sum_HT.data_ptr(), product_HT.data_ptr(), partial.data_ptr()
        library(SOURCE).covey_attention_backward(ctypes.byref(call))
        return *(own if near is None else near for own, near in given), None, None


def compiled_layout(segments: Sequence[StreamSegment], device: torch.device) -> CompiledLayout | PackedLayout:
    """Return the layout of these segments: `packed` for nested continuations.

    In attention.c, the tokens before a segment are one stretch.
    """
    assert device.type == "cpu", f"chosen for a CPU only, got {device}"
    if any(segment.parent is not None and segment.parent.parent is not None for segment in segments):
        return packed_layout(segments, device)
    starts_T = np.repeat([segment.start for segment in segments], [segment.length for segment in segments])
    stars = list(_stars(segments))
    return CompiledLayout(
        torch.from_numpy(starts_T),
        _chunks(chunk for star in stars for chunk in _forward_chunks(star)),
        _chunks(chunk for star in stars for chunk in _backward_chunks(star)),
    )


Chunk = tuple[int, int, int, int]
"""First token, length, and the same of the prefix that all of it sees."""


@dataclass(frozen=True, slots=True)
class _Star:
    """A segment and its continuations, adjacent in the stream."""

    start: int
    prefix_length: int
    branch_lengths: tuple[int, ...]


def _stars(segments: Sequence[StreamSegment]) -> Iterator[_Star]:
    root = segments[0]
    branches: list[int] = []
    for segment in segments[1:]:
        if segment.parent is None:
            yield _Star(root.start, root.length, tuple(branches))
            root, branches = segment, []
        else:
            assert segment.parent is root, "segments stand behind what they continue"
            branches.append(segment.length)
    yield _Star(root.start, root.length, tuple(branches))


def _forward_chunks(segment: _Star) -> Iterator[Chunk]:
    """Yield chunks of the prefix, then of all branches."""
    prefix, branches = segment.prefix_length, sum(segment.branch_lengths)
    for first in range(0, prefix, CHUNK):
        yield (segment.start + first, min(CHUNK, prefix - first), segment.start, 0)
    for first in range(0, branches, CHUNK):
        yield (segment.start + prefix + first, min(CHUNK, branches - first), segment.start, prefix)


def _backward_chunks(segment: _Star) -> Iterator[Chunk]:
    """Yield the prefix, then whole branches, of about as many tokens each."""
    yield (segment.start, segment.prefix_length, segment.start, 0)
    start, length = segment.start + segment.prefix_length, 0
    for added in segment.branch_lengths:
        length += added
        if length >= max(BACKWARD_CHUNK, segment.prefix_length):
            yield (start, length, segment.start, segment.prefix_length)
            start, length = start + length, 0
    if length:
        yield (start, length, segment.start, segment.prefix_length)


def _chunks(chunks: Iterable[Chunk]) -> Chunks:
    rows, partial = [], 0
    for chunk in chunks:
        rows.append((*chunk, partial))
        partial += chunk[-1]
    return Chunks(torch.tensor(rows, dtype=torch.int64), partial)


def _call(chunks: Chunks, branch_T: Tensor, rule: Rule, query: Tensor, key: Tensor) -> ctypes.Structure:
    _, num_heads, num_tokens, width = query.shape
    return Attention(
        branch=branch_T.data_ptr(),
        chunks=chunks.rows.data_ptr(),
        num_chunks=len(chunks.rows),
        num_tokens=num_tokens,
        partial_tokens=chunks.partial_tokens,
        num_heads=num_heads,
        queries_per_key=num_heads // key.shape[1],
        width=width,
        window=NO_WINDOW if rule.window is None else rule.window,
        num_threads=torch.get_num_threads(),
        scaling=rule.scaling,
    )


def _make_strided(tensor: Tensor | None) -> ctypes.Structure:
    if tensor is None:
        return Strided()
    return Strided(tensor.data_ptr(), tensor.stride(1), tensor.stride(2), tensor.dtype == torch.bfloat16)


def _sums_like(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return empty float32 sums, and room for them rounded or None."""
    batch, heads, tokens, width = tensor.shape
    sums, *rounded = (
        tensor.new_empty(batch, tokens, heads, width, dtype=kind).transpose(1, 2)
        for kind in dict.fromkeys((torch.float32, dtype))
    )
    return sums, rounded[0] if rounded else None
