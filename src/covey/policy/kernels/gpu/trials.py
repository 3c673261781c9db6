"""Kernels in Triton, each tried beside plain operations before it is used.

A compiler on a user's machine may refuse what another took: torch computes in its place then, with a warning.
"""

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from covey.policy.attention.base import Rule, causal_attention
from covey.policy.kernels.gpu.tiles import MOST_QUERIES, Tiles
from covey.policy.sampling import random_uniform, sample_same_params

LOGGER = logging.getLogger(__name__)
TOLERANCE = 0.02
"""Largest difference of a kernel's numbers, of about 1 in half precision."""


@cache
def computes(kernel: str, device: torch.device, *shape: Any) -> bool:
    """Return True where `kernel` of TRIALS gives the right numbers here."""
    if find_spec("triton") is None:
        return False
    try:
        gap = TRIALS[kernel](device, *shape)
    except Exception as error:  # of any kind: it is a compiler's
        LOGGER.warning("%s runs as operations of torch, slower: %s", kernel, " ".join(str(error).split())[:200])
        return False
    if gap > TOLERANCE:
        LOGGER.warning("%s runs as operations of torch, slower: its kernel is wrong by %.2g", kernel, gap)
    return gap <= TOLERANCE


def try_draw(device: torch.device) -> float:
    """Return the difference of log-probs, infinite where a token is another."""
    from covey.policy.kernels.gpu.draws import draw_tempered

    logits_RV, row_R = 4 * _numbers(device, 8, 2000), torch.arange(8, device=device)
    found = draw_tempered(logits_RV, 0.7, row_R * 7919, row_R)
    wanted = sample_same_params(logits_RV, (0.7, 0, 1.0, 0.0), random_uniform(row_R * 7919, row_R))
    return float((found[1] - wanted[1]).abs().max()) if torch.equal(found[0], wanted[0]) else torch.inf


def try_cascade(device: torch.device, dtype: torch.dtype, num_heads: int, queries: int, width: int) -> float:
    """Return the difference of ten rows of two prompts."""
    if queries > MOST_QUERIES:
        return torch.inf
    prompts = [(0, 150)] * 9 + [(1, 3)]
    shared = [_numbers(device, 2, num_heads, 160, width).to(dtype) for _ in range(2)]
    own = [_numbers(device, 10, num_heads, 320, width).to(dtype) for _ in range(2)]
    query = 3 * _numbers(device, 10, num_heads * queries, width).to(dtype)
    tiles, rule = Tiles(10, device), Rule(width**-0.5, None)
    tiles.write(prompts)
    position_B = torch.arange(10, device=device) * 13 + torch.tensor([n for _, n in prompts], device=device)
    found = tiles.attend(query, (shared[0], shared[1]), (own[0], own[1]), position_B, rule)
    gaps = []
    for row, (group, length) in enumerate(prompts):
        end = int(position_B[row]) + 1
        keys, values = (
            torch.cat((of[group, :, :length], mine[row, :, length:end]), dim=1)[None].float()
            for of, mine in zip(shared, own, strict=True)
        )
        wanted = causal_attention(query[row : row + 1, :, None].float(), keys, values, rule)
        gaps.append(float((found[row].float() - wanted[0, :, 0]).abs().max()))
    return max(gaps)


def _numbers(device: torch.device, *size: int) -> Tensor:
    """Return numbers within -1 and 1, the same everywhere."""
    count = torch.Size(size).numel()
    return (torch.arange(count, device=device, dtype=torch.float64) ** 1.5).sin().float().view(size)


TRIALS: dict[str, Callable[..., float]] = {"draw": try_draw, "cascade": try_cascade}
