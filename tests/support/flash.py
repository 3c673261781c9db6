"""Stand-ins for attention over cached rows, in any type on any device."""

from typing import Any

import torch
from torch import Tensor

from covey.policy.attention.base import Rule, causal_attention
from covey.policy.kernels.gpu.tiles import Tiles


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, query_end: Tensor, first_key: Tensor, *plain: Any, **named: Any
) -> tuple[Tensor]:
    """Do in float64 what FlashAttention does with one query a sequence, by the very strides it is given."""
    assert plain[0] == 1
    assert plain[2:] == (0.0, False, False)
    assert query_end.tolist() == list(range(len(query) + 1))
    assert all(ints.dtype == torch.int32 for ints in (query_end, first_key, named["seqused_k"]))
    out, group = torch.empty_like(query), query.shape[1] // key.shape[1]
    for row, length in enumerate(named["seqused_k"].tolist()):
        start = int(first_key[row])
        own_keys, own_values = (x[start : start + length].repeat_interleave(group, dim=1) for x in (key, value))
        score_HS = torch.einsum("hd,shd->hs", query[row], own_keys) * named["scale"]
        if named["window_size_left"] >= 0:
            score_HS[:, : max(0, length - 1 - named["window_size_left"])] = -torch.inf
        out[row] = torch.einsum("hs,shd->hd", score_HS.softmax(dim=-1), own_values)
    return (out,)


def cascade_attend(
    tiles: Tiles,
    query: Tensor,
    shared: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    position_B: Tensor,
    rule: Rule,
) -> Tensor:
    """Do in plain operations what `Tiles.attend` does, by the very tables it is given."""
    out = torch.zeros_like(query)
    prompts = dict.fromkeys(range(len(query)), (0, 0))
    for group, length, rows in zip(tiles.group_T.tolist(), tiles.length_T.tolist(), tiles.row_TW.tolist(), strict=True):
        prompts |= {row: (group, length) for row in rows if row >= 0}
    for row, (group, length) in prompts.items():
        start, end = int(tiles._prompt_B[row]), int(position_B[row]) + 1
        keys, values = (
            torch.cat((of[group, :, :length], mine[row, :, start:end]), dim=1)[None]
            for of, mine in zip(shared, own, strict=True)
        )
        out[row] = causal_attention(query[row : row + 1, :, None], keys, values, rule)[0, :, 0]
    return out
