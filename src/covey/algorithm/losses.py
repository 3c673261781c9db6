"""Policy losses: log-probs and advantages -> one term per token, to be minimised.

Every function here is `loss(inputs, *, options) -> (N, T)`, 0 outside the mask, local to its rows: all that depends on
the whole batch is in `inputs.selected_NT` (token_selection.py). A per-sequence loss puts the sequence's value on each
of its tokens, so aggregation `seq_mean` is its mean over sequences and `token_mean` weighs it by length.
Notation: N rollouts, T loss-token positions after padding; rho importance ratio, A advantage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.algorithm.loss_inputs import LossInputs
from covey.algorithm.token_selection import select_clip_cov, select_kl_cov

Events = dict[str, Tensor]
VESPO_LOG_FLOOR = -18.420680743952367
"""log 1e-8."""
VESPO_LOG_CEILING = 20.0


def clip(
    inputs: LossInputs,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = None,
    two_sided_delta: float | None = None,
) -> Tensor:
    """Return -min(rho A, clamp(rho, 1 - eps_low, 1 + eps_high) A).

    PPO, arXiv 1707.06347. With eps_high > eps_low: DAPO.

    `dual_clip` c bounds the loss of negative advantages by -c A (arXiv 1912.09729); `two_sided_delta` caps the
    unclipped ratio (INTELLECT-2, arXiv 2505.07291), the same as `dual_clip` where it exceeds 1 + eps_high.
    """
    ratio_NT, advantages_NT = inputs.ratio, inputs.advantages_NT
    unclipped_NT = ratio_NT if two_sided_delta is None else ratio_NT.clamp(max=two_sided_delta)
    clipped_NT = ratio_NT.clamp(1 - eps_low, 1 + eps_high)
    loss_NT = torch.maximum(-unclipped_NT * advantages_NT, -clipped_NT * advantages_NT)
    if dual_clip is None:
        return loss_NT
    return torch.where(advantages_NT < 0, torch.minimum(loss_NT, -dual_clip * advantages_NT), loss_NT)


def reinforce(inputs: LossInputs) -> Tensor:
    """-A log pi: the policy gradient itself, right only on-policy or with correction weights."""
    return -inputs.advantages_NT * inputs.log_probs_NT


def reinforce_ratio(inputs: LossInputs) -> Tensor:
    """-A exp(log pi - sg[log pi]): value -A, gradient of `reinforce`."""
    return -inputs.advantages_NT * (inputs.log_probs_NT - inputs.log_probs_NT.detach()).exp()


def gmpo(inputs: LossInputs, *, eps_low: float = 0.4, eps_high: float = 0.4) -> Tensor:
    """-A times the geometric mean of token ratios, each clipped in log space (GMPO, arXiv 2507.20673). Per sequence."""
    delta_NT, advantages_NT = inputs.token_log_ratio, inputs.advantages_NT
    clamped_NT = delta_NT.clamp(-eps_low, eps_high)
    pessimistic_NT = torch.where(
        advantages_NT > 0, torch.minimum(delta_NT, clamped_NT), torch.maximum(delta_NT, clamped_NT)
    )
    counts_N1 = inputs.mask_NT.sum(1, keepdim=True).clamp(min=1)
    return -advantages_NT * (pessimistic_NT.sum(1, keepdim=True) / counts_N1).exp()


def cispo(inputs: LossInputs, *, ratio_min: float = 0.0, ratio_max: float = 5.0) -> Tensor:
    """-sg[clamp(rho)] A log pi: clipped tokens keep their gradient (MiniMax-M1, arXiv 2506.13585, 2510.13786).

    ValueError unless ratio_min <= ratio_max.
    """
    if ratio_min > ratio_max:
        raise ValueError(f"ratio_max must be >= ratio_min={ratio_min}, got {ratio_max}")
    weights_NT = inputs.ratio.detach().clamp(ratio_min, ratio_max)
    return -weights_NT * inputs.advantages_NT * inputs.log_probs_NT


def sapo(inputs: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Tensor:
    """-(4/tau) sigmoid(tau (rho - 1)) A: a soft gate in place of the clip (SAPO, arXiv 2511.20347)."""
    tau_NT = _either(inputs.advantages_NT > 0, tau_pos, tau_neg, inputs)
    return -4 / tau_NT * torch.sigmoid(tau_NT * (inputs.ratio - 1)) * inputs.advantages_NT


def clip_cov(inputs: LossInputs, *, eps_low: float = 0.2, eps_high: float = 0.28) -> Tensor:
    """`clip`, without the selected tokens: those whose advantage and log-prob go together (arXiv 2505.22617)."""
    return torch.where(inputs.selected_NT, 0.0, clip(inputs, eps_low=eps_low, eps_high=eps_high))


def kl_cov(inputs: LossInputs, *, kl_coef: float = 1.0) -> Tensor:
    """-rho A, plus kl_coef |log rho| on the selected tokens (arXiv 2505.22617)."""
    penalty_NT = torch.where(inputs.selected_NT, kl_coef * inputs.delta.abs(), 0.0)
    return -inputs.ratio * inputs.advantages_NT + penalty_NT


def dppo_tv(
    inputs: LossInputs, *, div_low: float = 0.15, div_high: float = 0.15, ratio_cap: float | None = 20.0
) -> Tensor:
    """-A sg[min(rho, cap)] log pi, without tokens whose probability has already moved far (DPPO, arXiv 2602.04879)."""
    return _capped_reinforce(inputs, ~far_by_probability(inputs, div_low, div_high), ratio_cap)


def dppo_kl(
    inputs: LossInputs, *, div_low: float = 0.05, div_high: float = 0.05, ratio_cap: float | None = 20.0
) -> Tensor:
    """`dppo_tv` with the Bernoulli KL(p_old || p) of the sampled token as the distance (arXiv 2602.04879)."""
    return _capped_reinforce(inputs, ~far_by_bernoulli_kl(inputs, div_low, div_high), ratio_cap)


def dppo_tv_ratio(
    inputs: LossInputs, *, div_low: float = 0.2, div_high: float = 0.2, adv_tau: float = 1.0, kl_tau: float = 1e-3
) -> Tensor:
    """-adv_tau A rho on the tokens `dppo_tv` keeps, plus kl_tau (log rho)^2 on all (prime-rl, arXiv 2602.02276)."""
    keep_NT = ~far_by_probability(inputs, div_low, div_high)
    return _kept_ratio(inputs, keep_NT, adv_tau) + kl_tau * inputs.delta.square()


def ipo_mask(
    inputs: LossInputs, *, div: float = 0.1, adv_tau: float = 1.0, kl_tau: float = 1e-3, falls_only: bool = False
) -> Tensor:
    """`dppo_tv_ratio` that keeps a token iff its probability moved by at most `div`, in either direction (prime-rl).

    With `falls_only` a token whose probability rose is always kept.
    """
    gain_NT = _probability_gain(inputs)
    moved_NT = -gain_NT if falls_only else gain_NT.abs()
    return _kept_ratio(inputs, moved_NT <= div, adv_tau) + kl_tau * inputs.delta.square()


def vespo(
    inputs: LossInputs, *, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0
) -> Tensor:
    """-phi(R) A log pi, phi(R) = R^k exp(lambda (1 - R)) of the sequence ratio, detached (VESPO, arXiv 2602.10693)."""
    log_R_NT = inputs.sequence_log_ratio.detach().clamp(VESPO_LOG_FLOOR, VESPO_LOG_CEILING)
    positive_NT = inputs.advantages_NT >= 0
    k_NT = _either(positive_NT, k_pos, k_neg, inputs)
    lambda_NT = _either(positive_NT, lambda_pos, lambda_neg, inputs)
    phi_NT = (k_NT * log_R_NT + lambda_NT * (1 - log_R_NT.exp())).exp()
    return -phi_NT * inputs.advantages_NT * inputs.log_probs_NT


def topr(inputs: LossInputs, *, pos: Sequence[float] = (1.0, 1.0), neg: Sequence[float] = (0.0, 1.0)) -> Tensor:
    """-w A log pi with w the detached sequence ratio clamped to `pos` or `neg` by the sign of A (arXiv 2503.14286)."""
    ratio_NT = inputs.sequence_log_ratio.detach().exp()
    weights_NT = torch.where(inputs.advantages_NT >= 0, ratio_NT.clamp(*pos), ratio_NT.clamp(*neg))
    return -weights_NT * inputs.advantages_NT * inputs.log_probs_NT


def dro(inputs: LossInputs, *, beta: float) -> Tensor:
    """-(A log pi - beta/2 (log rho)^2) (DRO, arXiv 2405.19107)."""
    return -(inputs.advantages_NT * inputs.log_probs_NT - beta / 2 * inputs.delta.square())


def nll(inputs: LossInputs) -> Tensor:
    """-log pi: supervised learning, where every rollout is a demonstration. Advantages are not read."""
    return -inputs.log_probs_NT


def far_by_probability(inputs: LossInputs, div_low: float, div_high: float) -> Tensor:
    """Return tokens whose probability moved too far with their advantage, bool (N, T)."""
    return _far(inputs, _probability_gain(inputs).abs(), div_low, div_high)


def far_by_bernoulli_kl(inputs: LossInputs, div_low: float, div_high: float) -> Tensor:
    """Return `far_by_probability` measured by KL(Bernoulli(p_old) || Bernoulli(p))."""
    return _far(inputs, _bernoulli_kl(inputs), div_low, div_high)


def clip_events(
    inputs: LossInputs,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    dual_clip: float | None = None,
    two_sided_delta: float | None = None,
) -> Events:
    """Return tokens clipped in their advantage's direction (gradient 0), and dual clips."""
    ratio_NT, advantages_NT = inputs.ratio.detach(), inputs.advantages_NT
    low_NT = (ratio_NT < 1 - eps_low) & (advantages_NT < 0)
    high_NT = (ratio_NT > 1 + eps_high) & (advantages_NT > 0)
    events = {"clip_low": low_NT, "clip_high": high_NT, "clip_fraction": low_NT | high_NT}
    caps = [cap for cap in (dual_clip, two_sided_delta) if cap is not None]
    return events | ({"dual_clip_fraction": (ratio_NT > min(caps)) & (advantages_NT < 0)} if caps else {})


def gmpo_events(inputs: LossInputs, *, eps_low: float = 0.4, eps_high: float = 0.4) -> Events:
    """Return `clip_events` of the token ratios, whose bounds are in log space."""
    delta_NT, advantages_NT = inputs.token_log_ratio.detach(), inputs.advantages_NT
    low_NT = (delta_NT < -eps_low) & (advantages_NT < 0)
    high_NT = (delta_NT > eps_high) & (advantages_NT > 0)
    return {"clip_low": low_NT, "clip_high": high_NT, "clip_fraction": low_NT | high_NT}


def cispo_events(inputs: LossInputs, *, ratio_min: float = 0.0, ratio_max: float = 5.0) -> Events:
    """Return the tokens with a clamped weight, of any advantage."""
    ratio_NT = inputs.ratio.detach()
    low_NT, high_NT = (ratio_NT < ratio_min) & inputs.mask_NT, (ratio_NT > ratio_max) & inputs.mask_NT
    return {"clip_low": low_NT, "clip_high": high_NT, "clip_fraction": low_NT | high_NT}


def clip_cov_events(inputs: LossInputs, *, eps_low: float = 0.2, eps_high: float = 0.28) -> Events:
    """Return `clip_events`, and the tokens left out for their covariance."""
    return clip_events(inputs, eps_low=eps_low, eps_high=eps_high) | {"cov_fraction": inputs.selected_NT}


def kl_cov_events(inputs: LossInputs, *, kl_coef: float = 1.0) -> Events:
    """Return the penalised tokens."""
    return {"cov_fraction": inputs.selected_NT}


def dppo_tv_events(
    inputs: LossInputs, *, div_low: float = 0.15, div_high: float = 0.15, ratio_cap: float | None = 20.0
) -> Events:
    """Return the dropped tokens."""
    return {"dropped_fraction": far_by_probability(inputs, div_low, div_high) & inputs.mask_NT}


def dppo_kl_events(
    inputs: LossInputs, *, div_low: float = 0.05, div_high: float = 0.05, ratio_cap: float | None = 20.0
) -> Events:
    """Return the dropped tokens."""
    return {"dropped_fraction": far_by_bernoulli_kl(inputs, div_low, div_high) & inputs.mask_NT}


def _either(condition_NT: Tensor, yes: float, no: float, inputs: LossInputs) -> Tensor:
    """Select by torch.where in the log-probs' dtype, not float32."""
    return torch.where(condition_NT, inputs.log_probs_NT.new_tensor(yes), inputs.log_probs_NT.new_tensor(no))


def _far(inputs: LossInputs, distance_NT: Tensor, div_low: float, div_high: float) -> Tensor:
    gain_NT = _probability_gain(inputs)
    too_high_NT = (inputs.advantages_NT > 0) & (gain_NT > 0) & (distance_NT > div_high)
    too_low_NT = (inputs.advantages_NT <= 0) & (gain_NT < 0) & (distance_NT > div_low)
    return too_high_NT | too_low_NT


def _probability_gain(inputs: LossInputs) -> Tensor:
    return inputs.log_probs_NT.detach().exp() - inputs.old_log_probs_NT.exp()


def _bernoulli_kl(inputs: LossInputs) -> Tensor:
    log_p_NT, log_old_NT = inputs.log_probs_NT.detach(), inputs.old_log_probs_NT
    rest_NT, old_rest_NT = -torch.expm1(log_p_NT), -torch.expm1(log_old_NT)
    # xlogy is 0 where its first factor is: a token of old probability 1 gives no NaN.
    rest_term_NT = torch.xlogy(old_rest_NT, old_rest_NT) - torch.xlogy(old_rest_NT, rest_NT)
    return log_old_NT.exp() * (log_old_NT - log_p_NT) + rest_term_NT


def _capped_reinforce(inputs: LossInputs, keep_NT: Tensor, ratio_cap: float | None) -> Tensor:
    weights_NT = inputs.token_log_ratio.detach().exp()
    weights_NT = weights_NT if ratio_cap is None else weights_NT.clamp(max=ratio_cap)
    return torch.where(keep_NT, -inputs.advantages_NT * weights_NT * inputs.log_probs_NT, 0.0)


def _kept_ratio(inputs: LossInputs, keep_NT: Tensor, adv_tau: float) -> Tensor:
    term_NT = -adv_tau * inputs.advantages_NT * inputs.token_log_ratio.exp()
    return torch.where(keep_NT, term_NT, 0.0)


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss with all its properties, an entry of LOSSES."""

    function: Callable[..., Tensor]
    """`function(inputs, *, options) -> (N, T)`."""
    events: Callable[..., Events] | None = None
    """Events to log: named bool (N, T) tensors, False outside the mask; it takes the loss's arguments."""
    selector: Callable[..., Tensor] | None = None
    """`selector(inputs, seed, *, options) -> bool (N, T)`: tokens chosen over the whole batch, `inputs.selected_NT`."""
    any_ratio_level: bool = False
    """Whether it is defined for a ratio of any level; the others take the token's."""
    reads_old: bool = True
    """Whether it looks at old log-probs at all."""
    exponentiates: bool = True
    """Whether it forms exp(log ratio), which a clamp bounds."""
    proportional: bool = True
    """Whether it is a multiple of the advantage: a rollout of advantage 0 then has neither value nor gradient."""


LOSSES: dict[str, Loss] = {
    "clip": Loss(clip, clip_events, any_ratio_level=True),
    "reinforce": Loss(reinforce, reads_old=False, exponentiates=False),
    "reinforce_ratio": Loss(reinforce_ratio, reads_old=False, exponentiates=False),
    "gmpo": Loss(gmpo, gmpo_events),
    "cispo": Loss(cispo, cispo_events, any_ratio_level=True),
    "sapo": Loss(sapo, any_ratio_level=True),
    "clip_cov": Loss(clip_cov, clip_cov_events, select_clip_cov),
    "kl_cov": Loss(kl_cov, kl_cov_events, select_kl_cov, proportional=False),
    "dppo_tv": Loss(dppo_tv, dppo_tv_events),
    "dppo_kl": Loss(dppo_kl, dppo_kl_events),
    "dppo_tv_ratio": Loss(dppo_tv_ratio, proportional=False),
    "ipo_mask": Loss(ipo_mask, proportional=False),
    "vespo": Loss(vespo),
    "topr": Loss(topr),
    "dro": Loss(dro, exponentiates=False, proportional=False),
    "nll": Loss(nll, reads_old=False, exponentiates=False, proportional=False),
}
"""Losses by the name that `algorithm.loss` takes. The settings file repeats their needs (a test keeps them equal)."""
LOSS_FUNCTIONS: dict[str, Callable[..., Tensor]] = {name: loss.function for name, loss in LOSSES.items()}
