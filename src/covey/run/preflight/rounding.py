"""How much of an error rounding explains, and the gradient through transformers alone.

What a model rounds is its own: log-probs of thirty layers keep fewer digits than those of two, and where a policy is
nearly sure of its tokens, 1 - p is the small difference of large numbers in any program. A fixed tolerance would call
that a defect. So an error beyond it is held against what transformers alone is off by itself, at the same tokens: in
float32 against float64, in half precision against float32. No code of covey's has a part in that figure, so no mistake
of covey's can raise it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from covey.config.schema import Config
from covey.engine.weights import MEAN_SHARE, PROBE_TOLERANCE, tolerance
from covey.policy import sharding
from covey.policy.plain import Plain, rollout_logits, rollout_logprobs, rounded_and_exact
from covey.policy.policy import DTYPES, Policy
from covey.policy.sampling import allowed_with, chosen_logprobs
from covey.policy.settings import ModelConfig
from covey.run.preflight.budget import affordable_tokens
from covey.run.preflight.subject import PreflightContext
from covey.system import collectives
from covey.trainer.layouts import Row
from covey.types import Rollout, Sampling

EXACT_FORWARDS = 4
"""Forward passes in float32 that a pass in each of both precisions is worth."""
ROUNDINGS = 10.0
"""How many times the rounding of transformers an error may be. Both sides of a comparison round, each in an order of
its own, and one draw of rounding may be lucky: of policies made sharper by factors of 1 to 300, covey's own error
against float64 was 0.5 to 5.3 times that of transformers."""
HALF_ROUNDINGS = 3.0
"""The same in half precision, where the errors of many entries are of one size."""
ERRORS = 2.0
"""Standard errors that the mean gap of few tokens may be above its bound; gaps deviate by about their mean."""
MAX_EXPLAINED, MAX_HALF_EXPLAINED = 0.05, 0.25
"""No larger error is put down to rounding: a factor that is wrong by a tenth would no longer be seen, in half precision
by a third."""


def explained_logprobs(
    subject: PreflightContext, gaps: Mapping[str, Tensor], rollouts: Sequence[Rollout]
) -> tuple[list[str], float]:
    """Return which gaps of log-probs (N tokens each, nats) are no rounding, and the most of a token that would be.

    Transformers is asked how it rounds only where a gap is beyond the usual, on those of `rollouts` that time allows,
    the worst first. The mean may be MEAN_SHARE of the most. All ranks ask together.
    """
    config, policy = subject.config, subject.run.policy
    precision = DTYPES[kind_of(config.model)]
    usual = config.preflight.logprob_tolerance or PROBE_TOLERANCE[precision]
    wrong = _beyond(gaps, usual)
    if config.preflight.logprob_tolerance or not any(collectives.all_gather(bool(wrong))):
        return wrong, usual
    chosen = rollouts[: max(1, affordable_tokens(subject, EXACT_FORWARDS) // max(len(r.input_ids) for r in rollouts))]
    with torch.no_grad(), sharding.unsharded(policy):
        sampling = subject.run.source.sampling
        rounded_L, exact_L = (
            torch.cat([rollout_logprobs(plain, rollout, sampling).double() for rollout in chosen])
            for plain in rounded_and_exact(policy)
        )
    limit = tolerance(precision, float((rounded_L - exact_L).abs().mean()), usual)
    return _beyond(gaps, limit), limit


def _beyond(gaps: Mapping[str, Tensor], limit: float) -> list[str]:
    """Name the gaps beyond a limit, at most or on average. NaN is beyond any."""

    def is_within(gap_L: Tensor) -> bool:
        mean = MEAN_SHARE * limit * (1 + ERRORS / len(gap_L) ** 0.5)
        return bool(gap_L.max() <= limit and gap_L.mean() <= mean)

    return [name for name, gap_L in gaps.items() if not is_within(gap_L)]


def explained_error(
    config: Config, policy: Policy, rows: Sequence[Sequence[Row]], sampling: Sampling, error: float, limit: float
) -> float:
    """Return the relative error that a gradient may have: `limit`, or more where rounding explains `error`.

    Transformers is asked only for an error beyond the limit, and not where the settings name a tolerance.
    All ranks ask together, with the same rows and the same error.
    """
    if not error > limit or config.preflight.gradient_tolerance:
        return limit
    flat = [row for group in rows for row in group]
    times, most = (ROUNDINGS, MAX_EXPLAINED) if policy.computes_whole else (HALF_ROUNDINGS, MAX_HALF_EXPLAINED)
    return max(limit, min(most, times * gradient_rounding(policy, flat, sampling)))


def gradient_rounding(policy: Policy, rows: Sequence[Row], sampling: Sampling) -> float:
    """Return the relative error of the gradient of -A log pi by transformers alone, by rounding."""
    with sharding.unsharded(policy):
        plain = rounded_and_exact(policy)
        kept = allowed_tokens(plain[1], rows, sampling)
        rounded, exact = (plain_gradient(policy, one, rows, sampling, kept) for one in plain)
    apart = sum(square(left - right) for left, right in zip(rounded, exact, strict=True))
    size = sum(square(right) for right in exact)
    apart, size = collectives.all_sum(torch.tensor([apart, size], dtype=torch.float64)).tolist()
    return float((apart / size) ** 0.5) if size else 0.0


def plain_gradient(
    policy: Policy, plain: Plain, rows: Sequence[Row], sampling: Sampling, kept: Sequence[Tensor | None]
) -> list[Tensor]:
    """Return the gradient of `plain_loss` of each trained weight, 0 where the loss does not depend on one."""
    trained = [weight for weight in policy.model.parameters() if weight.requires_grad]
    found = torch.autograd.grad(plain_loss(plain, rows, sampling, kept), trained, allow_unused=True)
    return [torch.zeros_like(w) if g is None else g for w, g in zip(trained, found, strict=True)]


def plain_loss(plain: Plain, rows: Sequence[Row], sampling: Sampling, kept: Sequence[Tensor | None]) -> Tensor:
    """Return -A log pi, averaged over the loss tokens of all rows.

    `kept` are the entries that filters leave in each.
    """
    total = torch.zeros((), dtype=torch.float64, device=plain.device)
    for row, kept_LV in zip(rows, kept, strict=True):
        advantage_L = torch.tensor(row.advantages, dtype=torch.float64, device=plain.device)
        logprob_L = chosen_logprobs(*rollout_logits(plain, row.rollout), sampling, kept_LV)
        total = total - (advantage_L * logprob_L.double()).sum()
    return total / sum(row.rollout.num_loss_tokens for row in rows)


def allowed_tokens(plain: Plain, rows: Sequence[Row], sampling: Sampling) -> list[Tensor | None]:
    """Return the entries that filters leave of each row's loss tokens, with the current weights.

    While weights move they stay the same, as in an update: a token that a step brings into top-p would make the loss
    jump.
    """
    if not sampling.filters:
        return [None] * len(rows)
    with torch.no_grad():
        return [allowed_with(*rollout_logits(plain, row.rollout), sampling) for row in rows]


def kind_of(model: ModelConfig) -> str:
    """Return the precision to judge by, the least precise for weights in 4 bits.

    Kernels that multiply them may differ with the shape.
    """
    return "bfloat16" if model.load_in_4bit else model.precision


def square(tensor: Tensor) -> float:
    """Return the sum of the squared entries."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
