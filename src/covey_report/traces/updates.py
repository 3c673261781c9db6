"""A line of updates.jsonl: distributions of a step, by prompt too. docs/develop/traces.md describes the format."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from covey.algorithm.credit.groups import Credit
from covey.run.records.rollout_log import spread
from covey.system import collectives
from covey.system.text.format import four_digits, timestamp
from covey.types import Group
from covey_report.traces.token_scores import StepScores

FORMAT = 1
"""Version of traces.jsonl and updates.jsonl; it grows where a reader of the last one would misread the next."""
NUM_BINS = 20
GAP_EDGES = (0.0, *(10.0**exponent for exponent in torch.linspace(-8, 1, NUM_BINS).tolist()))
"""|trainer - sampler|, nats: rounding lies at the left, old weights at the right."""
LOG_RATIO_EDGES = tuple(0.05 * place for place in range(-10, 11))
ENTROPY_EDGES = tuple(10 * (place / NUM_BINS) ** 2 for place in range(NUM_BINS + 1))
"""Nats; finer where little entropy is left."""
HISTOGRAM_BYTES = 2500
"""Approximate bytes of a line without its groups."""


@dataclass(frozen=True, slots=True)
class _Share:
    """One rank's data of a step, exchanged by ranks."""

    groups: list[tuple[str, list[float]]]
    advantages: list[float]
    lengths: list[int]
    counts: Mapping[str, list[int]]


def update_row(
    step: int, groups: Sequence[Group], credit: Credit, scores: StepScores, max_tokens: int
) -> dict[str, Any]:
    """Describe a step of all ranks, completions up to `max_tokens`. Collective."""
    shares = collectives.all_gather(_own_share(groups, credit, scores))
    all_groups = [group for share in shares for group in share.groups]
    rewards = [reward for _, of_group in all_groups for reward in of_group]
    advantages = [value for share in shares for value in share.advantages]
    histograms = {
        "reward": _spread_out(rewards),
        "advantage": _spread_out(advantages),
        "length": _bin([n for share in shares for n in share.lengths], _equal_edges(0, max(max_tokens, 1))),
    }
    for name, edges in TOKEN_EDGES.items():
        counts = [sum(column) for column in zip(*(share.counts[name] for share in shares), strict=True)]
        histograms[name] = {"edges": [four_digits(edge) for edge in edges], "counts": counts}
    return {
        "format": FORMAT,
        "step": step,
        "kind": "train",
        "time": timestamp(),
        "histograms": histograms,
        "num_groups": len(all_groups),
        "groups": [{"prompt_id": name, "rewards": [four_digits(r) for r in of_group]} for name, of_group in all_groups],
    }


def fitting(groups: Sequence[Mapping[str, Any]], num_bytes: int) -> list[Mapping[str, Any]]:
    """Choose as many entries as `num_bytes` hold, evenly spread."""
    largest = max((len(json.dumps(entry, default=str)) + 2 for entry in groups), default=1)
    return [groups[place] for place in spread(len(groups), (num_bytes - HISTOGRAM_BYTES) // largest)]


TOKEN_EDGES: dict[str, tuple[float, ...]] = {
    "mismatch": GAP_EDGES,
    "log_ratio": LOG_RATIO_EDGES,
    "entropy": ENTROPY_EDGES,
}
"""Histograms of tokens, whose edges are the same in every run, so that ranks, steps and runs compare."""


def _own_share(groups: Sequence[Group], credit: Credit, scores: StepScores) -> _Share:
    values = {"mismatch": scores.gaps(), "log_ratio": scores.log_ratios(), "entropy": scores.entropies()}
    return _Share(
        groups=[(group.prompt.id, list(group.rewards)) for group in groups],
        advantages=[value for of_group in credit.advantages for value in of_group],
        lengths=[rollout.num_loss_tokens for group in groups for rollout in group.rollouts],
        counts={name: count_in_bins(found_L, TOKEN_EDGES[name]) for name, found_L in values.items()},
    )


def count_in_bins(values_L: Tensor, edges: Sequence[float]) -> list[int]:
    """Count values between edges, outliers in the end bins, NaN nowhere.

    >>> count_in_bins(torch.tensor([-1.0, 0.5, 0.5, 7.0]), (0.0, 1.0, 2.0))
    [3, 1]
    """
    inner = torch.tensor(edges[1:-1], dtype=torch.float64, device=values_L.device)
    places_L = torch.bucketize(values_L[~values_L.isnan()].double(), inner, right=True)
    return torch.bincount(places_L, minlength=len(edges) - 1).tolist()


def _bin(values: Sequence[float], edges: Sequence[float]) -> dict[str, Any]:
    counts = count_in_bins(torch.tensor(values, dtype=torch.float64), edges)
    return {"edges": [four_digits(edge) for edge in edges], "counts": counts}


def _spread_out(values: Sequence[float]) -> dict[str, Any]:
    """Count values over a round range that includes 0."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = 0.0 - _round_up(-min([0.0, *finite])), _round_up(max([0.0, *finite]))
    return _bin(finite, _equal_edges(low, high if high > low else low + 1.0))


def _equal_edges(low: float, high: float) -> list[float]:
    return [low + (high - low) * place / NUM_BINS for place in range(NUM_BINS + 1)]


def _round_up(value: float) -> float:
    """Round up to 0, ..., 1, 2, 5, 10, 20, ...

    >>> [_round_up(value) for value in (0.3, 1.0, 3.0)]
    [0.5, 1.0, 5.0]
    """
    if value <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))
