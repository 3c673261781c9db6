"""What happened inside a loss, for the logs: which tokens were clipped, dropped or penalised.

Each function takes what its loss takes and returns named bool (N, T) tensors, False outside the mask.
"""

from collections.abc import Callable

from torch import Tensor

from covey.losses import LossInputs, far_by_bernoulli_kl, far_by_probability

Events = dict[str, Tensor]


def clip_events(
    inputs: LossInputs,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = None,
    two_sided_delta: float | None = None,
) -> Events:
    """Tokens beyond a bound in the direction their advantage pushes (where the gradient is 0), and dual clips."""
    ratio_NT, advantages_NT = inputs.ratio.detach(), inputs.advantages_NT
    low_NT = (ratio_NT < 1 - eps_low) & (advantages_NT < 0)
    high_NT = (ratio_NT > 1 + eps_high) & (advantages_NT > 0)
    events = {"clip_low": low_NT, "clip_high": high_NT, "clip_fraction": low_NT | high_NT}
    caps = [cap for cap in (dual_clip, two_sided_delta) if cap is not None]
    return events | ({"dual_clip_fraction": (ratio_NT > min(caps)) & (advantages_NT < 0)} if caps else {})


def gmpo_events(inputs: LossInputs, *, eps_low: float = 0.4, eps_high: float = 0.4) -> Events:
    """`clip_events` of the token ratios, whose bounds are in log space."""
    delta_NT, advantages_NT = inputs.token_log_ratio.detach(), inputs.advantages_NT
    low_NT = (delta_NT < -eps_low) & (advantages_NT < 0)
    high_NT = (delta_NT > eps_high) & (advantages_NT > 0)
    return {"clip_low": low_NT, "clip_high": high_NT, "clip_fraction": low_NT | high_NT}


def cispo_events(inputs: LossInputs, *, ratio_min: float = 0.0, ratio_max: float = 5.0) -> Events:
    """Tokens whose weight was clamped, whatever the sign of their advantage."""
    ratio_NT = inputs.ratio.detach()
    low_NT, high_NT = (ratio_NT < ratio_min) & inputs.mask_NT, (ratio_NT > ratio_max) & inputs.mask_NT
    return {"clip_low": low_NT, "clip_high": high_NT, "clip_fraction": low_NT | high_NT}


def clip_cov_events(inputs: LossInputs, *, eps_low: float = 0.2, eps_high: float = 0.28) -> Events:
    """`clip_events`, and the tokens left out for their covariance."""
    return clip_events(inputs, eps_low=eps_low, eps_high=eps_high) | {"cov_fraction": inputs.selected_NT}


def kl_cov_events(inputs: LossInputs, *, kl_coef: float = 1.0) -> Events:
    """The penalised tokens."""
    return {"cov_fraction": inputs.selected_NT}


def dppo_tv_events(
    inputs: LossInputs, *, div_low: float = 0.15, div_high: float = 0.15, ratio_cap: float | None = 20.0
) -> Events:
    """The dropped tokens."""
    return {"dropped_fraction": far_by_probability(inputs, div_low, div_high) & inputs.mask_NT}


def dppo_kl_events(
    inputs: LossInputs, *, div_low: float = 0.05, div_high: float = 0.05, ratio_cap: float | None = 20.0
) -> Events:
    """The dropped tokens."""
    return {"dropped_fraction": far_by_bernoulli_kl(inputs, div_low, div_high) & inputs.mask_NT}


EVENTS: dict[str, Callable[..., Events]] = {
    "clip": clip_events,
    "gmpo": gmpo_events,
    "cispo": cispo_events,
    "clip_cov": clip_cov_events,
    "kl_cov": kl_cov_events,
    "dppo_tv": dppo_tv_events,
    "dppo_kl": dppo_kl_events,
}
"""By loss; a loss that is not here logs no events."""
