"""Losses of the Tinker API: sums, in float64, by covey's functions.

Shapes: N datums of a micro-batch, T positions of the longest. Inputs of a loss are (N, T), 0 outside the mask.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.algorithm import losses
from covey.algorithm.loss_inputs import RatioOptions, loss_inputs

Options = Mapping[str, float | str]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The new log-probs, with gradient, and what the client sent."""

    logprob_NT: Tensor
    given: Mapping[str, Tensor]
    mask_NT: Tensor

    def terms(self, function: Callable[..., Tensor], old_NT: Tensor, scale: str, **options: float) -> Tensor:
        """Apply a loss of covey to the values named `scale`."""
        inputs = loss_inputs(
            self.logprob_NT, old_NT, self.given[scale], self.mask_NT, ratio_options=RatioOptions("token", None)
        )
        return function(inputs, **options)


def cross_entropy(inputs: Inputs, options: Options) -> Tensor:
    """Return -w log pi."""
    return inputs.terms(losses.reinforce, inputs.logprob_NT, "weights")


def importance_sampling(inputs: Inputs, options: Options) -> Tensor:
    """Return -rho A."""
    return inputs.terms(losses.clip, inputs.given["logprobs"], "advantages", eps_low=1.0, eps_high=torch.inf)


def ppo(inputs: Inputs, options: Options) -> Tensor:
    """Return -min(rho A, clamp(rho, low, high) A)."""
    return inputs.terms(losses.clip, inputs.given["logprobs"], "advantages", **_distances(options))


def cispo(inputs: Inputs, options: Options) -> Tensor:
    """Return -sg[clamp(rho, low, high)] A log pi."""
    low, high = _number(options, LOW, 0.0), _number(options, HIGH, 4.0)
    return inputs.terms(losses.cispo, inputs.given["logprobs"], "advantages", ratio_min=low, ratio_max=high)


def dro(inputs: Inputs, options: Options) -> Tensor:
    """Return -(A log pi - beta/2 (log rho)^2)."""
    return inputs.terms(losses.dro, inputs.given["logprobs"], "advantages", beta=_number(options, "beta", 0.05))


def gspo(inputs: Inputs, options: Options) -> Tensor:
    """Return `ppo` of the sequence's mean ratio, with each token's own gradient.

    The mean is over the positions of sequence_ratio_mask.
    """
    weight_NT = inputs.given["sequence_ratio_mask"]
    delta_NT = torch.where(weight_NT != 0, inputs.logprob_NT.detach() - inputs.given["logprobs"], 0.0) * weight_NT
    mean_N1 = delta_NT.sum(1, keepdim=True) / weight_NT.sum(1, keepdim=True).clamp(min=1e-30)
    return inputs.terms(losses.clip, inputs.logprob_NT.detach() - mean_N1, "advantages", **_distances(options))


def _distances(options: Options) -> dict[str, float]:
    return {"eps_low": 1 - _number(options, LOW, 0.8), "eps_high": _number(options, HIGH, 1.2) - 1}


def _number(options: Options, name: str, default: float) -> float:
    value = options.get(name, default)
    if isinstance(value, str):
        raise ValueError(f"{name} of loss_fn_config must be a number, got {value[:40]}")
    return value


LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
"""Bounds of the ratio itself, not its distances from 1."""
RL = ("logprobs", "advantages")


@dataclass(frozen=True, slots=True)
class ServedLoss:
    """A loss with the inputs and options that it reads."""

    function: Callable[[Inputs, Options], Tensor]
    reads: tuple[str, ...]
    """Inputs besides target_tokens."""
    options: tuple[str, ...] = ()


LOSSES: dict[str, ServedLoss] = {
    "cross_entropy": ServedLoss(cross_entropy, ("weights",)),
    "importance_sampling": ServedLoss(importance_sampling, RL),
    "ppo": ServedLoss(ppo, RL, (LOW, HIGH)),
    "cispo": ServedLoss(cispo, RL, (LOW, HIGH)),
    "dro": ServedLoss(dro, RL, ("beta",)),
    "gspo": ServedLoss(gspo, (*RL, "sequence_ratio_mask"), (LOW, HIGH)),
}
