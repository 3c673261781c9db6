"""Per-batch controllers: KL coefficient, entropy coefficient, sampler gap."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from covey.algorithm.settings import AlgorithmConfig
from covey.types import RunStopped

LOGGER = logging.getLogger(__name__)
ALARM = 0.1
"""Mean gap of sampler and trainer, in nats, that is no rounding in any precision."""
NOT_TRAINED = "what is sampled is not what is trained (covey check finds where they come apart)"
CORRECTED = "algorithm.correction weighs each token by it"
MOVED_ON = (
    "the policy changes much from version to version, or what is sampled is not what is trained (covey check tells)"
)


@dataclass(frozen=True, slots=True)
class KLController:
    """The KL coefficient and the rule that adapts it.

    >>> update_kl_controller(KLController(coef=0.05, rule="doubling", target=0.1), kl=0.2, num_completions=64).coef
    0.1
    """

    coef: float
    rule: str = "fixed"
    """A key of CONTROLLERS."""
    target: float | None = None
    """Nats per token; the rules other than `fixed` need it."""
    horizon: float = 10000.0
    """Completions (proportional)."""
    error_clip: float = 0.2
    """Largest relative error that is acted upon (proportional)."""
    factor: float = 2.0
    """Factor by which the coefficient is multiplied or divided (doubling)."""
    band: float = 1.5
    """Nothing happens between target / band and target * band (doubling)."""
    coef_min: float = 0.0
    coef_max: float = math.inf

    def __post_init__(self) -> None:
        if self.rule != "fixed" and self.coef <= 0:
            raise ValueError(f"target_kl={self.target} needs kl_coef > 0, got kl_coef={self.coef}")
        if not 0 <= self.coef_min <= self.coef_max:
            raise ValueError(f"kl_coef_max must be >= kl_coef_min, got {self.coef_min} and {self.coef_max}")
        if not self.coef_min <= self.coef <= self.coef_max:
            bounds = f"kl_coef_min={self.coef_min:g} and kl_coef_max={self.coef_max:g}"
            raise ValueError(f"kl_coef must be between {bounds}, got {self.coef:g}")

    def with_coef(self, coef: float) -> "KLController":
        """Return the controller with another coefficient, held within its bounds."""
        return replace(self, coef=min(max(coef, self.coef_min), self.coef_max))


def kl_controller(algorithm: AlgorithmConfig) -> KLController:
    """Build the controller of the KL coefficient, fixed or steered towards `target_kl`."""
    if algorithm.target_kl is None:
        return KLController(coef=algorithm.kl_coef)
    return KLController(
        coef=algorithm.kl_coef,
        rule=algorithm.kl_controller,
        target=algorithm.target_kl,
        horizon=algorithm.kl_horizon,
        coef_min=algorithm.kl_coef_min,
        coef_max=algorithm.kl_coef_max,
    )


def update_kl_controller(state: KLController, kl: float, num_completions: int) -> KLController:
    """Return the state after a batch's KL, summed over all ranks.

    Call it once per batch. A KL that is not finite leaves the coefficient as it is.
    """
    if not math.isfinite(kl):
        return state
    return state.with_coef(CONTROLLERS[state.rule](state, kl, num_completions))


def fixed(state: KLController, kl: float, num_completions: int) -> float:
    return state.coef


def proportional(state: KLController, kl: float, num_completions: int) -> float:
    """Return coef (1 + clip(KL / target - 1) n / horizon) (Ziegler et al., arXiv 1909.08593)."""
    assert state.target is not None
    error = min(max(kl / state.target - 1, -state.error_clip), state.error_clip)
    return state.coef * (1 + error * num_completions / state.horizon)


def doubling(state: KLController, kl: float, num_completions: int) -> float:
    """Double the coefficient above the band, halve it below (PPO, arXiv 1707.06347)."""
    assert state.target is not None
    if kl > state.band * state.target:
        return state.coef * state.factor
    if kl < state.target / state.band:
        return state.coef / state.factor
    return state.coef


@dataclass(frozen=True, slots=True)
class EntropyControl:
    """State of an adaptive entropy bonus (Skywork-OR1, arXiv 2505.22312).

    >>> update_entropy_control(EntropyControl(coef=0.0, active=False), entropy=0.1, target=0.2)
    EntropyControl(coef=0.005, active=True)
    """

    coef: float
    active: bool
    """Whether the last entropy seen was at or below the target; only then is the bonus applied."""

    @property
    def applied(self) -> float:
        return self.coef if self.active else 0.0


def entropy_control(algorithm: AlgorithmConfig) -> EntropyControl:
    """Build the entropy bonus's control; an adaptive one starts inactive."""
    return EntropyControl(algorithm.entropy_coef, active=algorithm.target_entropy is None)


def update_entropy_control(
    control: EntropyControl, *, entropy: float, target: float, step: float = 0.005, low: float = 0.0, high: float = 1.0
) -> EntropyControl:
    """Step up while entropy (nats, token mean) <= target, else down, bounded."""
    active = entropy <= target
    coef = control.coef + (step if active else -step)
    return EntropyControl(min(max(coef, low), high), active)


@dataclass
class MismatchWatch:
    """Looks at the gap of each step."""

    limit: float | None
    """Nats above which the run stops."""
    is_stale: bool
    """Whether tokens may be of older versions than the one that is trained."""
    is_corrected: bool = False
    """Whether `algorithm.correction` weighs the tokens by the gap."""
    _is_alarmed: bool = False

    def look(self, found: float) -> None:
        """Warn once of a gap between sampler and trainer; stop beyond `limit`."""
        said = f"log-probs of sampler and trainer differ by {found:.3g} nats per token"
        why = MOVED_ON if self.is_stale else CORRECTED if self.is_corrected else NOT_TRAINED
        if self.limit is not None and found > self.limit:
            raise RunStopped(f"{said}, algorithm.max_mismatch={self.limit:g}: {why}")
        if found > ALARM and not self._is_alarmed:
            LOGGER.warning("%s, more than rounding: %s; algorithm.max_mismatch stops the run", said, why)
        self._is_alarmed = found > ALARM


CONTROLLERS: dict[str, Callable[[KLController, float, int], float]] = {
    "fixed": fixed,
    "proportional": proportional,
    "doubling": doubling,
}
