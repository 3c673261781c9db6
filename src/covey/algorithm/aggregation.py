"""Reduce token losses to one number, with weights from global totals.

Losses of micro-batches therefore add up, and any split of the batch gives the same gradient. Never divide by the
number of micro-batches; where gradients are averaged over W ranks, multiply the local loss by W.
Notation: N rollouts, T loss-token positions after padding.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.algorithm.loss_inputs import select


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The counts of one optimiser step, over all micro-batches and ranks.

    >>> StepCounts(num_tokens=4096, num_sequences=63, num_rows=64)
    """

    num_tokens: int
    """Loss tokens."""
    num_sequences: int
    """Rollouts with at least one loss token."""
    num_rows: int
    """All rollouts."""
    taught: tuple[int, int] = (0, 0)
    """Loss tokens that have a teacher, and their sequences."""
    supervised: tuple[int, int] = (0, 0)
    """Tokens that are learnt as they are, and their answers."""

    def of(self, part: str) -> "StepCounts":
        """Return the counts of `taught` or `supervised` tokens alone."""
        tokens, sequences = {"taught": self.taught, "supervised": self.supervised}[part]
        return StepCounts(tokens, sequences, self.num_rows if part == "taught" else sequences)


@dataclass(frozen=True, slots=True)
class Reduction:
    """A named aggregation with its settings.

    >>> Reduction("seq_mean_token_sum_norm", norm_length=256)
    """

    mode: str = "token_mean"
    """A key of AGGREGATIONS, or the name of `custom`."""
    norm_length: int | None = None
    """Tokens; the constant length of the *_norm modes."""
    count_empty: bool = False
    """Sequence means divide by all rows, not only by those with loss tokens."""
    custom: Callable[[Tensor, "Denominators"], Tensor] | None = None
    """A custom function, in place of an entry of AGGREGATIONS."""


@dataclass(frozen=True, slots=True)
class Denominators:
    """The possible divisors of an aggregation, each at least 1."""

    tokens: int
    sequences: int
    length: int


def count_totals(mask_NT: Tensor) -> StepCounts:
    """Count these rows alone, without other micro-batches and ranks."""
    counts_N = mask_NT.sum(1)
    return StepCounts(int(counts_N.sum()), int((counts_N > 0).sum()), mask_NT.shape[0])


def aggregate(values_NT: Tensor, mask_NT: Tensor, totals: StepCounts, reduction: Reduction) -> Tensor:
    """Return this micro-batch's share of the loss, a scalar.

    It is attached to the graph even without valid tokens.
    ValueError where a *_norm mode has no norm_length. A per-sequence loss stands at each of its tokens, so that
    `seq_mean` is its mean over sequences and `seq_sum` its sum.
    """
    sequences = totals.num_rows if reduction.count_empty else totals.num_sequences
    denominators = Denominators(max(totals.num_tokens, 1), max(sequences, 1), _length(reduction))
    counts_N = mask_NT.sum(1).to(values_NT.dtype)
    weights_N = (reduction.custom or AGGREGATIONS[reduction.mode])(counts_N, denominators)
    return (weights_N * select(values_NT, mask_NT).sum(1)).sum()


def divisor(reduction: Reduction) -> str:
    """Return the name of the `StepCounts` field that an aggregation divides by.

    "" for none, the mode for a custom one.
    """
    if reduction.mode.startswith("seq_mean"):
        return "num_rows" if reduction.count_empty else "num_sequences"
    return {"token_mean": "num_tokens"}.get(reduction.mode, reduction.mode if ":" in reduction.mode else "")


def _length(reduction: Reduction) -> int:
    if ":" in reduction.mode:  # it may divide by a length or not
        return reduction.norm_length or 1
    if not reduction.mode.endswith("_norm"):
        return 1
    if reduction.norm_length is None or reduction.norm_length < 1:
        raise ValueError(f"aggregation={reduction.mode} needs norm_length >= 1, got {reduction.norm_length}")
    return reduction.norm_length


def token_mean(counts_N: Tensor, denominators: Denominators) -> Tensor:
    """Weigh every token the same (DAPO, arXiv 2503.14476)."""
    return torch.ones_like(counts_N) / denominators.tokens


def seq_mean_token_mean(counts_N: Tensor, denominators: Denominators) -> Tensor:
    """Weigh every sequence the same (GRPO, arXiv 2402.03300)."""
    return 1 / counts_N.clamp(min=1) / denominators.sequences


def seq_sum_token_mean(counts_N: Tensor, denominators: Denominators) -> Tensor:
    """Return the sum over sequences of their token means."""
    return 1 / counts_N.clamp(min=1)


def seq_mean_token_sum(counts_N: Tensor, denominators: Denominators) -> Tensor:
    """Return the mean over sequences of their token sums (REINFORCE by sequence)."""
    return torch.ones_like(counts_N) / denominators.sequences


def seq_mean_token_sum_norm(counts_N: Tensor, denominators: Denominators) -> Tensor:
    """Divide token sums by a constant length: no length bias (Dr. GRPO, arXiv 2503.20783)."""
    return torch.ones_like(counts_N) / (denominators.sequences * denominators.length)


def token_sum(counts_N: Tensor, denominators: Denominators) -> Tensor:
    """Return the plain sum over all tokens of all sequences."""
    return torch.ones_like(counts_N)


def token_sum_norm(counts_N: Tensor, denominators: Denominators) -> Tensor:
    """Divide the sum by a constant length; more sequences make it larger."""
    return torch.ones_like(counts_N) / denominators.length


AGGREGATIONS: dict[str, Callable[[Tensor, Denominators], Tensor]] = {
    "token_mean": token_mean,
    "seq_mean_token_mean": seq_mean_token_mean,
    "seq_mean": seq_mean_token_mean,
    "seq_sum": seq_sum_token_mean,
    "seq_mean_token_sum": seq_mean_token_sum,
    "seq_mean_token_sum_norm": seq_mean_token_sum_norm,
    "token_sum": token_sum,
    "seq_sum_token_sum": token_sum,
    "token_sum_norm": token_sum_norm,
}
