"""Rounding errors and gradients of plain transformers.

Models round differently: log-probs of thirty layers keep fewer digits than those of two, and where a policy is nearly
sure of its tokens, 1 - p is a small difference of large numbers. So an error beyond the usual tolerance is compared
with transformers' own error at the same tokens: in float32 against float64, in half precision against float32. No code
of covey's takes part.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from covey.engine.weights import EIGHT_BITS, MEAN_SHARE, PROBE_TOLERANCE, tolerance
from covey.policy import sharding
from covey.policy.plain import Plain, rollout_logits, rollout_logprobs, rounded_and_exact
from covey.policy.policy import DTYPES, Policy
from covey.policy.sampling import allowed_with, chosen_logprobs
from covey.policy.settings import ModelConfig
from covey.system import collectives
from covey.trainer.layouts import Row
from covey.types import Rollout, Sampling
from covey_preflight.budget import affordable_tokens
from covey_preflight.subject import PreflightContext

EXACT_FORWARDS = 4
"""Forward passes in float32 that a pass in each of both precisions is worth."""
ROUNDINGS = 10.0
"""Largest ratio of an error to transformers' rounding. Both sides round, each in its order: for policies sharpened by
factors of 1 to 300, covey's error against float64 was 0.5 to 5.3 times transformers'."""
HALF_ROUNDINGS = 3.0
"""The same in half precision, where the errors of many entries are of one size."""
ERRORS = 2.0
"""Standard errors that the mean gap of few tokens may be above its bound; gaps deviate by about their mean."""
MAX_EXPLAINED, MAX_HALF_EXPLAINED = 0.05, 0.25
"""Largest errors attributed to rounding: beyond, a factor wrong by a tenth (in half precision a third) would go unseen.
"""


def explained_logprobs(
    subject: PreflightContext, gaps: Mapping[str, Tensor], rollouts: Sequence[Rollout]
) -> tuple[list[str], float]:
    """Return the gaps of log-probs beyond rounding, and the largest rounding.

    Gaps have N tokens each, in nats. Transformers is measured only for gaps beyond the usual, on the affordable
    `rollouts`, worst first. The mean may be MEAN_SHARE of the most. Collective.
    """
    config = subject.config
    if config.engine.weights == "int8" and not config.preflight.logprob_tolerance:
        # The engine rounds more than its precision says; the trainer does not.
        engine = {name: gap_L for name, gap_L in gaps.items() if name.startswith("engine")}
        others = {name: gap_L for name, gap_L in gaps.items() if name not in engine}
        wrong, limit = _beyond_rounding(subject, others, rollouts) if others else ([], 0.0)
        return [*wrong, *_beyond(engine, EIGHT_BITS)], max(limit, EIGHT_BITS)
    return _beyond_rounding(subject, gaps, rollouts)


def _beyond_rounding(
    subject: PreflightContext, gaps: Mapping[str, Tensor], rollouts: Sequence[Rollout]
) -> tuple[list[str], float]:
    config, policy = subject.config, subject.run.policy
    precision = DTYPES[kind_of(config.model)]
    usual = config.preflight.logprob_tolerance or PROBE_TOLERANCE[precision]
    wrong = _beyond(gaps, usual)
    if config.preflight.logprob_tolerance or not any(collectives.all_gather(bool(wrong))):
        return wrong, usual
    chosen = rollouts[: max(1, affordable_tokens(subject, EXACT_FORWARDS) // max(len(r.input_ids) for r in rollouts))]
    with torch.no_grad(), sharding.gather_weights(policy):
        sampling = subject.run.source.sampling
        rounded_L, exact_L = (
            torch.cat([rollout_logprobs(plain, rollout, sampling).double() for rollout in chosen])
            for plain in rounded_and_exact(policy)
        )
    limit = tolerance(precision, float((rounded_L - exact_L).abs().mean()), usual)
    return _beyond(gaps, limit), limit


def _beyond(gaps: Mapping[str, Tensor], limit: float) -> list[str]:
    """Name gaps beyond a limit, NaN included."""

    def is_within(gap_L: Tensor) -> bool:
        mean = MEAN_SHARE * limit * (1 + ERRORS / len(gap_L) ** 0.5)
        return bool(gap_L.max() <= limit and gap_L.mean() <= mean)

    return [name for name, gap_L in gaps.items() if not is_within(gap_L)]


def explained_error(
    typed: float | None,
    policy: Policy,
    rows: Sequence[Sequence[Row]],
    sampling: Sampling,
    error: float,
    limit: float,
    known: Sequence[Tensor] | None = None,
) -> float:
    """Return a gradient's largest relative error: `limit`, or explained rounding.

    Transformers is measured only beyond the limit, and not where the settings name a tolerance. `known` is its gradient
    in float32. Collective, with equal rows and error.
    """
    if not error > limit or typed:
        return limit
    flat = [row for group in rows for row in group]
    times, most = (ROUNDINGS, MAX_EXPLAINED) if policy.computes_whole else (HALF_ROUNDINGS, MAX_HALF_EXPLAINED)
    return max(limit, min(most, times * gradient_rounding(policy, flat, sampling, known)))


def gradient_rounding(
    policy: Policy, rows: Sequence[Row], sampling: Sampling, known: Sequence[Tensor] | None = None
) -> float:
    """Return the relative rounding error of transformers' gradient of -A log pi."""
    with sharding.gather_weights(policy):
        plain = rounded_and_exact(policy)
        kept = allowed_tokens(plain[1], rows, sampling)
        exact = plain_gradient(policy, plain[1], rows, sampling, kept)
        is_same = known is not None and policy.computes_whole and not sampling.filters
        rounded = known if known and is_same else plain_gradient(policy, plain[0], rows, sampling, kept)
    apart = sum(square(left - right) for left, right in zip(rounded, exact, strict=True))
    size = sum(square(right) for right in exact)
    apart, size = collectives.all_sum(torch.tensor([apart, size], dtype=torch.float64)).tolist()
    return float((apart / size) ** 0.5) if size else 0.0


def plain_gradient(
    policy: Policy, plain: Plain, rows: Sequence[Row], sampling: Sampling, kept: Sequence[Tensor | None]
) -> list[Tensor]:
    """Return each trained weight's gradient of `plain_loss`, possibly 0."""
    trained = [weight for weight in policy.model.parameters() if weight.requires_grad]
    found = torch.autograd.grad(plain_loss(plain, rows, sampling, kept), trained, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(trained, found, strict=True)]


def plain_loss(plain: Plain, rows: Sequence[Row], sampling: Sampling, kept: Sequence[Tensor | None]) -> Tensor:
    """Return -A log pi, averaged over the loss tokens of all rows. `kept` are the filters' entries of each."""
    total = torch.zeros((), dtype=torch.float64, device=plain.device)
    for row, kept_LV in zip(rows, kept, strict=True):
        advantage_L = torch.tensor(row.advantages, dtype=torch.float64, device=plain.device)
        logprob_L = chosen_logprobs(*rollout_logits(plain, row.rollout), sampling, kept_LV)
        total = total - (advantage_L * logprob_L.double()).sum()
    return total / sum(row.rollout.num_loss_tokens for row in rows)


def allowed_tokens(plain: Plain, rows: Sequence[Row], sampling: Sampling) -> list[Tensor | None]:
    """Return the filters' entries of each row, for fixed weights.

    They stay fixed while weights move, as in an update: a token entering top-p would make the loss jump.
    """
    if not sampling.filters:
        return [None] * len(rows)
    with torch.no_grad():
        return [allowed_with(*rollout_logits(plain, row.rollout), sampling) for row in rows]


def kind_of(model: ModelConfig) -> str:
    """Return the precision to judge by, the coarsest for 4-bit weights."""
    return "bfloat16" if model.load_in_4bit else model.precision


def square(tensor: Tensor) -> float:
    """Return the squared L2 norm, with rows in float32 for speed."""
    rows = torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return float(torch.linalg.vector_norm(rows, dtype=torch.float64)) ** 2
