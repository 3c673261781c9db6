"""Sampler rules: the gap to the trainer, and staleness."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from covey_doctor.finding import Evidence, Level
from covey_doctor.log import RunLog, RunPart
from covey_doctor.measures import mann_kendall, theil_sen, thinned
from covey_doctor.rules.common import Show, above, change_of, evidence_of, from_to, nats, percent

FAR_TOKEN = 5.0
"""Nats by which one token may differ."""
RETURNS = 3
"""Returns of a gap to rounding that show a pattern."""


class RoundingBounds(NamedTuple):
    """Bounds of rounding errors, by the precision of the policy."""

    watch: float
    """Bound of `mismatch_kl`, nats."""
    sick: float
    floor: float
    """Bound of `mismatch`, nats: below it growth means nothing."""


def bounds_of(log: RunLog) -> RoundingBounds:
    precision = log.setting("model.precision")
    if log.setting("engine.weights") == "int8":
        return RoundingBounds(0.02, 0.05, 0.2)
    if precision in ("float32", "float64") and log.setting("engine.name", "native") != "vllm":
        return RoundingBounds(1e-6, 1e-6, 1e-4)
    return RoundingBounds(5e-3, 1e-2, 0.02)


def _is_fresh(log: RunLog) -> bool:
    """Return True if data are on-policy, so that a gap is a defect."""
    ages = [value for name in ("staleness_max", "staleness/max") for value in log.values(name)]
    return max(ages, default=0.0) == 0 and not log.setting("max_staleness", 0)


def not_the_trainer(log: RunLog) -> Evidence | None:
    """Find an engine that computes something else than the trainer."""
    bounds = bounds_of(log)
    if not _is_fresh(log):
        bounds = RoundingBounds(0.05, 0.5, 1.0)
    name, watch, sick = "mismatch_kl", bounds.watch, bounds.sick
    show: Show = nats
    if not log.known(name):  # TRL and verl log a mean difference
        (name, show), watch, sick = _gap(log), 0.05, 0.2
    what = "KL of sampler to trainer" if name == "mismatch_kl" else "difference of sampler and trainer"
    precision = "int8" if log.setting("engine.weights") == "int8" else log.setting("model.precision")
    text = f"{what} is {{}} a token{f', in {precision}' if precision else ''}"
    found = above(log, name, watch, sick, text, show, strict=True)
    if found is not None:
        return found
    # Far beyond rounding it need not last
    gaps = log.known(name)[-3:]
    if _is_fresh(log) and len(gaps) == 3 and min(value for _, value in gaps) > 10 * sick:
        return Evidence(Level.SICK, text.format(show(fmean(value for _, value in gaps))), gaps[0][0])
    span = log.lasting("mismatch_max", lambda window: min(window.values) > FAR_TOKEN)
    text = "in every step a token differs by {:.3g} nats or more between engine and trainer"
    return evidence_of(Level.WATCH, span, text.format(min(span.windows[-1].values))) if span else None


def _gap(log: RunLog) -> tuple[str, Show]:
    if log.known("mismatch") or not log.known("mismatch_probability"):
        return "mismatch", nats
    return "mismatch_probability", lambda value: f"{value:.3g} in probability"


def gap_grows(log: RunLog) -> Evidence | None:
    """Find a gap that grows during training."""
    name, show = _gap(log)
    change, usual = change_of(log, name), log.usual(name)
    if change is None or usual is None or change.last < max(2 * usual.value, bounds_of(log).floor):
        return None
    # The gap that training makes after a token was sampled grows with the rate and the age alone
    if mann_kendall(thinned(log.values(name))) >= 0.01:
        return None
    span = log.lasting(name, lambda window: window.mean > 2 * usual.value)
    if span is None or span.is_over:
        return None
    level = Level.SICK if change.last > 0.1 else Level.WATCH
    went = from_to(usual, change.after, show)
    return evidence_of(level, span, f"what sampler and trainer differ by, a token, grew {went}")


def old_weights(log: RunLog) -> Evidence | None:
    """Find an engine with stale weights, always or in some steps."""
    name, show = _gap(log)
    points = log.known(name)
    if len(points) < log.width or not _is_fresh(log):
        return None
    window, floor = log.windows(name)[-1], bounds_of(log).floor
    first, last = points[0][1], window.mean
    # Weights that are late bring it back to rounding again and again
    returns = [one for before, one in pairwise(points) if before[1] > 5 * floor >= 5 * one[1]]
    if len(returns) >= RETURNS:
        farthest = max(points, key=lambda point: point[1])
        text = f"engine and trainer differ by up to {show(farthest[1])} (step {farthest[0]}), and agree again in every"
        seen = f"{text} {(returns[-1][0] - returns[0][0]) / (len(returns) - 1):.2g} steps"
        return Evidence(Level.SICK, seen, next(step for step, value in points if value > 5 * floor))
    values = [value for _, value in points]
    # A gap that leaps later, or begins to grow then, is another defect
    is_growing = all(map(_grows, (values, values[: len(values) // 2])))
    if first > floor or last < 5 * max(floor, first) or not is_growing:
        return None
    went = from_to(RunPart(first, points[0][0], points[0][0]), window.part, show)
    text = f"engine and trainer agreed in the first step, and what they differ by grew {went}"
    return Evidence(Level.SICK, text, points[1][0], values={"first": first, "last": last})


def _grows(values: Sequence[float]) -> bool:
    found = thinned(values)
    return theil_sen(found) > 0 and mann_kendall(found) <= 0.05


def stale_data(log: RunLog) -> Evidence | None:
    """Find data so old that few of its tokens still count."""
    text = "the effective sample size is {} of the tokens (staleness up to {:.0f})"
    ages = "staleness_max" if log.known("staleness_max") else "staleness/max"
    for bound, level in ((0.5, Level.SICK), (0.8, Level.WATCH)):
        span = log.lasting("ess_fraction", lambda window, bound=bound: window.mean < bound)  # type: ignore[misc]
        if span is not None:
            return evidence_of(level, span, text.format(percent(span.mean), max(log.values(ages), default=0.0)))
    span = log.lasting(ages, lambda window: window.mean > 8)
    return evidence_of(Level.WATCH, span, f"what is trained is {span.mean:.1f} versions old") if span else None
