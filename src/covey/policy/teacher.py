"""The teacher: a frozen model, or a mixture of two.

Shapes: L loss tokens, C hidden width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from covey.policy.logprobs import (
    AllowedTokens,
    Compared,
    Comparison,
    ReferenceElsewhere,
    Scoring,
    reference_logprobs,
    score_tokens,
    spread,
)
from covey.policy.policy import Policy
from covey.policy.reference import Reference
from covey.types import MicroBatch, RunStopped, Sampling

Likeliest = tuple[Tensor, Tensor]
"""Entries of the likeliest tokens, last that of the sampled one, and their log-probs, (L, K + 1) each."""


@runtime_checkable
class TellsLikeliest(Protocol):
    """A model behind a server, which tells its likeliest tokens alone."""

    def likeliest(self, batch: MicroBatch) -> Callable[[], Likeliest]:
        """Start computing; return a function that waits for them."""


@dataclass(frozen=True)
class Teacher:
    """A model that judges each sampled token."""

    model: Reference | ReferenceElsewhere
    live: Reference | None = None
    """The policy as it is, whose logits are mixed in (trust_region); None without."""
    rate: float = 0.0
    """Share of `live` in the logits."""
    follows: bool = False
    """Whether the model moves towards the policy by `rate` after each step (ema)."""
    temperature: float | None = None
    """None takes that of sampling."""

    @property
    def follower(self) -> Reference | None:
        """Return the model that moves with the policy, None without one."""
        return self.model if self.follows and isinstance(self.model, Reference) else None

    def repeats(self, reference: Reference | ReferenceElsewhere | None, batch: MicroBatch) -> bool:
        """Return True if the reference's log-probs of this micro-batch are the teacher's."""
        plain = self.live is None and self.temperature is None and batch.taught_L is None
        return plain and self.model is reference

    def read(self, batch: MicroBatch) -> MicroBatch | None:
        """Return the micro-batch as the teacher reads it, None for nothing."""
        return batch if batch.taught_L is None else batch.taught


def teacher_logprobs(
    teacher: Teacher, batch: MicroBatch, scoring: Scoring, kept: AllowedTokens | None
) -> Callable[[], Tensor]:
    """Return a function for the teacher's log-probs, (L,), computed once.

    They are 0 for tokens that it does not judge.
    """
    read = teacher.read(batch)
    if read is None:
        return lambda: torch.zeros_like(batch.sampler_logprob_L)
    if teacher.temperature is not None:
        scoring = replace(scoring, sampling=replace(scoring.sampling, temperature=teacher.temperature))
    kept = None if kept is None else kept.where(batch.taught_L)
    if not isinstance(teacher.model, Reference):
        judged = teacher.model.logprobs(read, scoring, kept)
    else:
        found_L = _own_logprobs(teacher, teacher.model, read, scoring, kept)
        judged = lambda: found_L  # noqa: E731 # a name for each way

    return cache(lambda: spread(check_logprobs(judged(), read), batch))


def ask_likeliest(teacher: Teacher, batch: MicroBatch) -> Callable[[], Likeliest] | None:
    """Request the likeliest tokens of a model behind a server, once.

    None for a model whose logits are here.
    """
    if not isinstance(teacher.model, TellsLikeliest):
        return None
    read = teacher.read(batch)
    if read is None:
        grid_L1 = torch.zeros_like(batch.target_L)[:, None]
        return lambda: (grid_L1, grid_L1.to(batch.sampler_logprob_L))
    asked = teacher.model.likeliest(read)

    @cache
    def finish() -> Likeliest:
        entries_LK, logprobs_LK = asked()
        return spread(entries_LK, batch), spread(check_logprobs(logprobs_LK, read), batch)

    return finish


def _own_logprobs(
    teacher: Teacher, model: Reference, batch: MicroBatch, scoring: Scoring, kept: AllowedTokens | None
) -> Tensor:
    if teacher.live is None:
        return reference_logprobs(model, batch, scoring, kept)
    mixed = {"mixed": Compared(lambda own_LV, other_LV: own_LV[:, 0], (model, teacher.live), teacher.rate)}
    with teacher.live.active() as policy:
        return score_tokens(policy, batch, scoring, kept, mixed).compared["mixed"].logprob_L


@dataclass(frozen=True, slots=True)
class ComparedByLikeliest:
    """Distributions of which the likeliest tokens are told, at the teacher's temperature.

    All others share what is left.
    """

    measure: Callable[[Tensor, Tensor], Tensor]
    told: Likeliest
    num_entries: int

    def rows(self, policy: Policy, batch: MicroBatch) -> list[Tensor]:
        """Return the told entries and their log-probs."""
        entries_LK, logprobs_LK = self.told
        return [entries_LK, logprobs_LK.to(torch.promote_types(policy.precision, torch.float32))]

    def logits(self, rows: Sequence[Tensor], sampling: Sampling) -> Tensor:
        """Return log-probs of all entries, (L, V)."""
        entries_LK, logprobs_LK = rows
        is_again_L = (entries_LK[:, :-1] == entries_LK[:, -1:]).any(1)
        told_L = logprobs_LK[:, :-1].double().exp().sum(1) + (logprobs_LK[:, -1].double().exp() * ~is_again_L)
        num_others_L = self.num_entries - entries_LK.shape[1] + is_again_L
        rest_L = ((1 - told_L).clamp(min=LEAST_REST) / num_others_L.clamp(min=1)).log().to(logprobs_LK)
        return rest_L[:, None].repeat(1, self.num_entries).scatter(1, entries_LK, logprobs_LK)


def teacher_distance(
    teacher: Teacher, measure: Callable[[Tensor, Tensor], Tensor], policy: Policy, told: Likeliest | None = None
) -> Comparison:
    """Return the question for the distance from a teacher over the vocabulary."""
    if told is not None:
        num_entries = int(policy.causal_lm.config.get_text_config(decoder=True).vocab_size)
        return ComparedByLikeliest(measure, told, num_entries)
    assert isinstance(teacher.model, Reference), "logits of another process do not travel"
    models = (teacher.model,) if teacher.live is None else (teacher.model, teacher.live)
    return Compared(measure, models, teacher.rate, teacher.temperature, teacher.read)


def check_logprobs(found_L: Tensor, batch: MicroBatch) -> Tensor:
    """Return a teacher's log-probs. RunStopped if one is missing or above 0."""
    bad_L = (found_L.isnan() | (found_L > LARGEST)).view(len(found_L), -1).any(1)
    if bool(bad_L.any()):
        names = {batch.prompt_ids[row] for row in batch.row_L[bad_L].tolist()}
        raise RunStopped(
            f"the teacher gave no log-prob of {int(bad_L.sum())} of {len(found_L)} tokens, prompts "
            f"{', '.join(sorted(names)[:4])}"
        )
    return found_L


LARGEST = 1e-3
"""Log-prob that rounding may come to."""
LEAST_REST = 1e-35
"""Least probability that is left to tokens of which nothing is told."""
