"""Lay the rollouts of a micro-batch out as token streams: shared prefixes, packed, or padded.

Layouts change speed and memory, never the update: every loss token is predicted from the same context.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
import torch

from covey.policy.attention.base import DENSE, Layout
from covey.policy.attention.bidirectional import WholeLayout, inputs_layout
from covey.policy.attention.compiled import compiled_layout
from covey.policy.attention.packed import Segment, packed_layout, places_of
from covey.policy.attention.varlen import varlen_layout
from covey.policy.transfer import to_device
from covey.trainer.prefix_tree import Node, PrefixTree, places_in, positions_of
from covey.types import Rollout


@dataclass(frozen=True, slots=True)
class Row:
    """Pair a rollout that takes part in the loss with the advantage of each of its loss tokens."""

    prompt_id: str
    rollout: Rollout
    advantages: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.rollout.input_ids)

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """Return begin and end of each sequence that is read by itself: one, branches, or inputs of passes."""
        return self.rollout.sequences


@dataclass(frozen=True, slots=True)
class Stream:
    """Hold the tokens of a micro-batch on the host, before they become tensors."""

    input_ids: list[list[int]]
    position_ids: list[list[int]]
    layout: Callable[[torch.device, str], Layout]
    """Who attends to whom, on a device, computed as one of `ATTENTIONS` where there are several ways."""
    offsets: list["Offset"]
    """For each row: positions in the rollout -> indices into the flattened stream."""


Positions = npt.NDArray[np.int64]
Offset = Callable[[Positions], Positions]
Part = list[list[Row]]
"""The rows of one micro-batch, grouped by prompt."""
Input = tuple[int, ...]
"""Token ids that a masked policy reads in one pass."""


def shared_layout(part: Part) -> Stream:
    """Lay out once what the sequences of a group have in common, such as its prompt, and what differs behind it."""
    ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    offsets: list[Offset] = []
    # A tree for each group
    for group in part:
        tree = PrefixTree()
        ends = [add_to_tree(tree, row) for row in group]
        order, own = tree.laid_out(len(ids))
        for node in order:
            ids.extend(node.ids.tolist())
        positions.extend(positions_of(order))
        segments.extend(own.values())
        # Where in it the tokens of each row are
        for row, of_row in zip(group, ends, strict=True):
            lengths = [end - start for start, end in row.sequences]
            places = [places_in(own, last, length) for last, length in zip(of_row, lengths, strict=True)]
            offsets.append(np.concatenate(places).__getitem__)
    return Stream([ids], [positions], partial(make_layout, tuple(segments)), offsets)


def add_to_tree(tree: PrefixTree, row: Row) -> list[Node]:
    """Add the sequences of a row, and return the node that each ends in.

    What comes before the first token that the policy chose, the one that predicts it included, is a prompt.
    """
    rollout, found = row.rollout, []
    for start, end in row.sequences:
        chosen = np.flatnonzero(rollout.loss_mask[start:end])
        ids = np.asarray(rollout.input_ids[start:end], np.int64)
        found.append(tree.add(ids, int(chosen[0]) + 1 if len(chosen) else len(ids)))
    return found


def whole_layout(part: Part) -> Stream:
    """Lay out each sequence whole, one after the other, without padding."""
    rows = [row for group in part for row in group]
    ids = list(chain.from_iterable(row.rollout.input_ids for row in rows))
    lengths = [end - start for row in rows for start, end in row.sequences]
    starts = accumulate(lengths, initial=0)
    segments = tuple(Segment(start, length) for start, length in zip(starts, lengths, strict=False))
    positions = list(chain.from_iterable(map(range, lengths)))
    begins = accumulate((row.num_tokens for row in rows), initial=0)
    offsets = [_shifted(begin) for begin, _ in zip(begins, rows, strict=False)]
    return Stream([ids], [positions], partial(make_layout, segments), offsets)


def make_layout(segments: Sequence[Segment], device: torch.device, attention: str) -> Layout:
    """Make the layout of a packed stream, computed in one of several ways."""
    return ATTENTIONS[attention](segments, device)


def padded_layout(part: Part) -> Stream:
    """Lay out each sequence as a row of its own, padded on the right to the longest."""
    rows = [row for group in part for row in group]
    sequences = [row.rollout.input_ids[start:end] for row in rows for start, end in row.sequences]
    longest = max(map(len, sequences))
    # With a token of its own: a padding token may be embedded as zeros, of which some norms have no gradient.
    ids = [[*own, *own[:1] * (longest - len(own))] for own in sequences]
    positions = [list(range(longest)) for _ in sequences]
    # Where in the rectangle the tokens of each row are
    offsets: list[Offset] = []
    num_before = 0
    for row in rows:
        stretches = [((num_before + i) * longest, end - start) for i, (start, end) in enumerate(row.sequences)]
        offsets.append(places_of(stretches).__getitem__)
        num_before += len(stretches)
    return Stream(ids, positions, lambda device, attention: DENSE, offsets)


def _shifted(start: int) -> Offset:
    return lambda positions: positions + start


def shared_inputs(part: Part) -> Stream:
    """Lay out each different input of a masked policy once for its whole group.

    What is filled in differs, not what is read.
    """
    inputs: list[Input] = []
    places: list[list[int]] = []
    for group in part:
        known: dict[Input, int] = {}
        for row in group:
            new = [each for each in dict.fromkeys(_inputs(row)) if each not in known]
            known |= {each: len(inputs) + index for index, each in enumerate(new)}
            inputs += new
            places.append([known[each] for each in _inputs(row)])
    return _stream(inputs, places)


def whole_inputs(part: Part) -> Stream:
    """Lay out each rollout with inputs of its own, one after the other, without padding."""
    return _stream(*_own_inputs(part))


def padded_inputs(part: Part) -> Stream:
    """Lay out each input as a row of its own, padded on the right to the longest."""
    inputs, places = _own_inputs(part)
    longest = max(map(len, inputs))
    ids = [[*each, *[0] * (longest - len(each))] for each in inputs]
    positions = [list(range(longest)) for _ in inputs]
    real = [[True] * len(each) + [False] * (longest - len(each)) for each in inputs]
    offsets = [_input_offset([longest * place for place in own], len(inputs[own[0]])) for own in places]
    return Stream(ids, positions, lambda device, attention: WholeLayout(to_device(real, device)), offsets)


def _inputs(row: Row) -> list[Input]:
    """Return what a masked policy reads in each pass."""
    return [row.rollout.input_ids[start:end] for start, end in row.sequences]


def _own_inputs(part: Part) -> tuple[list[Input], list[list[int]]]:
    """Return the inputs of all rows, one after the other, and which are whose."""
    inputs: list[Input] = []
    places: list[list[int]] = []
    for row in (row for group in part for row in group):
        own = _inputs(row)
        places.append(list(range(len(inputs), len(inputs) + len(own))))
        inputs.extend(own)
    return inputs, places


def _stream(inputs: Sequence[Input], places: Sequence[Sequence[int]]) -> Stream:
    """Lay the inputs out as one sequence, of which `places` says what each row reads."""
    starts = list(accumulate(map(len, inputs), initial=0))
    ids = [token_id for each in inputs for token_id in each]
    positions = [position for each in inputs for position in range(len(each))]
    offsets = [_input_offset([starts[place] for place in own], len(inputs[own[0]])) for own in places]
    lengths = [len(each) for each in inputs]
    return Stream([ids], [positions], lambda device, attention: inputs_layout(lengths, device), offsets)


def _input_offset(starts: Sequence[int], length: int) -> Offset:
    return lambda positions: np.asarray(starts)[positions // length] + positions % length


LAYOUTS: Mapping[str, Callable[[Part], Stream]] = {
    "shared": shared_layout,
    "packed": whole_layout,
    "padded": padded_layout,
}
FILL_LAYOUTS: Mapping[str, Callable[[Part], Stream]] = {
    "shared": shared_inputs,
    "packed": whole_inputs,
    "padded": padded_inputs,
}
"""The same for rollouts of a masked policy."""
ATTENTIONS: Mapping[str, Callable[[Sequence[Segment], torch.device], Layout]] = {
    "sdpa": packed_layout,
    "compiled": compiled_layout,
    "varlen": varlen_layout,
}
