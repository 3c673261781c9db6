"""The trainer's passes over a micro-batch: frozen ones, and the live one.

No pass is made that nothing reads: old log-probs only for several updates on one batch or a rule over the whole batch,
reference log-probs only where a KL penalty or a ratio uses them.
Shapes: L loss tokens, N rollouts, T loss tokens of the longest rollout.

Streaming inside a step: groups that are complete are trained while the slowest are still sampled or scored
(`StreamedWork`). A loss is a sum over rollouts, divided by a count of the whole step that is not known before its last
group is there. So the gradients of early groups are divided by a provisional count, and brought to the real one when
the step is taken: the update is that of the whole batch, up to the order in which floats are added. It needs
advantages that no other group has a part in, one count that divides every term of the loss, and one update per batch;
the settings refuse what has not (`covey.trainer.settings`), and `check` finds custom functions that have not.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache

import torch
from torch import Tensor

from covey.algorithm.aggregation import StepCounts
from covey.algorithm.loss_inputs import ObjectiveInputs
from covey.algorithm.metrics import LOSS_TERMS, Average, Sums
from covey.algorithm.objective import BatchStatistics, Objective
from covey.policy.logprobs import (
    AllowedTokens,
    Comparison,
    PassScores,
    ReferenceElsewhere,
    Scoring,
    allowed_tokens,
    exact_kl,
    reference_logprobs,
    score_tokens,
)
from covey.policy.policy import Policy, inference
from covey.policy.reference import Reference
from covey.policy.teacher import Likeliest, Teacher, ask_likeliest, teacher_distance, teacher_logprobs
from covey.system import collectives
from covey.trainer.batch import unflatten
from covey.types import Group, MicroBatch, RunStopped

HOST = torch.device("cpu")
REFERENCE, TEACHER = "reference", "teacher"
"""Names of frozen models that the policy is compared with over the vocabulary."""


@dataclass(frozen=True, slots=True)
class ScoringContext:
    """The models and how to score with them."""

    policy: Policy
    reference: Reference | ReferenceElsewhere | None
    objective: Objective
    scoring: Scoring
    teacher: Teacher | None = None


@dataclass(frozen=True, slots=True)
class FrozenLogProbs:
    """A micro-batch with its frozen scores, None where unread."""

    batch: MicroBatch
    old: PassScores | None
    reference: Callable[[], Tensor] | None
    """Returns the reference's log-probs, (L,), which another process may still be computing."""
    kept: AllowedTokens | None
    is_current: bool = True
    """No update has been made since."""
    teacher: Callable[[], Tensor] | None = None
    """Returns the teacher's log-probs, (L,)."""
    told: Callable[[], Likeliest] | None = None
    """Returns the likeliest tokens of a teacher behind a server."""

    def reference_logprobs(self) -> Tensor | None:
        return None if self.reference is None else self.reference()


def score_frozen(
    forward: ScoringContext, batch: MicroBatch, *, several: bool, keep_old: bool, asks_teacher: bool = True
) -> FrozenLogProbs:
    """Make the passes without gradient.

    `several` updates on the batch share the filters of the policy before the first.
    """
    objective, scoring = forward.objective, forward.scoring
    teacher = forward.teacher if asks_teacher else None
    kept, old, reference, judged, told = None, None, None, None, None
    with inference(forward.policy.model):
        if scoring.sampling.filters and (several or objective.needs_reference or teacher is not None):
            kept = allowed_tokens(forward.policy, batch, scoring)
        if keep_old:
            old = score_tokens(forward.policy, batch, scoring, kept)
    if objective.needs_reference:
        assert forward.reference is not None, "the objective needs a reference"
        reference = ask_reference(forward.reference, batch, scoring, kept)
    if teacher is not None and objective.needs_divergence:
        told = ask_likeliest(teacher, batch)
    elif teacher is not None:
        shares = reference is not None and teacher.repeats(forward.reference, batch)
        judged = reference if shares else teacher_logprobs(teacher, batch, scoring, kept)
    return FrozenLogProbs(batch, old, reference, kept, teacher=judged, told=told)


def ask_reference(
    reference: Reference | ReferenceElsewhere, batch: MicroBatch, scoring: Scoring, kept: AllowedTokens | None
) -> Callable[[], Tensor]:
    """Return a function for the reference's log-probs, (L,), computed once."""
    if isinstance(reference, Reference):
        found_L = reference_logprobs(reference, batch, scoring, kept)
        return lambda: found_L
    return cache(reference.logprobs(batch, scoring, kept))


def precompute_logprob_grad(
    forward: ScoringContext, prepared: FrozenLogProbs, loss_of: Callable[[ObjectiveInputs], Tensor]
) -> Tensor | None:
    """Compute d loss / d log-prob early, so logits are made once.

    None where logits are not made again anyway, where weights are gathered pass by pass, or where it is not known.
    """
    batch, old, policy = prepared.batch, prepared.old, forward.policy
    known = forward.objective.grad_is_known_before_forward(is_current=prepared.is_current, old_is_given=old is not None)
    if not known or policy.sharded or not 0 < forward.scoring.chunk < len(batch.target_L):
        return None
    dtype = torch.promote_types(policy.precision, torch.float32)
    logprob_L = (batch.sampler_logprob_L if old is None else old.logprob_L).to(dtype).clone().requires_grad_()
    scores = PassScores(logprob_L, torch.zeros_like(logprob_L))
    return torch.autograd.grad(loss_of(objective_inputs(prepared, scores)), logprob_L)[0]


def score(forward: ScoringContext, prepared: FrozenLogProbs, predicted_L: Tensor | None = None) -> PassScores:
    """Score the tokens under the current policy, with gradient if enabled."""
    compared: dict[str, Comparison] = {}
    if forward.objective.needs_full_kl:
        assert isinstance(forward.reference, Reference), "logits of another process do not travel"
        compared[REFERENCE] = exact_kl(forward.reference)
    if forward.objective.needs_divergence:
        assert forward.teacher is not None, "a divergence is from a teacher"
        assert forward.objective.teacher is not None, "and a term of the objective"
        told = None if prepared.told is None else prepared.told()
        compared[TEACHER] = teacher_distance(forward.teacher, forward.objective.teacher.function, forward.policy, told)
    return score_tokens(forward.policy, prepared.batch, forward.scoring, prepared.kept, compared, predicted_L)


def objective_inputs(prepared: FrozenLogProbs, scores: PassScores) -> ObjectiveInputs:
    """Return everything the objective reads, as rows."""
    # Before the first update the old policy is the current one
    batch = prepared.batch
    old_L = prepared.old.logprob_L if prepared.old is not None else scores.logprob_L.detach()
    dtype, reference_L = scores.logprob_L.dtype, prepared.reference_logprobs()
    judged_L = None if prepared.teacher is None else prepared.teacher()
    judged_L = scores.compared[TEACHER].logprob_L if TEACHER in scores.compared else judged_L
    sampled_L = torch.ones_like(batch.target_L, dtype=torch.bool)
    sampled_L = sampled_L if batch.supervised_L is None else ~batch.supervised_L

    def rows(values_L: Tensor) -> Tensor:
        return unflatten(values_L.to(dtype), batch)

    def flags(values_L: Tensor | None) -> Tensor | None:
        return None if values_L is None else unflatten(values_L, batch)

    return ObjectiveInputs(
        log_probs_NT=rows(scores.logprob_L),
        old_log_probs_NT=rows(old_L),
        sampler_log_probs_NT=rows(batch.sampler_logprob_L),
        advantages=rows(batch.advantage_L),
        mask_NT=unflatten(sampled_L, batch),
        ref_log_probs_NT=None if reference_L is None else rows(reference_L),
        entropy_NT=rows(scores.entropy_L),
        balance_NT=None if scores.balance_L is None else rows(scores.balance_L),
        teacher_mask_NT=flags(batch.taught_L),
        supervised_NT=flags(batch.supervised_L),
        full_kl_NT=rows(scores.compared[REFERENCE].value_L) if REFERENCE in scores.compared else None,
        divergence_NT=rows(scores.compared[TEACHER].value_L) if TEACHER in scores.compared else None,
        teacher_log_probs_NT=None if judged_L is None else rows(judged_L),
        position_NT=None if judged_L is None else flags(batch.position_ids_BT.flatten()[batch.source_L]),
    )


def gather_rows(own: ObjectiveInputs | None, device: torch.device) -> list[ObjectiveInputs | None]:
    """Return all ranks' rows in order, on this device, None without rows.

    They travel through host memory: a pickled tensor of a GPU comes back on the GPU of its sender.
    """
    if not collectives.is_distributed():
        return [own]
    of_ranks: list[ObjectiveInputs | None] = collectives.all_gather(None if own is None else own.to(HOST))
    return [None if rows is None else rows.to(device) for rows in of_ranks]


def stack(parts: Sequence[ObjectiveInputs]) -> ObjectiveInputs:
    """Stack micro-batches' rows as one batch, detached and padded."""
    width = max(part.mask_NT.shape[1] for part in parts)

    def join(tensors: Sequence[Tensor | None]) -> Tensor | None:
        given = [torch.nn.functional.pad(t.detach(), (0, width - t.shape[1])) for t in tensors if t is not None]
        return torch.cat(given) if given else None

    return ObjectiveInputs(
        **{f.name: join([getattr(part, f.name) for part in parts]) for f in fields(ObjectiveInputs)}  # type: ignore[arg-type] # only what may be None is
    )


def split_statistics(whole: BatchStatistics, parts: Sequence[ObjectiveInputs], start: int) -> Iterator[BatchStatistics]:
    """Yield each micro-batch's statistics; this rank's rows begin at `start`."""
    for part in parts:
        num_rows, num_columns = part.mask_NT.shape
        rows = torch.arange(start, start + num_rows, device=part.mask_NT.device)
        yield whole.rows(rows, num_columns)
        start += num_rows


def unscored_prompts(forward: ScoringContext, part: FrozenLogProbs) -> list[str]:
    """Name the prompts with a log-prob or advantage that is not finite."""
    with inference(forward.policy.model):
        scores = score(forward, part)
    if part.batch.num_rows == 0:
        return []
    inputs = objective_inputs(part, scores)
    read = (inputs.log_probs_NT, inputs.sampler_log_probs_NT, inputs.advantages)
    bad_N = ~torch.stack([values.isfinite().all(dim=1) for values in read]).all(dim=0)
    return [name for name, bad in zip(part.batch.prompt_ids, bad_N.tolist(), strict=True) if bad]


@dataclass(frozen=True, slots=True)
class StreamedGroup:
    """Group trained before its step, with its advantages and penalties."""

    group: Group
    """Kept, so that its `id` names no other group."""
    advantages: Sequence[float]
    """Advantages of its rollouts, or of all their turns."""
    penalties: Sequence[float] | None
    """Penalties on the reward of each rollout; None without any."""


@dataclass
class StreamedWork:
    """Work on groups of the coming step, besides gradients."""

    totals: StepCounts | None = None
    """Provisional counts that all parts were divided by: those of a step whose groups are like the first."""
    trained: dict[int, StreamedGroup] = field(default_factory=dict)
    """Trained groups by `id` of the group."""
    prepared: list[FrozenLogProbs] = field(default_factory=list)
    """The micro-batches."""
    sums: list[Sums] = field(default_factory=list)
    maxima: list[Mapping[str, float]] = field(default_factory=list)

    def check(self, groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> None:
        """Compare with the final advantages. RunStopped if groups depend on others.

        ValueError where a group that was trained is not among `groups`.
        """
        found = {id(group): of_group for group, of_group in zip(groups, advantages, strict=True)}
        if missing := len(self.trained.keys() - found.keys()):
            raise ValueError(f"a step must train all groups that streaming=true has begun with, got {missing} fewer")
        for name, one in self.trained.items():
            gaps = [abs(a - b) for a, b in zip(one.advantages, found[name], strict=True)]
            if max(gaps, default=0.0) > 1e-9 * max(1.0, *map(abs, found[name])):
                raise RunStopped(
                    f"the advantages of prompt {one.group.prompt.id} depend on other groups: "
                    "streaming=true needs an advantage and shaping that look at a group alone"
                )

    def rescale(self, parameters: Sequence[torch.nn.Parameter], divisors: Collection[str], totals: StepCounts) -> None:
        """Rescale gradients and logged losses to the final count."""
        (divisor,) = divisors
        factor = _count(self.totals, divisor) / _count(totals, divisor)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        self.sums = [{name: _scale(name, average, factor) for name, average in part.items()} for part in self.sums]


def _count(totals: StepCounts | None, divisor: str) -> int:
    return max(1, getattr(totals, divisor)) if divisor else 1


def _scale(name: str, average: Average, factor: float) -> Average:
    return Average(average.numerator * factor, average.denominator) if name in LOSS_TERMS else average
