"""Lay rollouts out as token streams: shared, packed, or padded.

Layouts change speed and memory, never the update: every loss token is predicted from the same context.

Common prefixes of a group's sequences are held once, in a tree: their prompt, and the tokens that branches of one
episode share before the history was rewritten. A prompt is always shared. Anything further is split off only where
at least MIN_SHARED tokens are saved: answers that agree by chance in their first words would only cut the stream into
more pieces.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
import torch

from covey.policy.attention.base import DENSE, Layout
from covey.policy.attention.bidirectional import WholeLayout, inputs_layout
from covey.policy.attention.compiled import compiled_layout
from covey.policy.attention.forked import GENERAL, forked_layout
from covey.policy.attention.packed import StreamSegment, packed_layout, places_of
from covey.policy.attention.varlen import varlen_layout
from covey.policy.policy import to_device
from covey.policy.recurrence.base import stream_layout
from covey.types import Rollout


@dataclass(frozen=True, slots=True)
class Row:
    """A trained rollout with the advantage of each loss token."""

    prompt_id: str
    rollout: Rollout
    advantages: tuple[float, ...]
    taught: Rollout | None = None
    """The same answer after what a teacher reads in place of the prompt; None: it reads the prompt."""
    has_teacher: bool = True
    """Whether the teacher judges it, if there is one."""
    is_supervised: bool = False
    """Whether it is a given answer, to learn as it is."""

    @property
    def num_tokens(self) -> int:
        return len(self.rollout.input_ids)

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        return self.rollout.sequences


@dataclass(frozen=True, slots=True)
class Stream:
    """The tokens of a micro-batch on the host."""

    input_ids: list[list[int]]
    position_ids: list[list[int]]
    layout: Callable[[torch.device, str], Layout]
    """Mask of attention on a device, computed as one of `ATTENTIONS` where there are several ways."""
    places: npt.NDArray[np.int64]
    """Index into the flattened stream of each token of each row, row after row."""


Part = list[list[Row]]
"""The rows of one micro-batch, grouped by prompt."""
Input = tuple[int, ...]
"""Token ids that a masked policy reads in one pass."""
MIN_SHARED = 32
"""Tokens that a segment of its own must save."""


@dataclass(slots=True, eq=False)
class Node:
    """Tokens that all sequences through this node share, after its parent's."""

    ids: Input
    position: int = 0
    """Tokens before it."""
    parent: "Node | None" = None
    is_prompt: bool = False
    """Whether it is shared however short."""
    children: list["Node"] = field(default_factory=list)

    def continued_by(self, ids: Input) -> "tuple[Node, int] | None":
        """Return the child to continue in, with the agreeing tokens, or None."""
        for child in self.children:
            needed = child.ids[:MIN_SHARED]
            if (child.is_prompt or len(needed) == MIN_SHARED) and ids[: len(needed)] == needed:
                return child, count_agreed(child.ids, ids)
        return None

    def split(self, length: int) -> "Node":
        """Split the node; return the upper part, of the first `length` tokens."""
        assert self.parent is not None, "the root has no tokens"
        upper = Node(self.ids[:length], self.position, self.parent, self.is_prompt, [self])
        siblings = self.parent.children
        siblings[siblings.index(self)] = upper
        self.ids, self.position, self.parent = self.ids[length:], self.position + length, upper
        return upper


class PrefixTree:
    """Grow by one sequence after another, and lay them out."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Tokens of all nodes."""
        self._root = Node(())

    def add(self, ids: Input, prompt_length: int) -> Node:
        """Add a sequence; return the node of its last token.

        Once others are added, that token may lie in a node above.
        """
        node, at = self._root, 0
        while at < len(ids) and (found := node.continued_by(ids[at:])) is not None:
            node, agreed = found
            at += agreed
            if agreed < len(node.ids) and at < len(ids):
                node = node.split(agreed)
                break
            if agreed < len(node.ids):
                return node
        if at == 0 and 0 < prompt_length < len(ids):
            node, at = self._grow(node, ids[:prompt_length], is_prompt=True), prompt_length
        return self._grow(node, ids[at:], is_prompt=at == 0) if at < len(ids) else node

    @property
    def num_padded(self) -> int:
        """Count the tokens, the ends of one node padded alike."""
        total, waiting = 0, [self._root]
        while waiting:
            node = waiting.pop()
            ends = [len(child.ids) for child in node.children if not child.children]
            total += len(node.ids) + len(ends) * max(ends, default=0)
            waiting += [child for child in node.children if child.children]
        return total

    def _grow(self, parent: Node, ids: Input, *, is_prompt: bool) -> Node:
        node = Node(ids, parent.position + len(parent.ids), parent, is_prompt)
        parent.children.append(node)
        self.num_tokens += len(ids)
        return node

    def laid_out(self, start: int) -> tuple[list[Node], dict[Node, StreamSegment]]:
        """Return the nodes in the stream's order from `start`, with their segments."""
        order: list[Node] = []
        segments: dict[Node, StreamSegment] = {}
        waiting = self._root.children[::-1]
        while waiting:
            node = waiting.pop()
            above = None if node.parent is None else segments.get(node.parent)
            segments[node] = StreamSegment(start, len(node.ids), above)
            order.append(node)
            start += len(node.ids)
            waiting += node.children[::-1]
        return order, segments


def stretches_to(last: StreamSegment, length: int) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of the first `length` tokens down to `last`."""
    for start, own in last.stretches:
        yield start, min(own, length)
        length -= min(own, length)


def positions_of(order: list[Node]) -> Iterator[int]:
    """Yield each token's position in its sequence, in stream order."""
    for node in order:
        yield from range(node.position, node.position + len(node.ids))


def count_agreed(first: Input, second: Input) -> int:
    """Count the tokens up to the first in which two sequences differ.

    >>> count_agreed((1, 2, 3), (1, 2, 4, 5))
    2
    """
    length = min(len(first), len(second))
    if first[:length] == second[:length]:  # as it mostly is, and faster than token by token
        return length
    return next(place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)


def shared_layout(part: Part) -> Stream:
    """Lay shared prefixes out once, and the rest behind them."""
    ids: list[int] = []
    positions: list[int] = []
    segments: list[StreamSegment] = []
    stretches: list[tuple[int, int]] = []
    for group in part:
        tree = PrefixTree()
        ends = [end for row in group for end in add_to_tree(tree, row)]
        order, own = tree.laid_out(len(ids))
        for node in order:
            ids.extend(node.ids)
        positions.extend(positions_of(order))
        segments.extend(own.values())
        for last, length in zip(ends, _lengths([group]), strict=True):
            stretches.extend(stretches_to(own[last], length))
    return Stream([ids], [positions], partial(make_layout, tuple(segments)), places_of(stretches))


def add_to_tree(tree: PrefixTree, row: Row) -> list[Node]:
    """Add a row's sequences; return the node where each ends.

    All tokens before the first that the policy chose, the one that predicts it included, are a prompt.
    """
    rollout, found = row.rollout, []
    for start, end in row.sequences:
        chosen = rollout.loss_mask[start:end]
        found.append(tree.add(rollout.input_ids[start:end], chosen.index(True) + 1 if any(chosen) else end - start))
    return found


def whole_layout(part: Part) -> Stream:
    """Lay out each sequence whole, one after the other, without padding."""
    ids = list(chain.from_iterable(row.rollout.input_ids for group in part for row in group))
    lengths = _lengths(part)
    starts = accumulate(lengths, initial=0)
    segments = tuple(StreamSegment(start, length) for start, length in zip(starts, lengths, strict=False))
    positions = list(chain.from_iterable(map(range, lengths)))
    return Stream([ids], [positions], partial(make_layout, segments), np.arange(len(ids)))


def make_layout(segments: Sequence[StreamSegment], device: torch.device, attention: str) -> Layout:
    """Make the layout of a packed stream."""
    layout = ATTENTIONS[attention](segments, device)
    return layout if attention in GENERAL else stream_layout(layout, segments)


def padded_layout(part: Part) -> Stream:
    """Lay each sequence out as a row, padded on the right."""
    rows = [row for group in part for row in group]
    sequences = [row.rollout.input_ids[start:end] for row in rows for start, end in row.sequences]
    longest = max(map(len, sequences))
    # With a token of its own: a padding token may be embedded as zeros, of which some norms have no gradient.
    ids = [[*own, *own[:1] * (longest - len(own))] for own in sequences]
    positions = [list(range(longest)) for _ in sequences]
    places = places_of([(place * longest, len(own)) for place, own in enumerate(sequences)])
    return Stream(ids, positions, lambda device, attention: DENSE, places)


def usable_layout(packing: str, attention: str) -> str:
    """Return the layout, or the exact one in its place."""
    return INSTEAD.get(attention, {}).get(packing, packing)


def shared_inputs(part: Part) -> Stream:
    """Lay each different input of a masked policy out once per group. The fills differ, not the inputs."""
    ids: list[int] = []
    lengths: list[int] = []
    stretches: list[tuple[int, int]] = []
    for group in part:
        starts: dict[Input, int] = {}
        for row in group:
            inputs = [row.rollout.input_ids[start:end] for start, end in row.sequences]
            for new in [each for each in dict.fromkeys(inputs) if each not in starts]:
                starts[new] = len(ids)
                ids += new
                lengths.append(len(new))
            stretches += [(starts[each], len(each)) for each in inputs]
    positions = list(chain.from_iterable(map(range, lengths)))
    return Stream([ids], [positions], lambda device, attention: inputs_layout(lengths, device), places_of(stretches))


def whole_inputs(part: Part) -> Stream:
    """Lay out each rollout's own inputs one after the other, without padding."""
    lengths = _lengths(part)
    return replace(whole_layout(part), layout=lambda device, attention: inputs_layout(lengths, device))


def padded_inputs(part: Part) -> Stream:
    """Lay each input out as a row; no token reads the padding."""
    stream, lengths = padded_layout(part), _lengths(part)
    longest = max(lengths)
    pairs = zip(stream.input_ids, lengths, strict=True)
    ids = [[*padded[:length], *[0] * (longest - length)] for padded, length in pairs]
    real = [[True] * length + [False] * (longest - length) for length in lengths]
    return replace(stream, input_ids=ids, layout=lambda device, attention: WholeLayout(to_device(real, device)))


def _lengths(part: Part) -> list[int]:
    return [end - start for group in part for row in group for start, end in row.sequences]


LAYOUTS: Mapping[str, Callable[[Part], Stream]] = {
    "shared": shared_layout,
    "packed": whole_layout,
    "padded": padded_layout,
}
INSTEAD: Mapping[str, Mapping[str, str]] = {
    "rows": {"shared": "padded"},
    "alone": {"shared": "packed", "padded": "packed"},
}
"""Replacements, by the policy's attention, of layouts that its model does not compute exactly."""
FILL_LAYOUTS: Mapping[str, Callable[[Part], Stream]] = {
    "shared": shared_inputs,
    "packed": whole_inputs,
    "padded": padded_inputs,
}
"""The same for rollouts of a masked policy."""
ATTENTIONS: Mapping[str, Callable[[Sequence[StreamSegment], torch.device], Layout]] = {
    "sdpa": packed_layout,
    "compiled": compiled_layout,
    "varlen": varlen_layout,
    **dict.fromkeys(GENERAL, forked_layout),
}
