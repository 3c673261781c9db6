"""From logits to tokens: the distribution, and the draw. Pure functions.

The trainer scores with `filtered_logprobs` too, so what was sampled is what is trained.

Shapes: R rows (one next token each), V vocabulary, K most likely tokens in falling order, N weights.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from covey.algorithm.softmax import log_softmax
from covey.policy.policy import to_device
from covey.types import Sampling

Distribution = tuple[float, int, float, float]
"""(temperature, top_k, top_p, min_p): all that shapes the distribution of a row."""

SampleAlike = Callable[[Tensor, Distribution, Tensor], tuple[Tensor, Tensor]]
"""(logits_RV, distribution, uniform_R) -> token_R, logprob_R."""

MASK_64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31
"""Constants of splitmix64 (Steele, Lea, Flood, OOPSLA 2014): shift and multiplier of each round, and the last shift."""

BLOCK = 512
"""Vocabularies longer than this are searched in two levels: block, then token."""


def row_key(seed: int, sample_index: int) -> int:
    """Return the key of a rollout's random numbers, a signed 64-bit number.

    Neighbouring seeds or indices are unrelated.
    """
    return _to_signed(_scramble(_scramble(seed) + (sample_index + 1) * GOLDEN))


def random_uniform(key_R: Tensor, position_R: Tensor) -> Tensor:
    """Return uniform numbers in [0, 1), float64 (R,), by key and position.

    Splitmix64 with the position as its counter: a row's numbers depend neither on neighbours nor on history.
    """
    mixed_R = key_R + (position_R + 1) * _to_signed(GOLDEN)
    for shift, multiplier in ROUNDS:
        mixed_R = (mixed_R ^ _shift_right(mixed_R, shift)) * _to_signed(multiplier)
    mixed_R = mixed_R ^ _shift_right(mixed_R, LAST_SHIFT)
    return _shift_right(mixed_R, 11).to(torch.float64) * 2.0**-53


def uniform(key: int, position: int) -> float:
    """Return the number of `random_uniform` for one row, on the host."""
    return (_scramble(key + (position + 1) * GOLDEN) >> 11) * 2.0**-53


def kept_mask(
    logits_RV: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor | None:
    """Return a mask (R, V) of the tokens to draw from, None: all.

    Order: temperature, top-k, top-p (smallest set whose mass reaches top_p), min-p. The most likely token is always
    kept. Ties of logits at a boundary keep the lower token ids, so that the set has exactly the requested size.
    """
    return _keep_mask(_scale(logits_RV, temperature), top_k, top_p, min_p)


def allowed_with(logits_RV: Tensor, token_R: Tensor, sampling: Sampling) -> Tensor:
    """Return the mask of drawable tokens and `token_R`, (R, V)."""
    kept_RV = kept_mask(logits_RV, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    if kept_RV is None:
        return torch.ones_like(logits_RV, dtype=torch.bool)
    return kept_RV.scatter(1, token_R[:, None], True)


def filter_logits(
    logits_RV: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Return tempered logits in float32 at least, -inf outside the kept set."""
    scaled_RV = _scale(logits_RV, temperature)
    kept_RV = _keep_mask(scaled_RV, top_k, top_p, min_p)
    return scaled_RV if kept_RV is None else scaled_RV.masked_fill(~kept_RV, -torch.inf)


def filtered_logprobs(
    logits_RV: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Return log-probs (R, V), renormalised over the kept set.

    At temperature 0 (greedy) they are those of temperature 1. Gradients flow to the logits of kept tokens.
    """
    return log_softmax(filter_logits(logits_RV, temperature, top_k, top_p, min_p))


def chosen_logprobs(logits_LV: Tensor, target_L: Tensor, sampling: Sampling, kept_LV: Tensor | None = None) -> Tensor:
    """Return log-probs of the targets under `sampling`; greedy ones at temperature 1.

    `kept_LV` replaces the filters on these logits.
    """
    if kept_LV is None and sampling.filters:
        kept_LV = allowed_with(logits_LV.detach(), target_L, sampling)
    if kept_LV is not None:
        logits_LV = logits_LV.masked_fill(~kept_LV, -torch.inf)
    return _at(log_softmax(_scale(logits_LV, sampling.temperature)), target_L)


def draw(logprobs_RV: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token per row by inverse transform: int64 (R,), log-probs (R,).

    Sums are float64, and a token of probability zero is never drawn.
    """
    weight_RV = logprobs_RV.exp()
    num_tokens = weight_RV.shape[-1]
    if num_tokens <= BLOCK:
        token_R, _ = _invert(weight_RV.to(torch.float64), uniform_R)
    else:
        padding = -num_tokens % BLOCK
        padded_RV = torch.nn.functional.pad(weight_RV, (0, padding)) if padding else weight_RV
        blocks_RNB = padded_RV.unflatten(-1, (-1, BLOCK))
        block_R, rest_R = _invert(blocks_RNB.sum(dim=-1).to(torch.float64), uniform_R)
        rows_R = torch.arange(len(block_R), device=block_R.device)
        inside_R, _ = _invert(blocks_RNB[rows_R, block_R].to(torch.float64), rest_R)
        token_R = block_R * BLOCK + inside_R
    return token_R, _at(logprobs_RV, token_R)


def sample_same_params(logits_RV: Tensor, distribution: Distribution, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Draw tokens and log-probs for rows with one distribution."""
    logprobs_RV = filtered_logprobs(logits_RV, *distribution)
    if distribution[0] > 0:
        return draw(logprobs_RV, uniform_R)
    token_R = logits_RV.argmax(dim=-1)
    return token_R, _at(logprobs_RV, token_R)


def sample(
    logits_RV: Tensor,
    parts: Sequence[tuple[Distribution, Tensor | None]],
    uniform_R: Tensor,
    alike: SampleAlike = sample_same_params,
) -> tuple[Tensor, Tensor]:
    """Draw tokens and log-probs; `parts` are the rows of each distribution (`partition`)."""
    if len(parts) == 1 and parts[0][1] is None:
        return alike(logits_RV, parts[0][0], uniform_R)
    token_R = torch.empty(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    logprob_R = torch.empty_like(uniform_R)
    for distribution, rows in parts:
        token, logprob = alike(logits_RV[rows], distribution, uniform_R[rows])
        token_R[rows], logprob_R[rows] = token, logprob.to(logprob_R.dtype)
    return token_R, logprob_R


def partition(samplings: Iterable[Sampling], device: torch.device) -> list[tuple[Distribution, Tensor | None]]:
    """Return row indices by distribution; None stands for all rows."""
    rows_of: dict[Distribution, list[int]] = {}
    for row, sampling in enumerate(samplings):
        key = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        rows_of.setdefault(key, []).append(row)
    if len(rows_of) == 1:
        return [(next(iter(rows_of)), None)]
    return [(key, to_device(rows, device)) for key, rows in rows_of.items()]


def _scale(logits_RV: Tensor, temperature: float) -> Tensor:
    wide_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    return wide_RV if temperature in (0.0, 1.0) else wide_RV / temperature


@torch.no_grad()
def _keep_mask(scaled_RV: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor | None:
    kept_RV = None
    num_tokens = scaled_RV.shape[-1]
    if 0 < top_k < num_tokens or top_p < 1:
        cut = 0 < top_k < num_tokens
        value_RK = scaled_RV.topk(top_k).values if cut else scaled_RV.sort(dim=-1, descending=True).values
        kept_RV = _first(scaled_RV, value_RK, _num_kept(value_RK, top_p))
    if min_p > 0:
        likely_RV = scaled_RV >= scaled_RV.amax(dim=-1, keepdim=True) + math.log(min_p)
        kept_RV = likely_RV if kept_RV is None else kept_RV & likely_RV
    return kept_RV


def _num_kept(value_RK: Tensor, top_p: float) -> Tensor:
    """Count the sorted values that make up the mass top_p, (R, 1)."""
    if top_p >= 1:
        return torch.full((len(value_RK), 1), value_RK.shape[-1], device=value_RK.device)
    probability_RK = log_softmax(value_RK).exp()
    mass_before_RK = probability_RK.cumsum(dim=-1) - probability_RK
    # One at least, also of what is no number: an index of -1 would end a GPU's process before anybody can say why.
    return (mass_before_RK < top_p).sum(dim=-1, keepdim=True).clamp(min=1)


def _first(scaled_RV: Tensor, value_RK: Tensor, num_kept_R1: Tensor) -> Tensor:
    """Return a mask of the `num_kept_R1` largest; lower ids win ties."""
    last_R1 = value_RK.gather(-1, num_kept_R1 - 1)
    above_RV = scaled_RV > last_R1
    tied_RV = scaled_RV == last_R1
    room_R1 = num_kept_R1 - above_RV.sum(dim=-1, keepdim=True)
    return above_RV | (tied_RV & (tied_RV.cumsum(dim=-1, dtype=torch.int32) <= room_R1))


def _invert(weight_RN: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return each uniform number's weighted index, and its uniform place within."""
    # Zero weights are struck out: a parallel cumulative sum need not be monotone to the last bit.
    summed_RN = weight_RN.cumsum(dim=-1).masked_fill(weight_RN <= 0, 0.0)
    total_R = summed_RN.amax(dim=-1)
    # Rounding may lift uniform * total to total, beyond which there is no token.
    target_R = torch.minimum(uniform_R * total_R, torch.nextafter(total_R, torch.zeros_like(total_R)))
    index_R = (summed_RN > target_R[:, None]).to(torch.uint8).argmax(dim=-1)
    weight_R, summed_R = _at(weight_RN, index_R), _at(summed_RN, index_R)
    return index_R, ((target_R - summed_R + weight_R) / weight_R).clamp(0.0, 1.0)


def _at(values_RN: Tensor, index_R: Tensor) -> Tensor:
    return values_RN.gather(-1, index_R[:, None])[:, 0]


def _shift_right(value_R: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's >> on int64 copies the sign bit."""
    return (value_R >> bits) & ((1 << (64 - bits)) - 1)


def _scramble(value: int) -> int:
    """Splitmix64's output function on the low 64 bits."""
    value &= MASK_64
    for shift, multiplier in ROUNDS:
        value = ((value ^ (value >> shift)) * multiplier) & MASK_64
    return value ^ (value >> LAST_SHIFT)


def _to_signed(value: int) -> int:
    """Return the int64 with the same bits."""
    value &= MASK_64
    return value - (1 << 64) if value >> 63 else value
