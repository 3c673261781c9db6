"""Forests of segments with inputs of a recurrence or a convolution, and both token by token in float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from covey.policy.attention.packed import StreamSegment
from covey.policy.recurrence.base import Recurrence, segment_rows

Lengths = tuple["int | Lengths", ...]
"""A segment's length and its children, each the same: (5, (3,), (2, (1,)))."""

FOREST: tuple[Lengths, ...] = (
    (5, (3,), (1, (7,), (1,)), (2,)),
    (1, *((1 + place % 3,) for place in range(40))),
    (130, (33, (1,), (70, (2,), (64,))), (32,)),
    (67,),
    (1,),
)
"""Three levels, segments of one token, 40 siblings, and lengths beside multiples of every chunk."""


@dataclass(frozen=True)
class Kind:
    """Shapes of a layer, and what it has."""

    key_heads: int = 2
    shared: int = 1
    key_width: int = 16
    value_width: int = 16
    by_channel: bool = False
    has_beta: bool = True


KINDS = (
    Kind(),
    Kind(key_heads=1, shared=4, key_width=24, value_width=32),
    Kind(by_channel=True),
    Kind(shared=4, key_width=8, value_width=48, has_beta=False),
    Kind(key_width=40, by_channel=True, has_beta=False),
    Kind(shared=2, key_width=64, value_width=128),
    Kind(key_heads=16, shared=4, key_width=8),
)


def forest(lengths: Sequence[Lengths]) -> Tensor:
    """Return the rows of these trees, parents before children, in the order of their tokens."""
    segments: list[StreamSegment] = []

    def add(tree: Lengths, parent: StreamSegment | None) -> None:
        start = segments[-1].start + segments[-1].length if segments else 0
        segments.append(StreamSegment(start, tree[0], parent))
        own = segments[-1]
        for child in tree[1:]:
            add(child, own)

    for tree in lengths:
        add(tree, None)
    return segment_rows(segments)


def drawn(kind: Kind, num_tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Recurrence:
    """Return keys of length 1, queries shorter by the root of their width, and decays from 0.01 to almost 1."""
    draw, heads = torch.Generator().manual_seed(seed), kind.key_heads * kind.shared
    query, key = torch.randn(2, num_tokens, kind.key_heads, kind.key_width, generator=draw).double()
    width = kind.key_width if kind.by_channel else 1
    rate = torch.randn(num_tokens, heads, width, generator=draw).double()
    beta = torch.rand(num_tokens, heads, generator=draw).to(dtype) if kind.has_beta else None
    return Recurrence(
        (torch.nn.functional.normalize(query, dim=-1) * kind.key_width**-0.5).to(dtype),
        torch.nn.functional.normalize(key, dim=-1).to(dtype),
        torch.randn(num_tokens, heads, kind.value_width, generator=draw).to(dtype),
        (-(rate - 1.5).exp()).to(dtype),
        beta,
    )


def tensors(given: Recurrence) -> list[Tensor]:
    """Return all inputs that there are."""
    return [tensor for field in fields(given) if (tensor := getattr(given, field.name)) is not None]


def with_tensors(given: Recurrence, inputs: Sequence[Tensor]) -> Recurrence:
    """Return the same recurrence of other inputs."""
    return Recurrence(*inputs, *([] if given.beta_TH is not None else [None]))


def gradients_of(
    scan: Callable[..., Tensor], given: Recurrence, rows_S3: Tensor, gradient: Tensor, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return the output and the gradients of all inputs."""
    own = [tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in tensors(given)]
    out = scan(with_tensors(given, own), rows_S3)
    return [out.detach(), *torch.autograd.grad(out, own, gradient.to(out.dtype))]


def scan_by_tokens(given: Recurrence, rows_S3: Tensor, before: Sequence[Tensor | None] = ()) -> tuple[Tensor, Tensor]:
    """Return outputs and final states by the formula of base.py; `before` are states of held segments."""
    given = with_tensors(given, [tensor.double() for tensor in tensors(given)])
    shared = given.value_THP.shape[1] // given.key_TKN.shape[1]
    query, key = (x.repeat_interleave(shared, 1) for x in (given.query_TKN, given.key_TKN))
    outs, finals = [None] * len(query), []
    for place, (start, length, parent) in enumerate(rows_S3.tolist()):
        held = before[place] if before else None
        state = finals[parent] if parent >= 0 else query.new_zeros(*key.shape[1:], given.value_THP.shape[2])
        state = state if held is None else held.double()
        for t in range(start, start + length):
            state = given.decay_THX[t].exp()[..., None] * state
            value = given.value_THP[t]
            if given.beta_TH is not None:
                value = given.beta_TH[t][:, None] * (value - torch.einsum("hnp,hn->hp", state, key[t]))
            state = state + key[t][..., None] * value[:, None]
            outs[t] = torch.einsum("hnp,hn->hp", state, query[t])
        finals.append(state)
    return torch.stack(outs), torch.stack(finals)


def convolve_by_tokens(
    x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, rows_S3: Tensor, before: Sequence[Tensor | None] = ()
) -> tuple[Tensor, Tensor]:
    """Return outputs and last W - 1 inputs of each segment; `before` are those of held segments."""
    x_TC, weight_CW, width = x_TC.double(), weight_CW.double(), weight_CW.shape[1]
    outs, seen = [None] * len(x_TC), []
    for place, (start, length, parent) in enumerate(rows_S3.tolist()):
        held = before[place] if before else None
        line = list(seen[parent]) if parent >= 0 else [torch.zeros_like(x_TC[0])] * (width - 1)
        line = line if held is None else list(held.double())
        for t in range(start, start + length):
            line = [*line, x_TC[t]]
            outs[t] = sum(weight_CW[:, w] * line[w - width] for w in range(width)) + (0 if bias_C is None else bias_C)
        seen.append(line[len(line) - width + 1 :])
    return torch.stack(outs), torch.stack([torch.stack(each) if each else x_TC[:0] for each in seen])


def farthest(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest distance of two tensors relative to the expected one's length."""
    pairs = [(got.detach().double(), want.detach()) for got, want in zip(found, expected, strict=True)]
    return max(float((got - want).norm() / want.norm()) for got, want in pairs)


def with_decay(given: Recurrence, decay_THX: Tensor) -> Recurrence:
    """Return the same recurrence with another decay."""
    return replace(given, decay_THX=decay_THX)
