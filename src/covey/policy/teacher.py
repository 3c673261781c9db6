"""The teacher: a frozen model, or a mixture of two.

Shapes: L loss tokens, C hidden width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from covey.policy.logprobs import (
    AllowedTokens,
    Compared,
    ReferenceElsewhere,
    Scoring,
    reference_logprobs,
    score_tokens,
)
from covey.policy.reference import Reference
from covey.types import MicroBatch, RunStopped


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

    @cache
    def finish() -> Tensor:
        found_L = check_logprobs(judged(), read)
        if len(found_L) == len(batch.target_L):
            return found_L
        assert batch.taught_L is not None, "it says which tokens are judged"
        return found_L.new_zeros(len(batch.target_L)).index_put((batch.taught_L.nonzero()[:, 0],), found_L)

    return finish


def _own_logprobs(
    teacher: Teacher, model: Reference, batch: MicroBatch, scoring: Scoring, kept: AllowedTokens | None
) -> Tensor:
    if teacher.live is None:
        return reference_logprobs(model, batch, scoring, kept)
    mixed = {"mixed": Compared(lambda own_LV, other_LV: own_LV[:, 0], (model, teacher.live), teacher.rate)}
    with teacher.live.active() as policy:
        return score_tokens(policy, batch, scoring, kept, mixed).compared["mixed"].logprob_L


def teacher_distance(teacher: Teacher, measure: Callable[[Tensor, Tensor], Tensor]) -> Compared:
    """Return the question for the distance from a teacher over the vocabulary."""
    assert isinstance(teacher.model, Reference), "logits of another process do not travel"
    models = (teacher.model,) if teacher.live is None else (teacher.model, teacher.live)
    return Compared(measure, models, teacher.rate, teacher.temperature, teacher.read)


def check_logprobs(found_L: Tensor, batch: MicroBatch) -> Tensor:
    """Return a teacher's log-probs. RunStopped if one is missing or above 0."""
    bad_L = found_L.isnan() | (found_L > LARGEST)
    if bool(bad_L.any()):
        names = {batch.prompt_ids[row] for row in batch.row_L[bad_L].tolist()}
        raise RunStopped(
            f"the teacher gave no log-prob of {int(bad_L.sum())} of {len(found_L)} tokens, prompts "
            f"{', '.join(sorted(names)[:4])}"
        )
    return found_L


LARGEST = 1e-3
"""Log-prob that rounding may come to."""
