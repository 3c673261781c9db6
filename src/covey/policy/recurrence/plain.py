"""Compute recurrence and convolution in torch, on any device.

Segments of one depth and of similar length are one rectangle, whose chunks are computed one after the other: within a
chunk by products, between chunks through the state (arXiv 2406.06484, 2405.21060). A decay is the exponential of a sum
over just the tokens that it spans, so a small one is not lost beside a large one. With flash-linear-attention
installed, it scans rectangles of half precision on CUDA.

Shapes: those of base.py; R segments of a rectangle, Q tokens of the longest, L tokens of a chunk.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from covey.policy.attention.packed import StreamSegment, in_rectangles
from covey.policy.policy import to_device
from covey.policy.recurrence.base import Holders, Recurrence

CHUNK = 64
CHANNEL_CHUNK = 16
"""Tokens of a chunk where each channel decays at its own rate: the decays are L x L x N numbers of a head."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""Queries, keys, values, decays and rates of beta, (R, H, tokens, width); rates are of width 1."""


def gated_scan(given: Recurrence, rows_S3: Tensor, holders: Holders | None = None) -> Tensor:
    """Return the recurrence over a forest of segments: (T, H, P), float32.

    The segments cover the stream. All holders are read before one is written, each by one segment at most.
    """
    read_S = [-1] * len(rows_S3) if holders is None else holders.read_S.tolist()
    rows = rows_S3.tolist()
    (_, num_heads, value_width), wide = given.value_THP.shape, _wide(given.value_THP)
    states = {-1: given.value_THP.new_zeros(num_heads, given.key_TKN.shape[2], value_width, dtype=wide)}
    held = {place: holders.state_MHNP[read].to(wide) for place, read in enumerate(read_S) if holders and read >= 0}
    buckets = _buckets(rows)
    padded, order_T = in_rectangles([[StreamSegment(*rows[place][:2]) for place in bucket] for bucket in buckets])
    outs = []
    for bucket, (position_RQ, real_RQ) in zip(buckets, padded, strict=True):
        before_RHNP = torch.stack([held.get(place, states[rows[place][2]]) for place in bucket])
        inputs = _rectangle(given, position_RQ, real_RQ)
        with torch.autocast(before_RHNP.device.type, enabled=False):
            out_RHQP, after_RHNP = _scan(inputs, before_RHNP, given.value_THP.dtype)
        outs.append(out_RHQP.transpose(1, 2).flatten(0, 1))
        states |= dict(zip(bucket, after_RHNP.unbind(), strict=True))
    if holders is not None:
        _write(holders.state_MHNP, holders.write_S, [states[place] for place in range(len(rows))])
    return torch.cat(outs).index_select(0, to_device(order_T, given.value_THP.device))


def causal_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    rows_S3: Tensor,
    holders: Holders | None = None,
    silu: bool = False,
) -> Tensor:
    """Convolve channels causally over a forest of segments: (T, C).

    Holders keep the last W - 1 inputs, (M, W - 1, C). The result has the type of x.
    """
    rows, width, wide = rows_S3.tolist(), weight_CW.shape[1], _wide(x_TC)
    read_S = [-1] * len(rows) if holders is None else holders.read_S.tolist()
    held = [holders.state_MHNP[read] for read in read_S if holders and read >= 0]
    sources_WT = to_device(_sources(rows, read_S, width, len(x_TC)), x_TC.device)
    seen_C = torch.cat([x_TC.new_zeros(1, x_TC.shape[1]), *held, x_TC]).to(wide)
    out_TC = x_TC.new_zeros(x_TC.shape, dtype=wide) if bias_C is None else bias_C.to(wide).expand(x_TC.shape)
    for weight_C, source_T in zip(weight_CW.to(wide).unbind(1), sources_WT, strict=True):
        out_TC = out_TC + weight_C * seen_C.index_select(0, source_T)
    if holders is not None:
        last_S = [start + length - 1 for start, length, _ in rows]
        _write(holders.state_MHNP, holders.write_S, seen_C[sources_WT[1:, last_S].T].unbind())
    return (functional.silu(out_TC) if silu else out_TC).to(x_TC.dtype)


def _buckets(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return places of segments of similar depth and length, by depth."""
    depths: dict[int, int] = {-1: -1}
    buckets: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, (_, length, parent) in enumerate(rows):
        depths[place] = depths[parent] + 1
        buckets[depths[place], length.bit_length()].append(place)
    return [buckets[key] for key in sorted(buckets)]


def _rectangle(given: Recurrence, position_RQ: Tensor, real_RQ: Tensor) -> Inputs:
    """Return inputs of a rectangle.

    They are 0 on its padding, which leaves states as they are.
    """
    wide, shared = _wide(given.value_THP), given.value_THP.shape[1] // given.key_TKN.shape[1]
    position_RQ, real_RQ = (to_device(places, given.value_THP.device) for places in (position_RQ, real_RQ))

    def take(values_THX: Tensor) -> Tensor:
        taken = values_THX.index_select(0, position_RQ.flatten()).unflatten(0, position_RQ.shape).to(wide)
        return taken.where(real_RQ[..., None, None], 0).transpose(1, 2)

    query, key = (take(values).repeat_interleave(shared, 1) for values in (given.query_TKN, given.key_TKN))
    beta = None if given.beta_TH is None else take(given.beta_TH[..., None])
    return query, key, take(given.value_THP), take(given.decay_THX), beta


def _scan(inputs: Inputs, state_RHNP: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return outputs of a rectangle and the states after it.

    `dtype` is that of the values before they were widened.
    """
    query, key, value, decay, beta = inputs
    if query.shape[2] == 1:
        return _step(inputs, state_RHNP)
    by_channel = decay.shape[3] > 1
    if query.is_cuda and dtype in HALF and (by_channel, beta is not None) in FUSED and find_spec("fla") is not None:
        return _scan_by_fla(inputs, state_RHNP, dtype)
    # Decays by channel are computed a second time in the backward pass instead of kept.
    chunk = partial(checkpoint, _chunk, use_reentrant=False) if by_channel else _chunk
    length, outs = CHANNEL_CHUNK if by_channel else CHUNK, []
    pieces = [each.split(length, 2) for each in (query, key, value, decay)]
    rates = [None] * len(pieces[0]) if beta is None else beta.split(length, 2)
    for *piece, rate in zip(*pieces, rates, strict=True):
        out_RHLP, state_RHNP = chunk((*piece, rate), state_RHNP)
        outs.append(out_RHLP)
    return torch.cat(outs, 2), state_RHNP


def _chunk(inputs: Inputs, state_RHNP: Tensor) -> tuple[Tensor, Tensor]:
    query, key, value, decay, beta = inputs
    # [i, j]: the decay between tokens j and i, of all tokens after j
    later_LL = torch.ones(key.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril(-1)
    steps_RHLLX = decay[:, :, :, None].where(later_LL[..., None], 0).cumsum(2)
    steps_RHLLX = steps_RHLLX.masked_fill(later_LL.T[..., None], -torch.inf).exp()
    first_RHLX, last_RHLX = decay.cumsum(2).exp(), steps_RHLLX[:, :, -1]
    if beta is not None:
        value = beta * (value - (key * first_RHLX) @ state_RHNP)
        system_RHLL = beta * _products(key, key, steps_RHLLX)
        value = torch.linalg.solve_triangular(system_RHLL, value, upper=False, unitriangular=True)
    out = (query * first_RHLX) @ state_RHNP + _products(query, key, steps_RHLLX) @ value
    return out, first_RHLX[:, :, -1, :, None] * state_RHNP + (key * last_RHLX).transpose(2, 3) @ value


def _products(a_RHLN: Tensor, b_RHLN: Tensor, steps_RHLLX: Tensor) -> Tensor:
    """Return products of each two rows, decayed by the steps between."""
    if steps_RHLLX.shape[4] == 1:
        return (a_RHLN @ b_RHLN.transpose(2, 3)) * steps_RHLLX[..., 0]
    return (a_RHLN[:, :, :, None] * b_RHLN[:, :, None] * steps_RHLLX).sum(4)


def _step(inputs: Inputs, state_RHNP: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of one token and the state after it."""
    query, key, value, decay, beta = inputs
    state_RHNP = decay.exp().transpose(2, 3) * state_RHNP
    if beta is not None:
        value = beta * (value - key @ state_RHNP)
    state_RHNP = state_RHNP + key.transpose(2, 3) * value
    return query @ state_RHNP, state_RHNP


def _scan_by_fla(inputs: Inputs, state_RHNP: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `_scan` by flash-linear-attention, whose heads stand behind tokens."""
    query, key, value = (each.transpose(1, 2).to(dtype) for each in inputs[:3])
    decay, beta = inputs[3].transpose(1, 2), inputs[4]
    module, name = FUSED[decay.shape[3] > 1, beta is not None]
    rates = {} if beta is None else {"beta": beta[..., 0].transpose(1, 2)}
    out_RQHP, state_RHNP = getattr(import_module(f"fla.ops.{module}"), name)(
        *(query, key, value, decay if decay.shape[3] > 1 else decay[..., 0]),
        **rates,
        scale=1.0,
        initial_state=state_RHNP,
        output_final_state=True,
    )
    return out_RQHP.transpose(1, 2).float(), state_RHNP


def _sources(rows: Sequence[Sequence[int]], read_S: Sequence[int], width: int, num_tokens: int) -> Tensor:
    """Return the inputs that each token sees, (W, T), oldest first.

    They are places in zeros, held inputs and the stream, one after the other.
    """
    before = 1 + (width - 1) * sum(read >= 0 for read in read_S)
    previous = torch.arange(before + num_tokens) - 1
    previous[0], held = 0, 1
    for (start, _, parent), read in zip(rows, read_S, strict=True):
        previous[before + start] = 0 if parent < 0 else before + rows[parent][0] + rows[parent][1] - 1
        if read >= 0:
            previous[held], previous[before + start], held = 0, held + width - 2, held + width - 1
    sources = [torch.arange(before, before + num_tokens)]
    for _ in range(width - 1):
        sources.append(previous[sources[-1]])
    return torch.stack(sources[::-1])


def _write(kept: Tensor, write_S: Tensor, states: Sequence[Tensor]) -> None:
    """Write states to their holders, in place."""
    written = [(place, state.detach()) for place, state in zip(write_S.tolist(), states, strict=True) if place >= 0]
    if written:
        places, values = zip(*written, strict=True)
        kept.index_copy_(0, to_device(places, kept.device, torch.int64), torch.stack(values).to(kept.dtype))


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the type that a tensor is computed in."""
    return torch.promote_types(tensor.dtype, torch.float32)


HALF = (torch.bfloat16, torch.float16)
FUSED = {
    (False, False): ("simple_gla", "chunk_simple_gla"),
    (False, True): ("gated_delta_rule", "chunk_gated_delta_rule"),
    (True, True): ("kda", "chunk_kda"),
}
"""Modules and functions of flash-linear-attention: (decay by channel, delta rule)."""
