"""The gradient through transformers alone, and how much of an error in it float32 explains.

Where a policy is nearly sure of its tokens, 1 - p is the small difference of large numbers: the entries of the
gradient keep few digits in any program that computes in float32, and a fixed relative tolerance would call that a
defect. So an error beyond it is held against what transformers alone is off by itself, in float32 against float64. No
code of covey's has a part in that figure, so no mistake of covey's can raise it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from covey.config.schema import Config
from covey.policy import sharding
from covey.policy.plain import Plain, plain_model, rollout_logits
from covey.policy.policy import Policy
from covey.policy.sampling import allowed_with, chosen_logprobs
from covey.system import collectives
from covey.trainer.layouts import Row
from covey.types import Sampling

ROUNDINGS = 10.0
"""How many times the rounding of transformers an error may be. Both sides of a comparison round, each in an order of
its own, and one draw of rounding may be lucky: of policies made sharper by factors of 1 to 300, covey's own error
against float64 was 0.5 to 5.3 times that of transformers."""
MAX_EXPLAINED = 0.05
"""No larger error is put down to rounding: a factor that is wrong by a tenth would no longer be seen."""


def explained_error(
    config: Config, policy: Policy, rows: Sequence[Sequence[Row]], sampling: Sampling, error: float, limit: float
) -> float:
    """Return the relative error that a gradient may have: `limit`, or more where rounding explains `error`.

    Float64 is asked only for an error beyond the limit, in float32, and not where the settings name a tolerance.
    All ranks ask together, with the same rows and the same error.
    """
    is_float32 = config.model.precision == "float32" and not config.model.load_in_4bit
    if not error > limit or not is_float32 or config.preflight.gradient_tolerance:
        return limit
    flat = [row for group in rows for row in group]
    return max(limit, min(MAX_EXPLAINED, ROUNDINGS * float32_rounding(policy, flat, sampling)))


def float32_rounding(policy: Policy, rows: Sequence[Row], sampling: Sampling) -> float:
    """Return the relative error of the gradient of -A log pi by transformers alone in float32 against float64."""
    # Compute the same gradient in both precisions
    with sharding.unsharded(policy):
        kept = allowed_tokens(plain_model(policy), rows, sampling)
        rounded, exact = (
            plain_gradient(policy, plain_model(policy, dtype=dtype), rows, sampling, kept)
            for dtype in (torch.float32, torch.float64)
        )
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


def square(tensor: Tensor) -> float:
    """Return the sum of the squared entries."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
