"""Read trees of segments through a model's own cache.

A shared segment is read once, with gradient; its cache is forked for its continuations. Segments that begin at one
position are read together: those of one length, and leaves, padded on the right: a causal model needs no mask for
that.

Shapes: R segments read together, Q tokens of the longest, T tokens of the stream, C width of what the model returns.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from covey.policy.attention.base import Rule
from covey.policy.models.caches import assign_states, fork_rows

if TYPE_CHECKING:
    from covey.policy.attention.packed import StreamSegment

GENERAL = ("forked", "rows", "alone")
"""Exact computations of a model of the general path: trees through its cache, rows padded right, single texts.

Each can do what stands behind it, too."""
Held = dict[str, object]
"""A cache under the keyword that hands it to the model, {} before the first token."""
Read = Callable[[Tensor, Held, bool], tuple[Tensor, Held]]
"""Reads tokens (R, Q) after a cache; returns the output (R, Q, C) and, if told to keep one, the cache after them."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens that are read in one pass."""

    start: int
    length: int
    children: "list[Stretch]" = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ForkedLayout:
    """Read a stream (B = 1) stretch by stretch.

    Attention is the model's own.
    """

    roots: tuple[Stretch, ...]

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        raise AssertionError("the general path leaves attention to the model")

    def read(self, read: Read, ids_1T: Tensor) -> Tensor:
        """Return the output of all tokens, (1, T, C)."""
        found: dict[int, Tensor] = {}

        def read_rows(stretches: Sequence[Stretch], held: Held, place_R: Sequence[int], keeps: bool) -> Held:
            out_RQC, after = read(_rows(ids_1T[0], stretches), _fork(held, place_R), keeps)
            found.update({each.start: out_QC[: each.length] for each, out_QC in zip(stretches, out_RQC, strict=True)})
            return after

        waiting: list[tuple[Sequence[Stretch], Held, list[int]]] = [(self.roots, {}, [*range(len(self.roots))])]
        while waiting:  # stretches that begin at one position, a cache of what is before them, and its row for each
            stretches, held, rows = waiting.pop()
            for places in _alike(stretches):
                alike, begun = [stretches[place] for place in places], [rows[place] for place in places]
                after = read_rows(alike, held, begun, bool(alike[0].children))
                children = [(child, row) for row, each in enumerate(alike) for child in each.children]
                if children:
                    waiting.append(([child for child, _ in children], after, [row for _, row in children]))
        return torch.cat([found[start] for start in sorted(found)])[None]


def forked_layout(segments: "Sequence[StreamSegment]", device: torch.device) -> ForkedLayout:
    """Return the layout of a stream of these segments, in order."""
    children: dict[StreamSegment | None, list[StreamSegment]] = defaultdict(list)
    for segment in segments:
        children[segment.parent].append(segment)

    def stretch(segment: "StreamSegment") -> Stretch:
        start, length, after = segment.start, segment.length, children[segment]
        while len(after) == 1:  # a sole continuation stands right behind it
            length, after = length + after[0].length, children[after[0]]
        return Stretch(start, length, [stretch(child) for child in after])

    return ForkedLayout(tuple(stretch(root) for root in children[None]))


def _alike(stretches: Sequence[Stretch]) -> list[list[int]]:
    """Return the places of stretches that are read together.

    Continued segments have one length, for states end with the last token; of the others the longest is at most twice
    as long as the shortest.
    """
    groups: list[list[int]] = []
    shortest = (False, 0)
    for has_children, length, place in sorted(
        (bool(each.children), each.length, i) for i, each in enumerate(stretches)
    ):
        if has_children != shortest[0] or length > shortest[1] * (1 if has_children else 2):
            groups.append([])
            shortest = (has_children, length)
        groups[-1].append(place)
    return groups


def _fork(held: Held, place_R: Sequence[int]) -> Held:
    """Fork a cache's rows for several that continue them, which may write."""
    made = {}
    for name, cache in held.items():
        made[name] = fork_rows(cache, torch.tensor(place_R, dtype=torch.int64))
        assign_states(made[name])
    return made


def _rows(ids_T: Tensor, stretches: Sequence[Stretch]) -> Tensor:
    """Return the stretches' tokens, (R, Q), padded with tokens of their own."""
    longest = max(stretch.length for stretch in stretches)
    if not stretches[0].children:
        longest = max(longest, 2)  # kernels for one token overwrite states that the backward pass needs
    place_Q = torch.arange(longest, device=ids_T.device)
    return torch.stack([ids_T[stretch.start + place_Q.where(place_Q < stretch.length, 0)] for stretch in stretches])
