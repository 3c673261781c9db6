"""Log-probs of loss tokens, in chunks that bound the memory of logits.

Shapes: L loss tokens, C hidden width, V vocabulary, K kept (token, vocabulary entry) pairs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from covey.algorithm.kl import full_kl
from covey.algorithm.softmax import log_softmax
from covey.algorithm.teacher.terms import mixed_logits
from covey.policy.head import LARGE, Head, linear_layer, score_rows
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
    in_place: bool = False
    """Add the head's gradient to `.grad` as it is made; only `backward` may follow."""

    @classmethod
    def of(
        cls, policy: Policy, sampling: Sampling, chunk: int, *, entropy_gradient: bool = False, in_place: bool = False
    ) -> "Scoring":
        """Bound the chunk by the policy's vocabulary."""
        vocabulary = int(policy.causal_lm.config.get_text_config(decoder=True).vocab_size)
        in_place = in_place and not policy.sharded and policy.device.type == "cpu"
        return cls(sampling, chunk_within_bound(chunk, vocabulary), entropy_gradient, in_place)

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

    def where(self, chosen_L: Tensor | None) -> "AllowedTokens":
        """Return the entries of some loss tokens, None of all."""
        if chosen_L is None:
            return self
        chosen_K = chosen_L.repeat_interleave(self.count_L)
        return AllowedTokens(self.entry_K[chosen_K], self.count_L[chosen_L])

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
    compared: Mapping[str, "Distance"] = field(default_factory=dict)
    """Distances from frozen models, by their name."""
    balance_L: Tensor | None = None
    """Balancing loss of the rollout's experts, the same for all its tokens; None without one."""


class ReferenceElsewhere(Protocol):
    """A reference policy that another process holds."""

    def logprobs(self, batch: MicroBatch, scoring: Scoring, kept: AllowedTokens | None) -> Callable[[], Tensor]:
        """Start computing log-probs, (L,); return a function that waits for them."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Distance of the policy from a frozen model at each loss token."""

    value_L: Tensor
    """Nats, with gradient; of the whole vocabulary."""
    logprob_L: Tensor
    """Log-prob of the token under the frozen model."""


class Comparison(Protocol):
    """A question for the distance from a frozen model over the vocabulary."""

    @property
    def measure(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Take both logits, (L, V), divided by temperatures; return (L,)."""

    def rows(self, policy: Policy, batch: MicroBatch) -> list[Tensor]:
        """Return the head inputs, or other rows that begin with L."""

    def logits(self, rows: Sequence[Tensor], sampling: Sampling) -> Tensor:
        """Return the logits of these rows, divided by the temperature."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A frozen model that the policy is compared with over the vocabulary."""

    measure: Callable[[Tensor, Tensor], Tensor]
    """Takes the logits of both, (L, V), divided by their temperatures; returns (L,)."""
    models: tuple[Reference, ...]
    """One, or two whose logits are mixed."""
    rate: float = 0.0
    """Share of the second."""
    temperature: float | None = None
    """None takes that of sampling."""
    reads: Callable[[MicroBatch], MicroBatch | None] = lambda batch: batch
    """Returns what the model reads in place of a micro-batch, with the loss tokens that it judges; None for nothing."""

    def logits(self, rows: Sequence[Tensor], sampling: Sampling) -> Tensor:
        """Return the logits of these head inputs, divided by the temperature."""
        found = []
        for model, own in zip(self.models, rows, strict=True):
            with model.active() as policy:
                found.append(logits_of(policy, own))
        mixed_LV = found[0] if len(found) == 1 else mixed_logits(found[0], found[1], self.rate)
        return mixed_LV / (self.temperature or sampling.temperature or 1.0)

    def rows(self, policy: Policy, batch: MicroBatch) -> list[Tensor]:
        """Return the models' head inputs, 0 where they judge nothing."""
        read, found = self.reads(batch), []
        for model in self.models:
            with model.active() as other:
                found.append(spread(_reference_rows(policy, other, read), batch) if read else _nothing(other, batch))
        return found


NOTHING: Mapping[str, Comparison] = {}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Loss tokens whose logits are held at the same time."""

    rows_LC: Tensor
    target_L: Tensor
    kept: AllowedTokens | None
    """None where filters are off or found from the policy's own logits."""
    compared: tuple[tuple[Comparison, tuple[Tensor, ...]], ...]
    """Frozen models, with their head inputs."""


def score_tokens(
    policy: Policy,
    batch: MicroBatch,
    scoring: Scoring,
    kept: AllowedTokens | None = None,
    compared: Mapping[str, Comparison] = NOTHING,
    predicted_L: Tensor | None = None,
) -> PassScores:
    """Score the loss tokens under the distribution they were drawn from.

    Without `kept`, filters are applied to this policy's own logits, which is right on the weights that sampled.
    `predicted_L`, the expected gradient of each log-prob, saves work where it turns out right.
    """
    head = None if compared else _linear_head(policy, batch, scoring)
    if head is not None:
        passed = policy.run_forward(lambda: score_rows(head, head_input(policy, batch), batch.target_L, predicted_L))
        return PassScores(*passed)
    models = tuple(compared.values())
    logprob_L, entropy_L, *others = policy.run_forward(lambda: _score(policy, batch, scoring, kept, models))
    return PassScores(logprob_L, entropy_L, dict(zip(compared, map(Distance, others[::2], others[1::2]), strict=True)))


def exact_kl(reference: Reference) -> Compared:
    """Return the question for KL(policy || reference) over the vocabulary."""
    return Compared(full_kl, (reference,))


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
    asked = scoring.entropy_gradient, policy.compiles, scoring.in_place and layer.weight.numel() >= LARGE
    return Head(layer, policy.precision, temperature, num_rows, *asked)


def _score(
    policy: Policy, batch: MicroBatch, scoring: Scoring, kept: AllowedTokens | None, compared: Sequence[Comparison]
) -> tuple[Tensor, ...]:
    chunk = scoring.num_rows(batch)
    pieces = []
    for rows in _chunks(policy, batch, chunk, kept, compared):
        if torch.is_grad_enabled() and len(batch.target_L) > chunk:
            pieces.append(checkpoint(_score_rows, policy, scoring, rows, use_reentrant=False))
        else:
            pieces.append(_score_rows(policy, scoring, rows))
    return tuple(torch.cat(part) for part in zip(*pieces, strict=True))


def _kept_entries(policy: Policy, batch: MicroBatch, scoring: Scoring) -> tuple[Tensor, Tensor]:
    entries, counts = [], []
    rows_LC = head_input(policy, batch)
    chunk = scoring.num_rows(batch)
    for rows, target in zip(rows_LC.split(chunk), batch.target_L.split(chunk), strict=True):
        mask_LV = allowed_with(logits_of(policy, rows), target, scoring.sampling)
        entries.append(mask_LV.nonzero()[:, 1])
        counts.append(mask_LV.sum(dim=1))
    return torch.cat(entries), torch.cat(counts)


def head_input(policy: Policy, batch: MicroBatch) -> Tensor:
    """Return hidden states (L, C) of loss tokens, or their logits."""
    place = (batch.input_ids_BT, batch.position_ids_BT, batch.layout)
    # index_select, not indexing: the backward pass of indexing adds up repeated rows in the order of threads.
    if policy.head_is_linear:
        return policy.hidden(*place).flatten(0, 1).index_select(0, batch.source_L)
    return policy.logits(*place).index_select(0, batch.source_L)


def _reference_rows(policy: Policy, other: Policy, batch: MicroBatch) -> Tensor:
    """Return the reference's head input; of the same model, within its pass."""
    if other.causal_lm is policy.causal_lm:
        return head_input(other, batch)
    return other.run_forward(lambda: head_input(other, batch))


def _nothing(policy: Policy, batch: MicroBatch) -> Tensor:
    config = policy.causal_lm.config.get_text_config(decoder=True)
    width = config.hidden_size if policy.head_is_linear else config.vocab_size
    return torch.zeros(len(batch.target_L), width, dtype=policy.causal_lm.dtype, device=policy.device)


def spread(values_K: Tensor, batch: MicroBatch) -> Tensor:
    """Put values of judged tokens at their places among all, 0 elsewhere."""
    if len(values_K) == len(batch.target_L):
        return values_K
    assert batch.taught_L is not None, "it says which tokens are judged"
    grid_L = values_K.new_zeros(len(batch.target_L), *values_K.shape[1:])
    return grid_L.index_put((batch.taught_L.nonzero()[:, 0],), values_K)


def logits_of(policy: Policy, rows: Tensor) -> Tensor:
    logits = policy.head(rows) if policy.head_is_linear else rows
    return logits if logits.dtype == torch.float64 else logits.float()


def _chunks(
    policy: Policy, batch: MicroBatch, chunk: int, kept: AllowedTokens | None, compared: Sequence[Comparison]
) -> Iterator[Chunk]:
    rows = head_input(policy, batch).split(chunk)
    filters: Sequence[AllowedTokens | None] = [None] * len(rows) if kept is None else kept.split(chunk)
    others = [[own.split(chunk) for own in one.rows(policy, batch)] for one in compared]
    for place, parts in enumerate(zip(rows, batch.target_L.split(chunk), filters, strict=True)):
        frozen = (tuple(own[place] for own in of_one) for of_one in others)
        yield Chunk(*parts, tuple(zip(compared, frozen, strict=True)))


def _score_rows(policy: Policy, scoring: Scoring, chunk: Chunk) -> tuple[Tensor, ...]:
    """Return log-probs, unfiltered entropies, and two tensors for each frozen model."""
    sampling = scoring.sampling
    logits_LV = logits_of(policy, chunk.rows_LC)
    tempered_LV = logits_LV if sampling.temperature in (0.0, 1.0) else logits_LV / sampling.temperature
    all_LV = log_softmax(tempered_LV)
    known_LV = all_LV if scoring.entropy_gradient else all_LV.detach()
    entropy_L = -(known_LV.exp() * known_LV).sum(dim=-1)
    logprob_LV = all_LV
    if sampling.filters:
        mask_LV = _mask(chunk, logits_LV, sampling)
        logprob_LV = log_softmax(tempered_LV.masked_fill(~mask_LV, -torch.inf))
    found = [logprob_LV.gather(1, chunk.target_L[:, None])[:, 0], entropy_L]
    for one, rows in chunk.compared:
        other_LV = one.logits(rows, sampling)
        own_L = log_softmax(other_LV).gather(1, chunk.target_L[:, None])[:, 0]
        found += [one.measure(tempered_LV, other_LV), own_L]
    return tuple(found)


def _mask(chunk: Chunk, logits_LV: Tensor, sampling: Sampling) -> Tensor:
    if chunk.kept is not None:
        return chunk.kept.mask(logits_LV.shape[-1])
    return allowed_with(logits_LV.detach(), chunk.target_L, sampling)
