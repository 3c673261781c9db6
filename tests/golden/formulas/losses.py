"""Policy losses, one term per token.

`row.log_probs` varies and `row.held` has the same numbers held constant, so that sg[x] is written with `held` and a
derivative with respect to `log_probs` is the gradient that training takes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from .exact import MP, Params, Real, above, clamp, mean


@dataclass(frozen=True)
class Row:
    """One completion as a loss reads it."""

    log_probs: list[Real]
    held: list[Real]
    base: list[Real]
    """Log-probs of the policy in the denominator of the ratio: old, proximal or reference."""
    advantages: list[Real]
    mask: list[int]
    params: Params
    selected: list[bool] = field(default_factory=list)
    """Tokens that a rule over the whole batch singled out."""

    @property
    def tokens(self) -> list[int]:
        """Return the positions that count."""
        return [t for t, counts in enumerate(self.mask) if counts]

    def gap(self, t: int, held: bool = False) -> Real:
        """Return d = log pi - log pi_base at a token."""
        return (self.held if held else self.log_probs)[t] - self.base[t]


def log_ratio(row: Row, t: int, level: str, held: bool = False) -> Real:
    """Return the logarithm of the ratio at a level, cut at +-log_ratio_clamp after summing."""
    bound = row.params.get("log_ratio_clamp", MP.mpf(20))
    gaps = [row.gap(s, held) for s in row.tokens]
    if level == "token":
        log = row.gap(t, held)
    elif level == "sequence":
        log = sum(gaps)
    elif level == "sequence_mean":
        log = mean(gaps)
    else:
        assert level == "sequence_mean_token"
        own = MP.mpf(0) if held else row.log_probs[t] - row.held[t]
        log = mean([row.gap(s, held=True) for s in row.tokens]) + own
    return log if bound is None else clamp(log, -bound, bound)


def ratio(row: Row, t: int, level: str | None = None, held: bool = False) -> Real:
    """Return rho at the level of the case, or at the one given."""
    return MP.exp(log_ratio(row, t, level or row.params.get("ratio", "token"), held))


def clip(row: Row, t: int) -> Real:
    """Return -min(rho A, clamp(rho) A), for A < 0 at most -c A, rho at most delta (arXiv 1707.06347, 1912.09729)."""
    p, advantage, rho = row.params, row.advantages[t], ratio(row, t)
    first = clamp(rho, None, p.get("two_sided_delta"))
    term = -min(first * advantage, clamp(rho, 1 - p["eps_low"], 1 + p["eps_high"]) * advantage)
    if p.get("dual_clip") is None or advantage >= 0:
        return term
    return min(term, -p["dual_clip"] * advantage)


def reinforce(row: Row, t: int) -> Real:
    """Return -A log pi."""
    return -row.advantages[t] * row.log_probs[t]


def reinforce_ratio(row: Row, t: int) -> Real:
    """Return -A exp(log pi - sg[log pi])."""
    return -row.advantages[t] * MP.exp(row.log_probs[t] - row.held[t])


def gmpo(row: Row, t: int) -> Real:
    """Return -A times the geometric mean of ratios cut in log space, pessimistically (GMPO, arXiv 2507.20673)."""
    p, advantage = row.params, row.advantages[t]
    pessimist = min if advantage > 0 else max
    logs = [log_ratio(row, s, "token") for s in row.tokens]
    return -advantage * MP.exp(mean([pessimist(d, clamp(d, -p["eps_low"], p["eps_high"])) for d in logs]))


def cispo(row: Row, t: int) -> Real:
    """Return -sg[clamp(rho)] A log pi (CISPO, arXiv 2506.13585)."""
    weight = clamp(ratio(row, t, held=True), row.params["ratio_min"], row.params["ratio_max"])
    return -weight * row.advantages[t] * row.log_probs[t]


def sapo(row: Row, t: int) -> Real:
    """Return -(4 / tau) sigmoid(tau (rho - 1)) A, tau by the sign of A (SAPO, arXiv 2511.20347)."""
    tau = row.params["tau_pos" if row.advantages[t] > 0 else "tau_neg"]
    return -4 / MP.mpf(tau) / (1 + MP.exp(-tau * (ratio(row, t) - 1))) * row.advantages[t]


def clip_cov(row: Row, t: int) -> Real:
    """Return `clip`, but 0 for the selected tokens (arXiv 2505.22617)."""
    return MP.mpf(0) if row.selected[t] else clip(row, t)


def kl_cov(row: Row, t: int) -> Real:
    """Return -rho A, plus coef |log rho| on the selected tokens (arXiv 2505.22617)."""
    penalty = row.params["kl_coef"] * abs(row.gap(t)) if row.selected[t] else 0
    return -ratio(row, t) * row.advantages[t] + penalty


def dppo_tv(row: Row, t: int) -> Real:
    """Return -A sg[min(rho, cap)] log pi, but 0 where p has gone far where A pushes it (DPPO, arXiv 2602.04879)."""
    return _capped(row, t) if not is_far(row, t, abs(_gain(row, t))) else MP.mpf(0)


def dppo_kl(row: Row, t: int) -> Real:
    """Return `dppo_tv` with the KL of the Bernoulli distributions of the token as the distance."""
    return _capped(row, t) if not is_far(row, t, bernoulli_kl(row, t)) else MP.mpf(0)


def dppo_tv_ratio(row: Row, t: int) -> Real:
    """Return -tau_A A rho where `dppo_tv` keeps the token, plus tau_KL d^2 everywhere (prime-rl)."""
    return _kept_ratio(row, t, not is_far(row, t, abs(_gain(row, t))))


def ipo_mask(row: Row, t: int) -> Real:
    """Return the same, kept iff |p - p_old| <= delta (prime-rl)."""
    return _kept_ratio(row, t, not above(abs(_gain(row, t)), row.params["div"]))


def vespo(row: Row, t: int) -> Real:
    """Return -sg[R^k exp(lambda (1 - R))] A log pi with R in [1e-8, e^20] (VESPO, arXiv 2602.10693)."""
    side = "pos" if row.advantages[t] >= 0 else "neg"
    k, strength = row.params[f"k_{side}"], row.params[f"lambda_{side}"]
    whole = clamp(ratio(row, t, "sequence", held=True), MP.mpf("1e-8"), MP.exp(20))
    return -(whole**k) * MP.exp(strength * (1 - whole)) * row.advantages[t] * row.log_probs[t]


def topr(row: Row, t: int) -> Real:
    """Return -sg[clamp(R)] A log pi, with the bounds of the sign of A (TOPR, arXiv 2503.14286)."""
    low, high = row.params["pos" if row.advantages[t] >= 0 else "neg"]
    return -clamp(ratio(row, t, "sequence", held=True), low, high) * row.advantages[t] * row.log_probs[t]


def dro(row: Row, t: int) -> Real:
    """Return -(A log pi - beta/2 d^2) (DRO, arXiv 2405.19107)."""
    return -(row.advantages[t] * row.log_probs[t] - row.params["beta"] / 2 * row.gap(t) ** 2)


def nll(row: Row, t: int) -> Real:
    """Return -log pi, whatever the advantage: supervised learning."""
    return -row.log_probs[t]


def is_far(row: Row, t: int, distance: Real) -> bool:
    """Return whether p has gone up with A > 0, or down with A <= 0, by more than its bound."""
    rising = row.advantages[t] > 0
    bound = row.params["div_high" if rising else "div_low"]
    gain = _gain(row, t)
    return above(distance, bound) and bool(gain > 0 if rising else gain < 0)


def bernoulli_kl(row: Row, t: int) -> Real:
    """Return KL(p_old || p) of the events that the token is drawn, or is not."""
    old, new = MP.exp(row.base[t]), MP.exp(row.held[t])
    pairs = [(old, new), (1 - old, 1 - new)]
    return sum((MP.inf if b == 0 else a * MP.log(a / b) for a, b in pairs if a > 0), MP.mpf(0))


def _gain(row: Row, t: int) -> Real:
    return MP.exp(row.held[t]) - MP.exp(row.base[t])


def _capped(row: Row, t: int) -> Real:
    weight = clamp(ratio(row, t, "token", held=True), None, row.params.get("ratio_cap"))
    return -row.advantages[t] * weight * row.log_probs[t]


def _kept_ratio(row: Row, t: int, is_kept: bool) -> Real:
    term = -row.params["adv_tau"] * row.advantages[t] * ratio(row, t, "token") if is_kept else 0
    return term + row.params["kl_tau"] * row.gap(t) ** 2


LOSSES: dict[str, Callable[[Row, int], Real]] = {
    function.__name__: function
    for function in (
        *(clip, reinforce, reinforce_ratio, gmpo, cispo, sapo, clip_cov, kl_cov, dppo_tv, dppo_kl),
        *(dppo_tv_ratio, ipo_mask, vespo, topr, dro, nll),
    )
}
