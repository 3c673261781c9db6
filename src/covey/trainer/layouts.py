"""Lay the rollouts of a micro-batch out as token streams: shared prompts, packed, or padded.

Layouts change speed and memory, never the update: every loss token is predicted from the same context.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from covey.policy.attention.base import DENSE, Layout
from covey.policy.attention.bidirectional import WholeLayout, inputs_layout
from covey.policy.attention.compiled import compiled_layout
from covey.policy.attention.packed import Segment, packed_layout
from covey.policy.attention.varlen import varlen_layout
from covey.policy.transfer import to_device
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
    def prefix_length(self) -> int:
        """Count the tokens that are the same in the whole group.

        Those up to and including the one that predicts the first loss token; for masked policies, the first input.
        """
        length = self.rollout.input_length
        return self.rollout.loss_mask.index(True) + 1 if length is None else length


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
    """Lay each prompt out once, with the completions of its group branching off it."""
    ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    offsets: list[Offset] = []
    # A prompt once, then the completions of its group
    for group in part:
        start, prefix = len(ids), group[0].prefix_length
        shared = group[0].rollout.input_ids[:prefix]
        ids.extend(shared)
        positions.extend(range(prefix))
        for row in group:
            assert row.rollout.input_ids[:prefix] == shared, (
                f"rollouts of prompt {row.prompt_id} differ in their prompt"
            )
            offsets.append(_branch_offset(start, prefix, len(ids)))
            ids.extend(row.rollout.input_ids[prefix:])
            positions.extend(range(prefix, row.num_tokens))
        segments.append(Segment(start, prefix, tuple(row.num_tokens - prefix for row in group)))
    return Stream([ids], [positions], partial(make_layout, tuple(segments)), offsets)


def whole_layout(part: Part) -> Stream:
    """Lay out each rollout whole, one after the other, without padding."""
    ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    offsets: list[Offset] = []
    for row in (row for group in part for row in group):
        segments.append(Segment(len(ids), row.num_tokens, ()))
        offsets.append(_branch_offset(len(ids), row.num_tokens, len(ids)))
        ids.extend(row.rollout.input_ids)
        positions.extend(range(row.num_tokens))
    return Stream([ids], [positions], partial(make_layout, tuple(segments)), offsets)


def make_layout(segments: Sequence[Segment], device: torch.device, attention: str) -> Layout:
    """Make the layout of a packed stream, computed in one of several ways."""
    return ATTENTIONS[attention](segments, device)


def padded_layout(part: Part) -> Stream:
    """Lay out each rollout as a row of its own, padded on the right to the longest."""
    rows = [row for group in part for row in group]
    longest = max(row.num_tokens for row in rows)
    # With a token of its own: a padding token may be embedded as zeros, of which some norms have no gradient.
    ids = [[*row.rollout.input_ids, *row.rollout.input_ids[:1] * (longest - row.num_tokens)] for row in rows]
    positions = [list(range(longest)) for _ in rows]
    offsets = [_branch_offset(index * longest, longest, 0) for index in range(len(rows))]
    return Stream(ids, positions, lambda device, attention: DENSE, offsets)


def _branch_offset(start: int, prefix: int, branch_start: int) -> Offset:
    return lambda positions: positions + np.where(positions < prefix, start, branch_start - prefix)


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
    ids, length = row.rollout.input_ids, row.rollout.input_length
    assert length is not None, "a masked policy's rollouts say how long an input is"
    return [ids[start : start + length] for start in range(0, len(ids), length)]


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
