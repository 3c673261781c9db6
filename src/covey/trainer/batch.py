"""Pack groups' rows into micro-batches of tensors, with global counts.

How rollouts are split changes speed and memory, never the update: the denominators are counted once, over all
micro-batches and all ranks.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from covey.algorithm.aggregation import StepCounts
from covey.algorithm.credit.groups import Advantage
from covey.policy.attention.base import DENSE
from covey.policy.policy import Policy, to_device
from covey.policy.settings import longest_pass
from covey.system import collectives
from covey.trainer.layouts import FILL_LAYOUTS, LAYOUTS, Part, PrefixTree, Row, Stream, add_to_tree, usable_layout
from covey.types import Batch, Group, MicroBatch, Rollout

Values = npt.NDArray[Any]
Totals = Sequence[Any]
"""The counts of a `Batch` over all ranks, in its order: numbers, then pairs of them."""


def make_rows(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[Advantage]] | None = None,
    keep: Sequence[Sequence[bool]] | None = None,
    teach: Callable[[Group], Sequence[Rollout | None]] | None = None,
) -> list[list[Row]]:
    """Make each group's rows: kept rollouts with loss tokens.

    A rollout's advantage is that of all its loss tokens, or a turn's that of the turn's; 0 without `advantages`.
    `teach` returns each rollout as a teacher reads it, None for nothing.
    """
    advantages = advantages if advantages is not None else [[0.0] * len(group.rollouts) for group in groups]
    keep = keep if keep is not None else [[True] * len(group.rollouts) for group in groups]
    return [
        [
            Row(
                group.prompt.id,
                rollout,
                _of_tokens(rollout, advantage),
                None if read is rollout else read,
                read is not None,
            )
            for rollout, advantage, kept, read in zip(group.rollouts, values, flags, lessons, strict=True)
            if kept and rollout.num_loss_tokens > 0
        ]
        for group, values, flags in zip(groups, advantages, keep, strict=True)
        for lessons in [group.rollouts if teach is None else teach(group)]
    ]


def _of_tokens(rollout: Rollout, advantage: Advantage) -> tuple[float, ...]:
    if not isinstance(advantage, Sequence):
        return (float(advantage),) * rollout.num_loss_tokens
    turns = rollout.policy_turns
    values: list[float | None] = [None] * rollout.num_loss_tokens
    for turn, value in zip(turns, advantage, strict=True):
        values[turn.start : turn.end] = [float(value)] * (turn.end - turn.start)
    found = tuple(value for value in values if value is not None)
    covered = sum(turn.end - turn.start for turn in turns)
    assert len(found) == len(values) == covered, f"{covered} tokens in turns, {rollout.num_loss_tokens} loss tokens"
    return found


def count(rows: Sequence[Sequence[Row]]) -> tuple[int, int]:
    """Count the loss tokens, and the sequences that have some."""
    flat = [row for group in rows for row in group]
    return sum(row.rollout.num_loss_tokens for row in flat), len(flat)


def make_batch(
    rows: Sequence[Sequence[Row]],
    *,
    packing: str,
    micro_batch_tokens: int,
    totals: Totals,
    device: torch.device,
    attention: str = "sdpa",
    enough: int = sys.maxsize,
) -> Batch:
    """Pack groups' rows into micro-batches of at most `micro_batch_tokens` tokens.

    A micro-batch of `enough` tokens ends with its group, since a longer one is no faster; a single rollout longer than
    the budget gets one of its own. `totals` are the loss tokens, the sequences with loss tokens and all rollouts of the
    step, over all ranks, and where there are some those of `Batch.taught` and `Batch.supervised`; they may exceed what
    `rows` hold where rows without gradient were left out. `attention` says how packed streams attend (`ATTENTIONS`),
    and which layouts there are (`usable_layout`).
    """
    packing = usable_layout(packing, attention)
    fills = any(row.rollout.input_length is not None for group in rows for row in group)
    lay_out = (FILL_LAYOUTS if fills else LAYOUTS)[packing]
    parts = _split(rows, partial(Load, packing, attention == "forked"), micro_batch_tokens, enough)
    tensors = partial(_tensors, lay_out=lay_out, device=device, attention=attention)
    return Batch(tuple(replace(tensors(part), **_lessons(part, tensors)) for part in parts), *totals)


def _lessons(part: Part, tensors: Callable[[Part], MicroBatch]) -> dict[str, Any]:
    """Return a micro-batch's fields of teachers and of given answers."""
    rows = [row for group in part for row in group]
    found: dict[str, Any] = {}

    def mark(flags: Sequence[bool]) -> Tensor:
        device = tensors.keywords["device"]  # type: ignore[attr-defined] # a partial
        return to_device(np.repeat(flags, [row.rollout.num_loss_tokens for row in rows]).tolist(), device, torch.bool)

    if any(row.taught is not None or not row.has_teacher for row in rows):
        found["taught_L"] = mark([row.has_teacher for row in rows])
        read = [[replace(row, rollout=row.taught or row.rollout) for row in of if row.has_teacher] for of in part]
        found["taught"] = tensors([group for group in read if group]) if any(read) else None
    if any(row.is_supervised for row in rows):
        found["supervised_L"] = mark([row.is_supervised for row in rows])
        found["num_supervised"] = sum(row.is_supervised for row in rows)
    return found


@dataclass(frozen=True, slots=True)
class Packing:
    """The layout and size of micro-batches, which never change the update."""

    layout: str
    """A name of `LAYOUTS`: shared, packed or padded."""
    micro_batch_tokens: int
    """Most tokens of one forward/backward pass."""


def pack_rows(
    rows: Sequence[Sequence[Row]], policy: Policy, packing: Packing, totals: Totals, limit: int | None = None
) -> Batch:
    """Pack rows into micro-batches on the policy's device, at most `limit`."""
    is_bounded = policy.device.type == "cpu" and limit is None
    batch = make_batch(
        rows,
        packing=packing.layout,
        micro_batch_tokens=packing.micro_batch_tokens,
        totals=totals,
        device=policy.device,
        attention=policy.attention,
        enough=longest_pass(policy.num_weights) if is_bounded else sys.maxsize,
    )
    return replace(batch, micro_batches=batch.micro_batches[:limit])


def pad_micro_batches(batch: Batch, policy: Policy) -> Batch:
    """Append empty micro-batches so that ranks make equally many passes.

    Passes through sharded weights (FSDP) are made by all ranks together. Collective.
    """
    if not policy.sharded:
        return batch
    missing = collectives.all_max_int(len(batch.micro_batches)) - len(batch.micro_batches)
    return replace(batch, micro_batches=(*batch.micro_batches, *[_empty_micro_batch(policy.device)] * missing))


def _empty_micro_batch(device: torch.device) -> MicroBatch:
    none = _int([], device)
    return MicroBatch(
        input_ids_BT=_int([[0]], device),
        position_ids_BT=_int([[0]], device),
        layout=DENSE,
        source_L=none,
        target_L=none,
        row_L=none,
        column_L=none,
        num_columns=1,
        prompt_ids=(),
        advantage_L=none.double(),
        sampler_logprob_L=none.double(),
    )


@dataclass(slots=True)
class Load:
    """Count the tokens and rows of a micro-batch so far."""

    packing: str
    pads_ends: bool = False
    """Whether shared layouts pad the ends of one prefix to the longest."""
    num_sequences: int = 0
    longest: int = 0
    num_tokens: int = 0
    _tree: PrefixTree = field(default_factory=PrefixTree)
    """Prefix tree of the group that is being added."""
    _inputs: set[tuple[int, ...]] = field(default_factory=set)
    """The same of a masked policy, which reads inputs whole."""

    def add(self, row: Row, *, opens: bool) -> int:
        """Add a row; return the number of tokens through the model.

        `opens` says that the row is the first of its group here.
        """
        lengths = [end - start for start, end in row.sequences]
        self.num_sequences += len(lengths)
        self.longest = max(self.longest, *lengths)
        if opens:
            self._tree, self._inputs = PrefixTree(), set()
        if self.packing != "shared":
            self.num_tokens += sum(lengths)
        elif row.rollout.input_length is None:
            before = self._size_of_tree()
            add_to_tree(self._tree, row)
            self.num_tokens += self._size_of_tree() - before
        else:
            new = {row.rollout.input_ids[start:end] for start, end in row.sequences} - self._inputs
            self._inputs |= new
            self.num_tokens += sum(map(len, new))
        return self.num_sequences * self.longest if self.packing == "padded" else self.num_tokens

    def _size_of_tree(self) -> int:
        return self._tree.num_padded if self.pads_ends else self._tree.num_tokens


def _split(rows: Sequence[Sequence[Row]], empty: Callable[[], Load], budget: int, enough: int) -> Iterator[Part]:
    """Fill micro-batches in order, splitting groups but not rows."""
    lengths = [end - start for group in rows for row in group for start, end in row.sequences]
    if lengths and len(lengths) * max(lengths) <= min(budget, enough):  # no layout takes more, so nothing is counted
        yield [list(group) for group in rows if group]
        return
    part: Part = []
    load = empty()
    for group in rows:
        if load.num_tokens >= enough:
            yield part
            part, load = [], empty()
        opens = True
        for row in group:
            if load.add(row, opens=opens) > budget and part:
                yield part
                part, opens, load = [], True, empty()
                load.add(row, opens=True)
            if opens:
                part.append([])
            part[-1].append(row)
            opens = False
    if part:
        yield part


def _tensors(part: Part, lay_out: Callable[[Part], Stream], device: torch.device, attention: str) -> MicroBatch:
    stream = lay_out(part)
    rows = [row for group in part for row in group]
    rollouts = tuple(row.rollout for row in rows)
    # Positions that predict loss tokens, all rows' at once: too many for loops of Python
    chosen = _flat((one.loss_mask for one in rollouts), np.bool_)
    lengths = [one.num_loss_tokens for one in rollouts]
    begins = np.cumsum(lengths) - lengths

    def joined(values: Values, dtype: torch.dtype = torch.int64) -> Tensor:
        return to_device(torch.from_numpy(values).to(dtype), device)

    return MicroBatch(
        input_ids_BT=_int(stream.input_ids, device),
        position_ids_BT=_int(stream.position_ids, device),
        layout=stream.layout(device, attention),
        source_L=joined(stream.places[chosen]),
        target_L=joined(_flat((one.target_ids for one in rollouts), np.int64)[chosen]),
        row_L=joined(np.repeat(np.arange(len(rows)), lengths)),
        column_L=joined(np.arange(sum(lengths)) - np.repeat(begins, lengths)),
        num_columns=max(lengths),
        prompt_ids=tuple(row.prompt_id for row in rows),
        advantage_L=joined(_flat((row.advantages for row in rows), np.float64), torch.float64),
        sampler_logprob_L=joined(_flat((one.sampler_logprobs for one in rollouts), np.float64)[chosen], torch.float64),
        rollouts=rollouts,
    )


def _flat(rows: Iterable[Sequence[float]], dtype: npt.DTypeLike) -> Values:
    return np.fromiter(chain.from_iterable(rows), dtype)


def _int(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return to_device(values, device, torch.int64)


def unflatten(values_L: Tensor, batch: MicroBatch) -> Tensor:
    """Arrange loss tokens' values as (rows, longest row), 0 elsewhere."""
    grid = values_L.new_zeros(batch.num_rows, batch.num_columns)
    return grid.index_put((batch.row_L, batch.column_L), values_L)


def totals_of(batch: Batch) -> StepCounts:
    counts = batch.num_loss_tokens, batch.num_sequences, batch.num_rollouts
    return StepCounts(*counts, batch.taught, batch.supervised)


def count_work(micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
    """Count the trained rollouts of all ranks, and their micro-batches."""
    filled = [one.num_rows - one.num_supervised for one in micro_batches if one.num_rows > 0]
    trained, passes = collectives.all_sum_ints(sum(filled), len(filled))
    return {"num_rollouts_trained": float(trained), "num_micro_batches": float(passes)}
