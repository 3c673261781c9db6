"""Terms of a teacher of sampled tokens (on-policy distillation).

x = log pi - log teacher of a sampled token, clamped; P and Q are the distributions of policy and teacher at one place.
Notation: N rollouts, T loss-token positions after padding, L loss tokens, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.algorithm.kl import ESTIMATORS
from covey.algorithm.loss_inputs import ObjectiveInputs, select
from covey.algorithm.metrics import Sums, mean_over
from covey.algorithm.softmax import log_softmax

LARGEST_GAP = 20.0
"""Nats of |x| where no `clip` is given; a token that the teacher cannot write has this gap."""
LEAST_SUM = 1e-8
"""Least sum of gaps that a prefix weight divides by."""


@dataclass(frozen=True, slots=True)
class Taught:
    """The tokens that a teacher judged, (N, T). Inside the mask its log-probs are finite or -inf."""

    log_probs_NT: Tensor
    """Log-probs under the policy, with gradient."""
    old_log_probs_NT: Tensor
    sampler_log_probs_NT: Tensor
    teacher_log_probs_NT: Tensor
    mask_NT: Tensor
    """True for loss tokens of rollouts that have a teacher."""
    position_NT: Tensor | None = None
    """Places in the text; None: the columns are places."""

    def gap(self, base_NT: Tensor, clip: float | None = None) -> Tensor:
        """Return x = base - teacher, clamped, 0 outside the mask."""
        bound = LARGEST_GAP if clip is None else clip
        return (select(base_NT, self.mask_NT) - select(self.teacher_log_probs_NT, self.mask_NT)).clamp(-bound, bound)


def taught_of(inputs: ObjectiveInputs) -> Taught:
    """Return the tokens of an objective's inputs that have a teacher."""
    old_NT, sampler_NT = inputs.old_log_probs_NT, inputs.sampler_log_probs_NT
    assert inputs.teacher_log_probs_NT is not None, "a teacher needs teacher_log_probs_NT"
    mask_NT = inputs.mask_NT if inputs.teacher_mask_NT is None else inputs.mask_NT & inputs.teacher_mask_NT
    return Taught(inputs.log_probs_NT, old_NT, sampler_NT, inputs.teacher_log_probs_NT, mask_NT, inputs.position_NT)


def teacher_sums(inputs: ObjectiveInputs, term: "TeacherTerm") -> Sums:
    """Return metrics of the gap between policy and teacher, over judged tokens."""
    taught = taught_of(inputs)
    found = {
        "teacher/kl": mean_over(taught.gap(BASES[term.base](taught), term.clip), taught.mask_NT),
        "teacher/impossible_fraction": mean_over(taught.teacher_log_probs_NT == -torch.inf, taught.mask_NT),
        "teacher/token_fraction": mean_over(taught.mask_NT, inputs.mask_NT),
    }
    if inputs.divergence_NT is not None:
        found["teacher/divergence"] = mean_over(inputs.divergence_NT, taught.mask_NT)
    return found


def advantage(
    taught: Taught,
    *,
    base: str = "current",
    discount: float = 0.0,
    clip: float | None = None,
    prefix_gamma: float = 0.0,
) -> Tensor:
    """Return -x, (N, T), without gradient: the reverse KL as an advantage.

    MiniLLM, arXiv 2306.08543; Qwen3, arXiv 2505.09388. `discount` gamma adds gamma^(s - t) times the gaps at later
    places s; 1 is the whole gradient of the sequence's KL. `prefix_gamma` weighs tokens by 1 + gamma (1 - the share
    of |x| before them) (IW-OPD, arXiv 2606.22600).
    """
    gap_NT = taught.gap(BASES[base](taught).detach(), clip)
    if prefix_gamma:
        size_NT = gap_NT.abs()
        before_NT = size_NT.cumsum(1) - size_NT
        gap_NT = gap_NT * (1 + prefix_gamma * (1 - before_NT / size_NT.sum(1, keepdim=True).clamp(min=LEAST_SUM)))
    if discount:
        columns, place_NT = list(gap_NT.unbind(1)), taught.position_NT
        place_NT = torch.arange(gap_NT.shape[1]).expand_as(gap_NT) if place_NT is None else place_NT
        # A branch begins again at place 0; so does what pads
        fades_NT = discount ** place_NT.diff(dim=1).clamp(min=0).to(gap_NT)
        for place in range(len(columns) - 2, -1, -1):
            columns[place] = columns[place] + fades_NT[:, place] * columns[place + 1]
        gap_NT = torch.stack(columns, dim=1)
    return -select(gap_NT, taught.mask_NT)


def sampled_loss(taught: Taught, *, form: str = "reinforce", clip: float | None = None) -> Tensor:
    """Return a loss of each sampled token, (N, T), with gradient.

    Forms: reinforce, sg[x] log pi, whose value is no KL; k2, x^2 / 2; both have the gradient of KL(pi || teacher) on
    the policy's own tokens. k3, exp(-x) - 1 + x, has that of KL(teacher || pi).
    """
    gap_NT = taught.gap(taught.log_probs_NT, clip)
    return select(FORMS[form](gap_NT, select(taught.log_probs_NT, taught.mask_NT)), taught.mask_NT)


def stale_weight(taught: Taught, largest: float | None) -> Tensor:
    """Return min(exp(log pi - log pi_old), largest), (N, T), without gradient. It is 1 for None."""
    if largest is None:
        return torch.ones_like(taught.log_probs_NT)
    delta_NT = select(taught.log_probs_NT - taught.old_log_probs_NT, taught.mask_NT).detach()
    return delta_NT.clamp(-LARGEST_GAP, LARGEST_GAP).exp().clamp(max=largest)


def divergence(
    logits_LV: Tensor,
    teacher_LV: Tensor,
    *,
    beta: float = 1.0,
    top_k: int | None = 64,
    support: str = "student",
    tail: str = "bucket",
    log_prob_floor: float | None = None,
    clip: float | None = None,
) -> Tensor:
    """Return the divergence of P and Q at each position, (L,), nats.

    It has P's gradient.

    beta 1 is KL(P || Q), 0 is KL(Q || P), between them beta KL(Q || M) + (1 - beta) KL(P || M) with
    M = (1 - beta) P + beta Q (GKD, arXiv 2306.13649); it is not continuous at the ends. `top_k` looks only at the k
    likeliest tokens of the `support` (student, teacher or union), None at all; what becomes of the others says `tail`:
    bucket, one more outcome; renormalise, P and Q divided by their sums; none, left out, and never below 0. Above
    `clip` a position has no gradient. Divide logits by their temperatures first.
    """
    log_p_LV, log_q_LV = log_softmax(logits_LV), log_softmax(teacher_LV.detach())
    # Untrained entries pad the vocabularies of one tokenizer's models differently
    common = min(log_p_LV.shape[-1], log_q_LV.shape[-1])
    log_p_LV, log_q_LV = log_p_LV[..., :common], log_q_LV[..., :common]
    # A token that the teacher cannot write
    log_q_LV = torch.where(log_q_LV == -torch.inf, log_p_LV.detach() - LARGEST_GAP, log_q_LV)
    is_whole = top_k is None or top_k >= common
    chosen_LV = None if top_k is None or is_whole else SUPPORTS[support](log_p_LV.detach(), log_q_LV, top_k)
    if log_prob_floor is not None:
        log_p_LV, log_q_LV = log_p_LV.clamp(min=log_prob_floor), log_q_LV.clamp(min=log_prob_floor)
    if chosen_LV is None:
        found_L = _entries(log_p_LV, log_q_LV, beta).sum(-1)
    else:
        found_L = _over_support(log_p_LV, log_q_LV, chosen_LV, beta, tail)
    return found_L if clip is None else found_L.clamp(max=clip)


def mixed_logits(base_LV: Tensor, live_LV: Tensor, rate: float) -> Tensor:
    return torch.lerp(base_LV, live_LV, rate)


def _over_support(log_p_LV: Tensor, log_q_LV: Tensor, chosen_LV: Tensor, beta: float, tail: str) -> Tensor:
    if tail == "renormalise":
        log_p_LV = log_p_LV - _log_sum(log_p_LV, chosen_LV)
        log_q_LV = log_q_LV - _log_sum(log_q_LV, chosen_LV)
    found_L = select(_entries(log_p_LV, log_q_LV, beta), chosen_LV).sum(-1)
    if tail == "bucket":
        # Where all are chosen, any sum will do
        others_LV = ~chosen_LV | chosen_LV.all(-1, keepdim=True)
        rest_p_L, rest_q_L = (_log_sum(values, others_LV)[..., 0] for values in (log_p_LV, log_q_LV))
        return found_L + select(_entries(rest_p_L, rest_q_L, beta), ~chosen_LV.all(-1))
    return found_L.clamp(min=0) if tail == "none" else found_L


def _entries(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Return each token's part of a divergence."""
    if beta == 1:
        return log_p.exp() * (log_p - log_q)
    if beta == 0:
        return log_q.exp() * (log_q - log_p)
    log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    return beta * log_q.exp() * (log_q - log_m) + (1 - beta) * log_p.exp() * (log_p - log_m)


def _log_sum(values_LV: Tensor, chosen_LV: Tensor) -> Tensor:
    return values_LV.masked_fill(~chosen_LV, -torch.inf).logsumexp(-1, keepdim=True)


def _likeliest(values_LV: Tensor, k: int) -> Tensor:
    """Mark each row's k largest entries, of equal ones the first."""
    least_L1 = values_LV.topk(k, dim=-1).values[..., -1:]
    above_LV, equal_LV = values_LV > least_L1, values_LV == least_L1
    room_L1 = k - above_LV.sum(-1, keepdim=True)
    return above_LV | (equal_LV & (equal_LV.cumsum(-1) <= room_L1))


@dataclass(frozen=True, slots=True)
class Chosen:
    """Solved siblings and feedback for each rollout of a group."""

    demonstrations: tuple[int | None, ...]
    """Rollout of the group whose answer is shown; None without a solved one."""
    feedback_used: tuple[bool, ...]


def choose_lessons(
    rewards: Sequence[float],
    has_feedback: Sequence[bool],
    *,
    threshold: float = 1.0,
    exclude_self: bool = True,
    feedback_only_without_solution: bool = False,
) -> Chosen:
    """Choose each rollout's solved sibling and feedback (SDPO, arXiv 2601.20802).

    The first sibling of a reward of at least `threshold` is shown; one that was not scored (NaN) is none.
    """
    solved = [place for place, reward in enumerate(rewards) if reward >= threshold]
    shown = [next((one for one in solved if one != place or not exclude_self), None) for place in range(len(rewards))]
    used = [
        own and not (feedback_only_without_solution and sibling is not None)
        for own, sibling in zip(has_feedback, shown, strict=True)
    ]
    return Chosen(tuple(shown), tuple(used))


@dataclass(frozen=True, slots=True)
class TeacherTerm:
    """The part of a teacher in an objective."""

    kind: str
    """A key of TERMS."""
    function: Callable[..., Tensor]
    """Its entry with the options bound."""
    coef: float
    base: str = "current"
    """Base of the gap, a key of BASES."""
    clip: float | None = None
    """Bound of |x|."""
    is_convex: bool = False
    """Whether the policy term weighs 1 - coef."""
    own_totals: bool = False
    """Whether the tokens that have a teacher divide the term, in place of all."""
    largest_weight: float | None = None
    """Bound of `stale_weight`."""

    @property
    def needs_old(self) -> bool:
        """Return True if log-probs before the first update are read."""
        return self.base == "old" or (self.kind != "advantage" and self.largest_weight is not None)

    @property
    def is_loss(self) -> bool:
        """Return True for a loss of its own, beside the policy's."""
        return self.kind != "advantage"


BASES: dict[str, Callable[[Taught], Tensor]] = {
    "current": lambda taught: taught.log_probs_NT,
    "old": lambda taught: taught.old_log_probs_NT,
    "behaviour": lambda taught: taught.sampler_log_probs_NT,
}
"""Log-probs that an advantage compares with the teacher's."""
FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reinforce": lambda gap_NT, log_probs_NT: gap_NT.detach() * log_probs_NT,
    "k2": lambda gap_NT, log_probs_NT: ESTIMATORS["k2"](gap_NT, None),
    "k3": lambda gap_NT, log_probs_NT: ESTIMATORS["k3"](gap_NT, None),
}
SUPPORTS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "student": lambda log_p_LV, log_q_LV, k: _likeliest(log_p_LV, k),
    "teacher": lambda log_p_LV, log_q_LV, k: _likeliest(log_q_LV, k),
    "union": lambda log_p_LV, log_q_LV, k: _likeliest(log_p_LV, k) | _likeliest(log_q_LV, k),
}
TAILS = ("bucket", "renormalise", "none")
TERMS: dict[str, Callable[..., Tensor]] = {"advantage": advantage, "sampled": sampled_loss, "divergence": divergence}
"""Terms of a teacher, with their options."""
