"""The draw of next tokens as one kernel in Triton.

A program has a row and reads its logits once: of each block of the vocabulary it keeps the largest and a sum. Its
numbers depend on no other row. Import it only where there is Triton.

Shapes: R rows, V vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from covey.policy import sampling

BLOCK = tl.constexpr(sampling.BLOCK)
TILE = tl.constexpr(16)
"""Blocks read at once."""
GOLDEN = tl.constexpr(sampling.GOLDEN)
SHIFT_0, FACTOR_0, SHIFT_1, FACTOR_1 = (tl.constexpr(value) for pair in sampling.ROUNDS for value in pair)
LAST_SHIFT = tl.constexpr(sampling.LAST_SHIFT)


def draw_tempered(logits_RV: Tensor, temperature: float, key_R: Tensor, position_R: Tensor) -> tuple[Tensor, Tensor]:
    """Draw tokens and log-probs (R,) as `sampling.draw` does.

    Uniform numbers are those of `sampling.random_uniform`; rounding is all that differs.
    """
    num_rows, num_tokens = logits_RV.shape
    num_blocks = triton.cdiv(num_tokens, sampling.BLOCK)
    logits_RV = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    token_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    logprob_R = torch.empty(num_rows, dtype=torch.float32, device=logits_RV.device)
    kept_2RN = torch.empty((2, num_rows, num_blocks), dtype=torch.float32, device=logits_RV.device)
    given = logits_RV, key_R, position_R, token_R, logprob_R, *kept_2RN
    sizes = temperature, logits_RV.stride(0), num_tokens, num_blocks
    _draw[(num_rows,)](*given, *sizes, max(16, triton.next_power_of_2(num_blocks)), num_warps=8)
    return token_R, logprob_R


@triton.jit
def _draw(
    logits: Any,
    keys: Any,
    positions: Any,
    tokens: Any,
    logprobs: Any,
    tops: Any,
    masses: Any,
    temperature: Any,
    stride: Any,
    num_tokens: Any,
    num_blocks: Any,
    BLOCKS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    line, tops, masses = logits + row * stride, tops + row * num_blocks, masses + row * num_blocks
    inside = tl.arange(0, BLOCK)
    for first in range(0, num_blocks, TILE):
        block = first + tl.arange(0, TILE)
        place = block[:, None] * BLOCK + inside[None, :]
        x = tl.load(line + place, mask=place < num_tokens, other=-float("inf")).to(tl.float32) / temperature
        top = tl.max(x, axis=1)
        below = x - tl.where(top == -float("inf"), 0.0, top)[:, None]
        tl.store(tops + block, top, mask=block < num_blocks)
        tl.store(masses + block, tl.sum(tl.exp(below), axis=1), mask=block < num_blocks)
    tl.debug_barrier()  # other threads read what was stored
    block = tl.arange(0, BLOCKS)
    top = tl.load(tops + block, mask=block < num_blocks, other=-float("inf"))
    largest = tl.max(top, axis=0)
    mass = tl.load(masses + block, mask=block < num_blocks, other=0.0) * tl.exp(top - largest)
    uniform = _uniform(tl.load(keys + row), tl.load(positions + row))
    chosen, rest = _invert(mass.to(tl.float64), block, uniform, BLOCKS)
    place = chosen * BLOCK + inside
    x = tl.load(line + place, mask=place < num_tokens, other=-float("inf")).to(tl.float32) / temperature
    found, _ = _invert(tl.exp(x - largest).to(tl.float64), inside, rest, BLOCK)
    at = tl.sum(tl.where(inside == found, x, 0.0), axis=0)
    tl.store(tokens + row, chosen.to(tl.int64) * BLOCK + found)
    tl.store(logprobs + row, at - largest - tl.log(tl.sum(mass, axis=0)))


@triton.jit
def _uniform(key: Any, position: Any) -> Any:
    """Compute `sampling.random_uniform`; shifts of unsigned numbers are logical."""
    mixed = key.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64, bitcast=True) * GOLDEN
    mixed = (mixed ^ (mixed >> SHIFT_0)) * FACTOR_0
    mixed = (mixed ^ (mixed >> SHIFT_1)) * FACTOR_1
    mixed = mixed ^ (mixed >> LAST_SHIFT)
    return (mixed >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _invert(weight: Any, index: Any, uniform: Any, SIZE: tl.constexpr) -> Any:
    """Compute `sampling._invert` of one row; 0 where a weight is no number."""
    summed = tl.where(weight > 0, tl.cumsum(weight, axis=0), 0.0)
    total = tl.max(summed, axis=0)
    target = tl.minimum(uniform * total, total - total * 2.220446049250313e-16)
    chosen = tl.min(tl.where(summed > target, index, SIZE), axis=0)
    chosen = tl.where(chosen < SIZE, chosen, 0)
    own = tl.sum(tl.where(index == chosen, weight, 0.0), axis=0)
    upper = tl.sum(tl.where(index == chosen, summed, 0.0), axis=0)
    return chosen, tl.minimum(tl.maximum((target - upper + own) / own, 0.0), 1.0)
