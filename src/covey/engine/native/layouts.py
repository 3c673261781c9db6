"""Attention while sampling: prefill, then decoding from the cache.

Decoding attends to the group's prompt and to the row's own tokens, as two batched products for all rows; the two
softmaxes are merged exactly through their log-sum-exps.

Blocks are used at full length, with a bias that hides unused slots: torch.bmm copies batches that are cut.

Shapes: T tokens of the stream (B = 1), R rows, G groups, W most rows of one group, P and S length of the prompts' and
the rows' block, H query heads, K key/value heads, Q = H / K, D head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from covey.engine.native.cache import Cache, CacheBlock, CacheShape, HeldShape, LayerShape
from covey.policy.attention.base import (
    DENSE,
    Rule,
    apply_softcap,
    causal_attention,
    masked_attention,
    within,
    without_sink,
)
from covey.policy.policy import to_device
from covey.policy.recurrence.base import Convolution, Forest, Operations, Recurrence

NO_HEADS = LayerShape(0, 0, 0)


@dataclass(slots=True)
class ProbeLayout:
    """Records a model's cached shapes in a pass over one token."""

    layers: dict[int, LayerShape] = field(default_factory=dict)
    rules: dict[int, Rule] = field(default_factory=dict)
    held: dict[tuple[int, bool], HeldShape] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    @property
    def forest(self) -> "ProbeLayout":
        return self

    def convolve(self, place: int, given: Convolution, operations: Operations) -> Tensor:
        width = given.weight_CW.shape[1] - 1
        self._note(HeldShape(place, True, (width, given.x_TC.shape[1]), torch.float32))
        return ONE_TOKEN.convolve(place, given, operations)

    def recur(self, place: int, given: Recurrence, operations: Operations) -> Tensor:
        _, num_heads, width = given.value_THP.shape
        self._note(HeldShape(place, False, (num_heads, given.key_TKN.shape[2], width), torch.float32))
        return ONE_TOKEN.recur(place, given, operations)

    def _note(self, held: HeldShape) -> None:
        if (held.place, held.is_input) in self.held:
            raise ValueError(f"engine=native needs one state of a kind in every layer, the {held.place}th has another")
        self.held[held.place, held.is_input] = held

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        if layer in self.layers:
            raise ValueError(f"engine=native needs attention once in every layer, layer {layer} has it again")
        self.rules[layer] = rule
        self.layers[layer] = LayerShape(key_BKTD.shape[1], key_BKTD.shape[3], value_BKTD.shape[3])
        # Under autocast rotary embedding leaves keys in float32; values are what products are computed in.
        self.dtype = value_BKTD.dtype
        return DENSE.attend(layer, query_BHTD, key_BKTD, value_BKTD, rule)

    def shape(self, device: torch.device) -> CacheShape:
        """Return the shapes by layer, those without attention included."""
        layers = tuple(self.layers.get(layer, NO_HEADS) for layer in range(max(self.layers, default=-1) + 1))
        return CacheShape(layers, self.dtype, device, tuple(self.held[key] for key in sorted(self.held)))


ONE_TOKEN = Forest(torch.tensor([[0, 1, -1]]))


class StretchLayout:
    """Leads layers with a state, if any, over stretches of holders."""

    _stretches: tuple[CacheBlock, int, Sequence[int], bool]
    """Their block, the first holder, each one's tokens, and whether texts begin with them."""

    @cached_property
    def forest(self) -> Forest:
        block, first, lengths, begins = self._stretches
        length_N = torch.tensor(lengths)
        rows_N3 = torch.stack((length_N.cumsum(0) - length_N, length_N, torch.full_like(length_N, -1)), dim=1)
        write_N = torch.arange(first, first + len(lengths))
        return Forest(rows_N3, block.states(torch.full_like(write_N, -1) if begins else write_N, write_N))


class PrefillLayout(StretchLayout):
    """Causal prompts whose keys and values fill slots from `first`."""

    def __init__(self, block: CacheBlock, first: int, lengths: Sequence[int]) -> None:
        device = block.shape.device
        length_N = to_device(lengths, device)
        self._block = block
        self._first = first
        self._stretches = block, first, lengths, True
        self._num_prompts, self._longest = len(lengths), max(lengths)
        self.end_N = length_N.cumsum(0) - 1
        """Last token of each prompt in the stream."""
        self._prompt_T = torch.repeat_interleave(length_N, output_size=sum(lengths))
        first_N = self.end_N + 1 - length_N
        self.position_T = torch.arange(sum(lengths), device=device) - first_N[self._prompt_T]

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        key_NKPD, value_NKPD = self._write(layer, key_BKTD, value_BKTD)
        num_heads, width = query_BHTD.shape[1], query_BHTD.shape[3]
        query_NHPD = key_NKPD.new_zeros(self._num_prompts, num_heads, self._longest, width)
        query_NHPD[self._place] = query_BHTD[0].transpose(0, 1).to(key_NKPD.dtype)
        out_NHPD = causal_attention(query_NHPD, key_NKPD, value_NKPD, rule)
        return out_NHPD[self._place].transpose(0, 1)[None].to(query_BHTD.dtype)

    @property
    def _place(self) -> tuple[Tensor, slice, Tensor]:
        return self._prompt_T, slice(None), self.position_T

    def _write(self, layer: int, key_BKTD: Tensor, value_BKTD: Tensor) -> list[Tensor]:
        """Store the prompts' keys and values; return (N, K, P, D)."""
        here = slice(self._first, self._first + self._num_prompts)
        blocks = [tensors[layer][here, :, : self._longest] for tensors in (self._block.keys, self._block.values)]
        for block_NKPD, new_BKTD in zip(blocks, (key_BKTD, value_BKTD), strict=True):
            block_NKPD[self._place] = new_BKTD[0].transpose(0, 1).to(block_NKPD.dtype)
        return blocks


class ExtendLayout(StretchLayout):
    """New tokens of rows, each causal after its prompt and earlier tokens.

    The rows' slots are `first` and those that follow. Keys and values are stored there, behind the prompt's if
    `rows_hold_prompts`.
    """

    def __init__(
        self,
        cache: Cache,
        first: int,
        group_of_row: Sequence[int],
        prompt_lengths: Sequence[int],
        stretches: Sequence[tuple[int, int]],
        rows_hold_prompts: bool,
    ) -> None:
        """Set `stretches`, the own tokens (from, up to) that each row reads."""
        device = cache.shape.device
        lengths = [end - start for start, end in stretches]
        self._cache, self._here = cache, slice(first, first + len(lengths))
        self._stretches = cache.rows, first, lengths, False
        self._group_N, prompt_N, start_N, length_N = to_device(
            [[*group_of_row], [*prompt_lengths], [start for start, _ in stretches], lengths], device
        )
        self._prompt_N = prompt_N
        self.end_N = length_N.cumsum(0) - 1
        """Last new token of each row in the stream."""
        self._row_T = torch.repeat_interleave(length_N, output_size=sum(lengths))
        self._new_T = torch.arange(sum(lengths), device=device) - (self.end_N + 1 - length_N)[self._row_T]
        """Place of each token among the new ones of its row."""
        own_T = self._new_T + start_N[self._row_T]
        self.position_T = own_T + prompt_N[self._row_T]
        self._slot_T = self.position_T if rows_hold_prompts else own_T
        self._shared = 0 if rows_hold_prompts else max(prompt_lengths)
        ends = [end + length * rows_hold_prompts for (_, end), length in zip(stretches, prompt_lengths, strict=True)]
        self._own, self._most_new = max(ends), max(lengths)
        self._first_N = start_N + prompt_N
        """Position of each row's first new token."""
        self._own_first_N = torch.zeros_like(prompt_N) if rows_hold_prompts else prompt_N
        """Position of each row's slot 0."""
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        rows, place = self._cache.rows, (self._row_T, slice(None), self._slot_T)
        for cached, new in ((rows.keys[layer], key_BKTD), (rows.values[layer], value_BKTD)):
            cached[self._here][place] = new[0].transpose(0, 1).to(cached.dtype)
        key, value = self._gather_visible(layer)
        num_heads, width = query_BHTD.shape[1], query_BHTD.shape[3]
        query = key.new_zeros(len(self._group_N), num_heads, self._most_new, width)
        query[self._row_T, :, self._new_T] = query_BHTD[0].transpose(0, 1).to(key.dtype)
        out = masked_attention(query, key, value, rule, self._mask(rule.window))
        return out[self._row_T, :, self._new_T].transpose(0, 1)[None].to(query_BHTD.dtype)

    def _gather_visible(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of prompts and rows, (N, K, S, D)."""
        prompts, rows = self._cache.prompts, self._cache.rows
        own = [tensors[layer][self._here, :, : self._own] for tensors in (rows.keys, rows.values)]
        if not self._shared:
            return own[0], own[1]
        shared = [tensors[layer][:, :, : self._shared] for tensors in (prompts.keys, prompts.values)]
        key, value = (torch.cat((s.index_select(0, self._group_N), o), 2) for s, o in zip(shared, own, strict=True))
        return key, value

    def _mask(self, window: int | None) -> Tensor:
        """Return the new tokens' mask, (N, 1, most new tokens, S)."""
        if window not in self._masks:
            device = self._first_N.device
            shared_NS = torch.arange(self._shared, device=device).expand(len(self._first_N), -1)
            own_NS = torch.arange(self._own, device=device) + self._own_first_N[:, None]
            is_there_NS = torch.cat((shared_NS < self._prompt_N[:, None], torch.ones_like(own_NS, dtype=torch.bool)), 1)
            new_NT = self._first_N[:, None] + torch.arange(self._most_new, device=device)
            back_NTS = new_NT[:, :, None] - torch.cat((shared_NS, own_NS), 1)[:, None]
            mask_NTS = is_there_NS[:, None] & (back_NTS >= 0) & within(back_NTS, window)
            self._masks[window] = mask_NTS[:, None]
        return self._masks[window]


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows by prompt, padded to groups x width, and back."""

    num_groups: int
    width: int
    row_C: Tensor
    """Row in each of the G * W cells; unused cells hold row 0."""
    only_row_C: Tensor
    """The same; unused cells hold -1."""
    cell_R: Tensor
    """Cell of each row."""
    length_G: Tensor
    length_R: Tensor
    """Prompt lengths, of groups and of rows."""
    shortest: int
    longest: int

    @staticmethod
    def of(group_of_row: Sequence[int], prompt_lengths: Sequence[int], device: torch.device) -> "Grid":
        rows_of: list[list[int]] = [[] for _ in prompt_lengths]
        for row, group in enumerate(group_of_row):
            rows_of[group].append(row)
        width = max(len(rows) for rows in rows_of)
        cell_of_row = [0] * len(group_of_row)
        for group, rows in enumerate(rows_of):
            for column, row in enumerate(rows):
                cell_of_row[row] = group * width + column
        only_row_C = to_device([row for rows in rows_of for row in (*rows, *[-1] * (width - len(rows)))], device)
        return Grid(
            num_groups=len(prompt_lengths),
            width=width,
            row_C=only_row_C.clamp(min=0),
            only_row_C=only_row_C,
            cell_R=to_device(cell_of_row, device),
            length_G=to_device(prompt_lengths, device),
            length_R=to_device([prompt_lengths[group] for group in group_of_row], device),
            shortest=min(prompt_lengths),
            longest=max(prompt_lengths),
        )


class DecodeLayout(StretchLayout):
    """One token per row, in slot order, stored before it attends."""

    def __init__(self, cache: Cache, grid: Grid, length_R: Tensor, shortest: int, longest: int) -> None:
        """Take `length_R`, own tokens with this one, from `shortest` to `longest`."""
        self._cache = cache
        self._stretches = cache.rows, 0, [1] * len(length_R), False
        self._grid = grid
        self._own_R = length_R - 1
        """Own tokens before this one, so also the slot this one is written to."""
        self._shortest_own, self._longest_own = shortest, longest
        self.position_R = grid.length_R + self._own_R
        self._places: dict[int, Tensor] = {}
        self._biases: dict[tuple[int | None, int, int], tuple[Tensor | None, Tensor | None]] = {}

    def attend(self, layer: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, rule: Rule) -> Tensor:
        prompts, rows, grid = self._cache.prompts, self._cache.rows, self._grid
        num_rows, num_heads = query_BHTD.shape[2], key_BKTD.shape[1]
        place = self._place(num_heads)
        for cached, new_BKTD in ((rows.keys[layer], key_BKTD), (rows.values[layer], value_BKTD)):
            write_tokens(cached, new_BKTD, place)
        query_RHD = (query_BHTD[0].transpose(0, 1) * rule.scaling).to(rows.keys[layer].dtype)
        query_RKQD = query_RHD.unflatten(1, (num_heads, -1))
        prompt_bias, own_bias = self._bias(rule.window, num_heads, query_RKQD.shape[2])

        own, own_logsum = _softmax_part(
            query_RKQD.flatten(0, 1),
            rows.keys[layer][:num_rows].flatten(0, 1),
            rows.values[layer][:num_rows].flatten(0, 1),
            own_bias,
            rule.softcap,
        )
        cells = query_RKQD.index_select(0, grid.row_C).unflatten(0, (grid.num_groups, grid.width)).transpose(1, 2)
        shared, shared_logsum = _softmax_part(
            cells.flatten(2, 3).flatten(0, 1),
            prompts.keys[layer][: grid.num_groups].flatten(0, 1),
            prompts.values[layer][: grid.num_groups].flatten(0, 1),
            prompt_bias,
            rule.softcap,
        )
        both = torch.cat((shared, shared_logsum), dim=-1)
        both = both.view(grid.num_groups, num_heads, grid.width, -1).transpose(1, 2).flatten(0, 1)
        both = both.index_select(0, grid.cell_R).view(len(own), -1, both.shape[-1] // query_RKQD.shape[2])
        share = (both[..., -1:] - own_logsum).sigmoid()
        merged = torch.lerp(own.to(both.dtype), both[..., :-1], share)
        # A sink takes its share of the softmax
        if rule.sink_H is not None:
            logsum = torch.logaddexp(own_logsum, both[..., -1:])
            merged = merged * without_sink(logsum, sinks_of(rule.sink_H, num_rows, num_heads))
        return merged.view(num_rows, -1, merged.shape[-1]).transpose(0, 1)[None].to(query_BHTD.dtype)

    def _place(self, num_heads: int) -> Tensor:
        if num_heads not in self._places:
            self._places[num_heads] = slots_in(self._cache.rows, self._own_R, num_heads)
        return self._places[num_heads]

    def _bias(self, window: int | None, num_heads: int, queries: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the biases of prompt and own tokens, None if unneeded."""
        key = (window, num_heads, queries)
        if key not in self._biases:
            self._biases[key] = (self._prompt_bias(*key), self._own_bias(window, num_heads))
        return self._biases[key]

    def _prompt_bias(self, window: int | None, num_heads: int, queries: int) -> Tensor | None:
        """Return the prompt's bias, (G*K, 1 or W*Q, P)."""
        grid, length = self._grid, self._cache.prompts.length
        position_P = torch.arange(length, device=self._own_R.device)
        seen_GWP = (position_P < grid.length_G[:, None])[:, None]
        if window is not None and window < grid.longest + self._longest_own:
            near_CP = self.position_R[grid.row_C][:, None] - position_P < window
            seen_GWP = seen_GWP & near_CP.unflatten(0, (grid.num_groups, grid.width))
            seen_GWP = seen_GWP.repeat_interleave(queries, dim=1)
        elif grid.shortest == length:
            return None
        return self._hidden(seen_GWP).repeat_interleave(num_heads, dim=0)

    def _own_bias(self, window: int | None, num_heads: int) -> Tensor | None:
        """Return the own tokens' bias, (R * K, 1, S)."""
        length = self._cache.rows.length
        if self._shortest_own == length and (window is None or window >= length):
            return None
        distance_RS = self._own_R[:, None] - torch.arange(length, device=self._own_R.device)
        seen_RS = (distance_RS >= 0) & within(distance_RS, window)
        return self._hidden(seen_RS[:, None]).repeat_interleave(num_heads, dim=0)

    def _hidden(self, seen: Tensor) -> Tensor:
        dtype = self._cache.shape.dtype
        # Finite: where the window hides the whole prompt, -inf would make its softmax NaN instead of irrelevant.
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min / 2)


def slots_in(block: CacheBlock, slot_R: Tensor, num_heads: int) -> Tensor:
    """Return the rows' key lines in a block seen as (holders*heads*length, D)."""
    line = torch.arange(len(slot_R) * num_heads, device=slot_R.device).view(-1, num_heads)
    return (line * block.length + slot_R[:, None]).flatten()


def write_tokens(cached: Tensor, new_BKTD: Tensor, place: Tensor) -> None:
    """Store keys or values of one token per row."""
    new = new_BKTD[0].transpose(0, 1).flatten(0, 1).to(cached.dtype)
    cached.view(-1, cached.shape[-1]).index_copy_(0, place, new)


def sinks_of(sink_H: Tensor, num_rows: int, num_heads: int) -> Tensor:
    """Return the sinks as (R * K, Q, 1)."""
    return sink_H.view(1, num_heads, -1).expand(num_rows, -1, -1).flatten(0, 1)[..., None]


def _softmax_part(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attend to some keys: output (batch, queries, D), log-sum-exp (batch, queries, 1)."""
    if softcap is not None:
        scores = apply_softcap(torch.bmm(query, key.mT), softcap)
        scores = scores if bias is None else scores + bias
    else:
        scores = torch.bmm(query, key.mT) if bias is None else torch.baddbmm(bias, query, key.mT)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    # The largest weight is exp(largest score - logsum): no second pass of exponentials.
    logsum = scores.amax(dim=-1, keepdim=True) - weights.amax(dim=-1, keepdim=True).log()
    return torch.bmm(weights.to(value.dtype), value), logsum
