"""Log-probs of loss tokens, in chunks that bound the memory of logits.

Shapes: L loss tokens, C hidden width, V vocabulary, K kept (token, vocabulary entry) pairs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from covey.algorithm.kl import full_kl
from covey.algorithm.softmax import log_softmax
from covey.policy.head import Head, linear_layer, score_rows
from covey.policy.policy import Policy
from covey.policy.reference import Reference
from covey.policy.sampling import allowed_with
from covey.policy.settings import chunk_within_bound
from covey.types import MicroBatch, Sampling


@dataclass(frozen=True, slots=True)
class Scoring:
    """The sampled distribution, and the rows of logits to hold at once."""

    sampling: Sampling
    chunk: int
    """Loss tokens whose logits live at the same time; 0 takes all."""
    entropy_gradient: bool = False
    """Let gradients flow through the entropy."""

    @classmethod
    def of(cls, policy: Policy, sampling: Sampling, chunk: int, *, entropy_gradient: bool = False) -> "Scoring":
        """Bound the chunk by the policy's vocabulary."""
        vocabulary = int(policy.causal_lm.config.get_text_config(decoder=True).vocab_size)
        return cls(sampling, chunk_within_bound(chunk, vocabulary), entropy_gradient)

    def num_rows(self, batch: MicroBatch) -> int:
        return self.chunk or max(len(batch.target_L), 1)


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The vocabulary entries that top-k, top-p and min-p kept at sampling.

    Policy, old policy and reference are renormalised over the same entries, or their ratio would be biased.
    """

    entry_K: Tensor
    """Vocabulary entries, loss token after loss token."""
    count_L: Tensor
    """Number of entries that each loss token kept."""

    def split(self, chunk: int) -> list["AllowedTokens"]:
        counts = self.count_L.split(chunk)
        entries = self.entry_K.split([int(count.sum()) for count in counts])
        return [AllowedTokens(entry, count) for entry, count in zip(entries, counts, strict=True)]

    def mask(self, num_entries: int) -> Tensor:
        """Return a mask of the kept entries, bool (L, V)."""
        mask_LV = torch.zeros(len(self.count_L), num_entries, dtype=torch.bool, device=self.entry_K.device)
        mask_LV[torch.repeat_interleave(self.count_L), self.entry_K] = True
        return mask_LV


@dataclass(frozen=True, slots=True)
class PassScores:
    """The loss tokens' results of a forward pass, in float32 at least."""

    logprob_L: Tensor
    entropy_L: Tensor
    """Nats, of the distribution at the sampling temperature, before top-k, top-p and min-p."""
    full_kl_L: Tensor | None
    """KL(policy || reference) summed over the vocabulary; None without a reference."""
    balance_L: Tensor | None = None
    """Balancing loss of the rollout's experts, the same for all its tokens; None without one."""


class ReferenceElsewhere(Protocol):
    """A reference policy that another process holds."""

    def logprobs(self, batch: MicroBatch, scoring: Scoring, kept: AllowedTokens | None) -> Callable[[], Tensor]:
        """Start computing log-probs, (L,); return a function that waits for them."""
        ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """Loss tokens whose logits are held at the same time."""

    rows_LC: Tensor
    target_L: Tensor
    kept: AllowedTokens | None
    """None where filters are off or found from the policy's own logits."""
    reference: Reference | None
    reference_rows_LC: Tensor | None


def score_tokens(
    policy: Policy,
    batch: MicroBatch,
    scoring: Scoring,
    kept: AllowedTokens | None = None,
    reference: Reference | None = None,
    predicted_L: Tensor | None = None,
) -> PassScores:
    """Score the loss tokens under the distribution they were drawn from.

    Without `kept`, filters are applied to this policy's own logits, which is right on the weights that sampled.
    `reference` asks for the exact KL. `predicted_L`, the expected gradient of each log-prob, saves work where it turns
    out right.
    """
    head = _linear_head(policy, batch, scoring) if reference is None else None
    if head is not None:
        passed = policy.run_forward(lambda: score_rows(head, _head_input(policy, batch), batch.target_L, predicted_L))
        return PassScores(*passed, full_kl_L=None)
    logprob_L, entropy_L, kl_L = policy.run_forward(lambda: _score(policy, batch, scoring, kept, reference))
    return PassScores(logprob_L, entropy_L, kl_L if reference is not None else None)


def reference_logprobs(reference: Reference, batch: MicroBatch, scoring: Scoring, kept: AllowedTokens | None) -> Tensor:
    with reference.active() as policy:
        return score_tokens(policy, batch, scoring, kept).logprob_L


def allowed_tokens(policy: Policy, batch: MicroBatch, scoring: Scoring) -> AllowedTokens:
    """Return the entries that this policy's filters keep, the sampled token included."""
    return AllowedTokens(*policy.run_forward(lambda: _kept_entries(policy, batch, scoring)))


def _linear_head(policy: Policy, batch: MicroBatch, scoring: Scoring) -> Head | None:
    """Return the head if it is linear and unfiltered, else None."""
    layer = None if scoring.sampling.filters else linear_layer(policy)
    if layer is None:
        return None
    temperature, num_rows = scoring.sampling.temperature or 1.0, scoring.num_rows(batch)
    return Head(layer, policy.precision, temperature, num_rows, scoring.entropy_gradient, policy.compiles)


def _score(
    policy: Policy, batch: MicroBatch, scoring: Scoring, kept: AllowedTokens | None, reference: Reference | None
) -> tuple[Tensor, Tensor, Tensor]:
    chunk = scoring.num_rows(batch)
    pieces = []
    for rows in _chunks(policy, batch, chunk, kept, reference):
        if torch.is_grad_enabled() and len(batch.target_L) > chunk:
            pieces.append(checkpoint(_score_rows, policy, scoring, rows, use_reentrant=False))
        else:
            pieces.append(_score_rows(policy, scoring, rows))
    logprob_L, entropy_L, kl_L = (torch.cat(part) for part in zip(*pieces, strict=True))
    return logprob_L, entropy_L, kl_L


def _kept_entries(policy: Policy, batch: MicroBatch, scoring: Scoring) -> tuple[Tensor, Tensor]:
    entries, counts = [], []
    rows_LC = _head_input(policy, batch)
    chunk = scoring.num_rows(batch)
    for rows, target in zip(rows_LC.split(chunk), batch.target_L.split(chunk), strict=True):
        mask_LV = allowed_with(_logits(policy, rows), target, scoring.sampling)
        entries.append(mask_LV.nonzero()[:, 1])
        counts.append(mask_LV.sum(dim=1))
    return torch.cat(entries), torch.cat(counts)


def _head_input(policy: Policy, batch: MicroBatch) -> Tensor:
    """Return hidden states (L, C) of loss tokens, or their logits."""
    place = (batch.input_ids_BT, batch.position_ids_BT, batch.layout)
    # index_select, not indexing: the backward pass of indexing adds up repeated rows in the order of threads.
    if policy.head_is_linear:
        return policy.hidden(*place).flatten(0, 1).index_select(0, batch.source_L)
    return policy.logits(*place).index_select(0, batch.source_L)


def _reference_rows(policy: Policy, other: Policy, batch: MicroBatch) -> Tensor:
    """Return the reference's head input; of the same model, within its pass."""
    if other.causal_lm is policy.causal_lm:
        return _head_input(other, batch)
    return other.run_forward(lambda: _head_input(other, batch))


def _logits(policy: Policy, rows: Tensor) -> Tensor:
    logits = policy.head(rows) if policy.head_is_linear else rows
    return logits if logits.dtype == torch.float64 else logits.float()


def _chunks(
    policy: Policy, batch: MicroBatch, chunk: int, kept: AllowedTokens | None, reference: Reference | None
) -> Iterator[Chunk]:
    rows = _head_input(policy, batch).split(chunk)
    targets = batch.target_L.split(chunk)
    none: list[None] = [None] * len(rows)
    filters = none if kept is None else kept.split(chunk)
    others: Sequence[Tensor | None] = none
    if reference is not None:
        with reference.active() as other:
            others = _reference_rows(policy, other, batch).split(chunk)
    for parts in zip(rows, targets, filters, others, strict=True):
        yield Chunk(*parts[:3], reference, parts[3])


def _score_rows(policy: Policy, scoring: Scoring, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropies before the filters, and full KL or zeros."""
    sampling = scoring.sampling
    logits_LV = _logits(policy, chunk.rows_LC)
    tempered_LV = logits_LV if sampling.temperature in (0.0, 1.0) else logits_LV / sampling.temperature
    all_LV = log_softmax(tempered_LV)
    known_LV = all_LV if scoring.entropy_gradient else all_LV.detach()
    entropy_L = -(known_LV.exp() * known_LV).sum(dim=-1)
    logprob_LV = all_LV
    if sampling.filters:
        mask_LV = _mask(chunk, logits_LV, sampling)
        logprob_LV = log_softmax(tempered_LV.masked_fill(~mask_LV, -torch.inf))
    logprob_L = logprob_LV.gather(1, chunk.target_L[:, None])[:, 0]
    if chunk.reference is None or chunk.reference_rows_LC is None:
        return logprob_L, entropy_L, torch.zeros_like(entropy_L)
    with chunk.reference.active() as other:
        other_LV = _logits(other, chunk.reference_rows_LC) / (sampling.temperature or 1.0)
    return logprob_L, entropy_L, full_kl(tempered_LV, other_LV)


def _mask(chunk: Chunk, logits_LV: Tensor, sampling: Sampling) -> Tensor:
    if chunk.kept is not None:
        return chunk.kept.mask(logits_LV.shape[-1])
    return allowed_with(logits_LV.detach(), chunk.target_L, sampling)
