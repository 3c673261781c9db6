"""Groups and advantages in, packed tensors out: layouts, micro-batches, and the counts that divide the loss.

How rollouts are laid out and split changes speed and memory, never the update: every loss token is predicted from the
same context, and the denominators are counted once, over all micro-batches and all ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from covey.policy import distribution
from covey.policy.attention import DENSE, Layout
from covey.policy.bidirectional import WholeLayout, inputs_layout
from covey.policy.compiled_attention import compiled_layout
from covey.policy.flex import flex_layout
from covey.policy.packing import Segment, packed_layout
from covey.policy.policy import Policy
from covey.types import Batch, Group, MicroBatch, Rollout


@dataclass(frozen=True, slots=True)
class Row:
    """A rollout that takes part in the loss, and the advantage of each of its loss tokens."""

    prompt_id: str
    rollout: Rollout
    advantages: tuple[float, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.rollout.input_ids)

    @property
    def prefix_length(self) -> int:
        """Tokens that are the same in the whole group: those up to and including the one that predicts the first loss
        token; of a masked policy the input it begins with."""
        length = self.rollout.input_length
        return self.rollout.loss_mask.index(True) + 1 if length is None else length


@dataclass(frozen=True, slots=True)
class Stream:
    """Tokens of a micro-batch on the host, before they become tensors."""

    input_ids: list[list[int]]
    position_ids: list[list[int]]
    layout: Callable[[torch.device, str], Layout]
    """Who attends to whom, on a device, computed as one of `ATTENTIONS` where there are several ways."""
    offsets: list[Callable[[int], int]]
    """For each row: position in the rollout -> index into the flattened stream."""


def make_rows(
    groups: Sequence[Group], advantages: Sequence[Sequence[float]], keep: Sequence[Sequence[bool]] | None = None
) -> list[list[Row]]:
    """Rows of each group that are kept and have loss tokens; a rollout's advantage is that of all its loss tokens."""
    keep = keep if keep is not None else [[True] * len(group.rollouts) for group in groups]
    return [
        [
            Row(group.prompt.id, rollout, (float(advantage),) * rollout.num_loss_tokens)
            for rollout, advantage, kept in zip(group.rollouts, values, flags, strict=True)
            if kept and rollout.num_loss_tokens > 0
        ]
        for group, values, flags in zip(groups, advantages, keep, strict=True)
    ]


def with_signal(rows: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """Rows with an advantage other than 0; the others have no gradient where the loss is a multiple of it."""
    return [[row for row in group if any(row.advantages)] for group in rows]


def make_batch(
    rows: Sequence[Sequence[Row]],
    *,
    packing: str,
    micro_batch_tokens: int,
    totals: tuple[int, int, int],
    device: torch.device,
    attention: str = "blocks",
) -> Batch:
    """Pack the rows of each group into micro-batches of at most `micro_batch_tokens` tokens.

    `totals` are the loss tokens, the sequences with loss tokens and all rollouts of the step, over all ranks; they
    may exceed what `rows` hold where rows without gradient were left out. A single rollout longer than the budget
    gets a micro-batch of its own. `attention` says how packed streams attend (`ATTENTIONS`).
    """
    fills = any(row.rollout.input_length is not None for group in rows for row in group)
    lay_out = (FILL_LAYOUTS if fills else LAYOUTS)[packing]
    parts = _split(rows, packing, micro_batch_tokens)
    return Batch(tuple(_tensors(part, lay_out(part), device, attention) for part in parts), *totals)


def evened(batch: Batch, policy: Policy) -> Batch:
    """The batch with micro-batches of one token and no loss token added, as many as another rank has more.

    Passes through sharded weights are made by all ranks together, also by those that have fewer rows. Collective.
    """
    if not policy.sharded:
        return batch
    missing = distribution.all_max_int(len(batch.micro_batches)) - len(batch.micro_batches)
    return replace(batch, micro_batches=(*batch.micro_batches, *[_filler(policy.device)] * missing))


def _filler(device: torch.device) -> MicroBatch:
    none = _int([], device)
    return MicroBatch(
        input_ids_BT=_int([[0]], device),
        position_ids_BT=_int([[0]], device),
        layout=DENSE,
        source_L=none,
        target_L=none,
        row_L=none,
        column_L=none,
        prompt_ids=(),
        advantage_L=none.double(),
        sampler_logprob_L=none.double(),
    )


def count(rows: Sequence[Sequence[Row]]) -> tuple[int, int]:
    """(loss tokens, sequences with loss tokens)."""
    flat = [row for group in rows for row in group]
    return sum(row.rollout.num_loss_tokens for row in flat), len(flat)


Part = list[list[Row]]
"""The rows of one micro-batch, grouped by prompt."""
Input = tuple[int, ...]
"""Token ids that a masked policy reads in one pass."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a micro-batch holds so far."""

    num_rows: int = 0
    longest: int = 0
    num_tokens: int = 0

    def plus(self, row: Row, *, shares_prompt: bool) -> "Load":
        added = row.num_tokens - (row.prefix_length if shares_prompt else 0)
        return Load(self.num_rows + 1, max(self.longest, row.num_tokens), self.num_tokens + added)

    def cost(self, packing: str) -> int:
        """Tokens that go through the model, padding included."""
        return self.num_rows * self.longest if packing == "padded" else self.num_tokens


def _split(rows: Sequence[Sequence[Row]], packing: str, budget: int) -> Iterator[Part]:
    """Fill micro-batches in order; a group that does not fit is continued in the next one."""
    part: Part = []
    load = Load()
    for group in rows:
        opens = True
        for row in group:
            grown = load.plus(row, shares_prompt=packing == "shared" and not opens)
            if part and grown.cost(packing) > budget:
                yield part
                part, opens = [], True
                grown = Load().plus(row, shares_prompt=False)
            if opens:
                part.append([])
            part[-1].append(row)
            load, opens = grown, False
    if part:
        yield part


def shared_layout(part: Part) -> Stream:
    """Each prompt once; the completions of its group branch off it."""
    ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    offsets: list[Callable[[int], int]] = []
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
    return Stream([ids], [positions], partial(attending, tuple(segments)), offsets)


def whole_layout(part: Part) -> Stream:
    """Each rollout whole, one after the other, without padding."""
    ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    offsets: list[Callable[[int], int]] = []
    for row in (row for group in part for row in group):
        segments.append(Segment(len(ids), row.num_tokens, ()))
        offsets.append(_branch_offset(len(ids), row.num_tokens, len(ids)))
        ids.extend(row.rollout.input_ids)
        positions.extend(range(row.num_tokens))
    return Stream([ids], [positions], partial(attending, tuple(segments)), offsets)


def attending(segments: Sequence[Segment], device: torch.device, attention: str) -> Layout:
    """The layout of a packed stream, computed in one of several ways."""
    return ATTENTIONS[attention](segments, device)


def padded_layout(part: Part) -> Stream:
    """Each rollout a row of its own, padded on the right to the longest."""
    rows = [row for group in part for row in group]
    longest = max(row.num_tokens for row in rows)
    # With a token of its own: a padding token may be embedded as zeros, of which some norms have no gradient.
    ids = [[*row.rollout.input_ids, *row.rollout.input_ids[:1] * (longest - row.num_tokens)] for row in rows]
    positions = [list(range(longest)) for _ in rows]
    offsets = [_branch_offset(index * longest, longest, 0) for index in range(len(rows))]
    return Stream(ids, positions, lambda device, attention: DENSE, offsets)


def _branch_offset(start: int, prefix: int, branch_start: int) -> Callable[[int], int]:
    return lambda position: start + position if position < prefix else branch_start + position - prefix


def shared_inputs(part: Part) -> Stream:
    """Each different input of a masked policy once for its whole group: what is filled in differs, not what is read."""
    inputs: list[Input] = []
    places: list[list[int]] = []
    for group in part:
        known: dict[Input, int] = {}
        for row in group:
            for each in _inputs(row):
                if each not in known:
                    known[each] = len(inputs)
                    inputs.append(each)
            places.append([known[each] for each in _inputs(row)])
    return _stream(inputs, places)


def whole_inputs(part: Part) -> Stream:
    """Each rollout with inputs of its own, one after the other, without padding."""
    return _stream(*_own_inputs(part))


def padded_inputs(part: Part) -> Stream:
    """Each input a row of its own, padded on the right to the longest."""
    inputs, places = _own_inputs(part)
    longest = max(map(len, inputs))
    ids = [[*each, *[0] * (longest - len(each))] for each in inputs]
    positions = [list(range(longest)) for _ in inputs]
    real = [[True] * len(each) + [False] * (longest - len(each)) for each in inputs]
    offsets = [_input_offset([longest * place for place in own], len(inputs[own[0]])) for own in places]
    return Stream(ids, positions, lambda device, attention: WholeLayout(torch.tensor(real, device=device)), offsets)


def _inputs(row: Row) -> list[Input]:
    """What a masked policy reads in each pass."""
    ids, length = row.rollout.input_ids, row.rollout.input_length
    assert length is not None, "a masked policy's rollouts say how long an input is"
    return [ids[start : start + length] for start in range(0, len(ids), length)]


def _own_inputs(part: Part) -> tuple[list[Input], list[list[int]]]:
    """The inputs of all rows, one after the other, and which are whose."""
    inputs: list[Input] = []
    places: list[list[int]] = []
    for row in (row for group in part for row in group):
        own = _inputs(row)
        places.append(list(range(len(inputs), len(inputs) + len(own))))
        inputs.extend(own)
    return inputs, places


def _stream(inputs: Sequence[Input], places: Sequence[Sequence[int]]) -> Stream:
    """The inputs as one sequence; `places` says which each row reads."""
    starts = list(accumulate(map(len, inputs), initial=0))
    ids = [token_id for each in inputs for token_id in each]
    positions = [position for each in inputs for position in range(len(each))]
    offsets = [_input_offset([starts[place] for place in own], len(inputs[own[0]])) for own in places]
    lengths = [len(each) for each in inputs]
    return Stream([ids], [positions], lambda device, attention: inputs_layout(lengths, device), offsets)


def _input_offset(starts: Sequence[int], length: int) -> Callable[[int], int]:
    return lambda position: starts[position // length] + position % length


def _tensors(part: Part, stream: Stream, device: torch.device, attention: str) -> MicroBatch:
    rows = [row for group in part for row in group]
    entries = [
        (offset(position), row.rollout.target_ids[position], index, column, row.rollout.sampler_logprobs[position])
        for index, (row, offset) in enumerate(zip(rows, stream.offsets, strict=True))
        for column, position in enumerate(p for p, chosen in enumerate(row.rollout.loss_mask) if chosen)
    ]
    source, target, row_index, column, sampler = zip(*entries, strict=True)
    advantages = [value for row in rows for value in row.advantages]
    return MicroBatch(
        input_ids_BT=_int(stream.input_ids, device),
        position_ids_BT=_int(stream.position_ids, device),
        layout=stream.layout(device, attention),
        source_L=_int(source, device),
        target_L=_int(target, device),
        row_L=_int(row_index, device),
        column_L=_int(column, device),
        prompt_ids=tuple(row.prompt_id for row in rows),
        advantage_L=torch.tensor(advantages, dtype=torch.float64, device=device),
        sampler_logprob_L=torch.tensor(sampler, dtype=torch.float64, device=device),
    )


def _int(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def unflatten(values_L: Tensor, batch: MicroBatch) -> Tensor:
    """Values of loss tokens as (rows, longest row); 0 where a row has no token."""
    grid = values_L.new_zeros(batch.num_rows, int(batch.column_L.max()) + 1 if len(batch.column_L) else 1)
    return grid.index_put((batch.row_L, batch.column_L), values_L)


def without_truncated(groups: Sequence[Group]) -> list[Group]:
    """Completions cut by the token limit leave the loss; their rewards stay in the group (DAPO, arXiv 2503.14476)."""
    return [
        replace(g, rollouts=tuple(_silenced(r) if r.finish_reason == "length" else r for r in g.rollouts))
        for g in groups
    ]


def _silenced(rollout: Rollout) -> Rollout:
    length = len(rollout.input_ids)
    return replace(rollout, loss_mask=(False,) * length, sampler_logprobs=(0.0,) * length)


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
    "blocks": packed_layout,
    "compiled": compiled_layout,
    "flex": flex_layout,
}
