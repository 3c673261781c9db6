"""What the sequences of a group have in common, held once: a tree of their prefixes.

Sequences of a group share their prompt, branches of one episode what went before the history was rewritten. A prompt is
always shared. Anything further is split off only where at least MIN_SHARED tokens are saved: answers that agree by
chance in their first words would only cut the stream into more pieces.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from covey.policy.attention.packed import Segment, places_of

Ids = npt.NDArray[np.int64]
MIN_SHARED = 32
"""Tokens that a segment of its own must save."""


@dataclass(slots=True, eq=False)
class Node:
    """Tokens that all sequences through it have in common, after those of its parent."""

    ids: Ids
    position: int = 0
    """Tokens before it."""
    parent: "Node | None" = None
    is_prompt: bool = False
    """Whether it is shared however short."""
    children: list["Node"] = field(default_factory=list)

    def continued_by(self, ids: Ids) -> "tuple[Node, int] | None":
        """Return the child to go on in, and how many of its tokens agree. None where none is worth it."""
        for child in self.children:
            agreed = count_agreed(child.ids, ids)
            if agreed >= MIN_SHARED or (child.is_prompt and agreed == len(child.ids)):
                return child, agreed
        return None

    def split(self, length: int) -> "Node":
        """Cut the node in two, and return the upper part with its first `length` tokens."""
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
        """Of all nodes."""
        self._root = Node(np.empty(0, np.int64))

    def add(self, ids: Ids, prompt_length: int) -> Node:
        """Add a sequence, and return the node that its last token is in (or above, once others are added)."""
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

    def _grow(self, parent: Node, ids: Ids, *, is_prompt: bool) -> Node:
        node = Node(ids, parent.position + len(parent.ids), parent, is_prompt)
        parent.children.append(node)
        self.num_tokens += len(ids)
        return node

    def laid_out(self, start: int) -> tuple[list[Node], dict[Node, Segment]]:
        """Return the nodes in the order of the stream from `start` on, and the segment of each."""
        order: list[Node] = []
        segments: dict[Node, Segment] = {}
        waiting = self._root.children[::-1]
        while waiting:
            node = waiting.pop()
            above = None if node.parent is None else segments.get(node.parent)
            segments[node] = Segment(start, len(node.ids), above)
            order.append(node)
            start += len(node.ids)
            waiting += node.children[::-1]
        return order, segments


def places_in(segments: dict[Node, Segment], last: Node, length: int) -> Ids:
    """Return where in the stream the first `length` tokens of the sequence down to `last` lie, (length,)."""
    return places_of(segments[last].stretches)[:length]


def positions_of(order: list[Node]) -> Iterator[int]:
    """Yield the place of each token in its sequence, in the order of the stream."""
    for node in order:
        yield from range(node.position, node.position + len(node.ids))


def count_agreed(first: Ids, second: Ids) -> int:
    """Count the tokens up to the first in which two sequences differ.

    >>> count_agreed(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    length = min(len(first), len(second))
    if length == 0 or first[0] != second[0]:
        return 0
    differ = first[:length] != second[:length]
    return int(differ.argmax()) if differ.any() else length
