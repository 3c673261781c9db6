"""Does the policy move too far, too fast, or not at all: entropy, length, KL, gradients, the clip."""

from collections.abc import Callable
from statistics import fmean, median

from covey.run.doctor.finding import Evidence, Level
from covey.run.doctor.log import RunLog, Window
from covey.run.doctor.measures import mann_kendall, spread, theil_sen, thinned
from covey.run.doctor.rules.common import (
    Change,
    accuracy_change,
    change_of,
    evidence_of,
    has_curriculum,
    is_falling,
    is_rising,
    percent,
    reward_change,
    reward_name,
)

COLLAPSED = 0.15
"""Of the entropy at the beginning."""
FEW_UNIQUE = 0.25
SPIKE, SPIKE_STEPS, SPIKES = 8.0, 50, 3
"""A gradient this many deviations above the median, so often in so many steps."""
FULL_LR_OF_LORA = 2e-5
"""Below it adapters hardly move: they take about ten times the rate of full training."""


def entropy_collapse(log: RunLog) -> Evidence | None:
    """Find entropy that is gone, together with the variety of the answers."""
    usual = log.at_first("entropy", max)
    if usual is None or usual <= 0:
        return None
    span = log.lasting("entropy", lambda window: window.mean < COLLAPSED * usual)
    if span is None:
        return None
    lost = _variety_lost(log)
    if lost is None:
        return evidence_of(Level.WATCH, span, f"entropy fell from {usual:.3g} to {span.windows[-1].mean:.3g} nats")
    text = f"entropy fell from {usual:.3g} to {span.windows[-1].mean:.3g} nats, and {lost}"
    return evidence_of(Level.SICK, span, text) if lost else None


def _variety_lost(log: RunLog) -> str | None:
    """Say what shows that answers have become alike, nothing where they have not, None where nothing tells."""
    names = sorted((name for name in log.looks if name.startswith("pass_at_")), key=lambda name: int(name[8:]))
    if len(names) >= 2:
        few, many = log.looks_at(names[0]), log.looks_at(names[-1])
        if len(few) >= 2 and len(many) == len(few):
            before, after = many[0][1] - few[0][1], many[-1][1] - few[-1][1]
            if after < 0.5 * before and many[-1][1] <= many[0][1]:
                return f"pass@{names[-1][8:]} is {after:.3f} above pass@{names[0][8:]}, {before:.3f} at first"
            return _unique_lost(log) or ""
    return _unique_lost(log)


def _unique_lost(log: RunLog) -> str | None:
    change = change_of(log, "unique_fraction")
    if change is None:
        return None
    if change.last < FEW_UNIQUE and change.last < 0.5 * change.first and not is_rising(log):
        return f"{percent(change.last)} of a group's answers differ, {percent(change.first)} at first"
    return ""


def entropy_explosion(log: RunLog) -> Evidence | None:
    """Find entropy that grows while the reward does not."""
    usual = log.at_first("entropy", min)
    if usual is None or is_rising(log):
        return None
    bound = min(max(2 * usual, usual + 0.3), usual + 1.5)
    span = log.lasting("entropy", lambda window: window.mean > bound)
    if span is None:
        return None
    level = Level.SICK if is_falling(log) or span.windows[-1].mean > usual + 1.5 else Level.WATCH
    text = f"entropy rose from {usual:.3g} to {span.windows[-1].mean:.3g} nats, and the reward does not rise"
    return evidence_of(level, span, text)


def length_explosion(log: RunLog) -> Evidence | None:
    """Find answers that grow while what they are worth does not, or until the limit cuts them."""
    # Find lengths that stay above those of the first steps
    usual = log.at_first("completion_length_mean", min)
    if usual is None or usual <= 0:
        return None
    span = log.lasting("completion_length_mean", lambda window: window.mean > 1.5 * usual)
    if span is None or span.is_over:
        return None
    # Excuse growth that pays, unless the limit cuts more
    cut = change_of(log, "truncated_fraction")
    more_cut = cut is not None and cut.gain > 0.1
    better = accuracy_change(log)
    if (is_rising(log) and not more_cut) or (better is not None and better.z > 2):
        return None
    level = Level.SICK if more_cut or is_falling(log) else Level.WATCH
    cuts = f"; {percent(cut.last)} are cut, {percent(cut.first)} at first" if cut is not None and more_cut else ""
    text = f"answers grew from {usual:.3g} to {span.windows[-1].mean:.3g} tokens without better ones{cuts}"
    return evidence_of(level, span, text)


def length_collapse(log: RunLog) -> Evidence | None:
    """Find answers that have shrunk to next to nothing, all alike."""
    usual, spread_usual = log.at_first("completion_length_mean", max), log.at_first("mean_group_std", max)
    if usual is None or usual <= 0:
        return None
    span = log.lasting("completion_length_mean", lambda window: window.mean < 0.3 * usual)
    spreads = log.windows("mean_group_std")
    if span is None or (spread_usual is not None and spreads and spreads[-1].mean > 0.2 * spread_usual):
        return None
    text = f"answers shrank from {usual:.3g} to {span.windows[-1].mean:.3g} tokens, and rewards hardly differ any more"
    better = accuracy_change(log)
    is_better = better is not None and better.z > 2
    return evidence_of(Level.WATCH if is_better else Level.SICK, span, text)


def kl_runs_away(log: RunLog) -> Evidence | None:
    """Find a KL to the reference that grows without a gain, or far beyond its target."""
    points = log.known("kl")
    # Bound the KL by its target, else by its early level
    early = [value for step, value in points if 5 <= step <= 20]
    if not early:
        return None
    usual, target = median(early), log.setting("algorithm.target_kl")
    bound = 3 * target if isinstance(target, int | float) and target > 0 else max(10 * usual, 0.1)
    # Find KL beyond the bound without a reward that rises
    span = log.lasting("kl", lambda window: window.mean > bound)
    if span is None or (is_rising(log) and span.windows[-1].mean < 10 * bound):
        return None
    level = Level.SICK if is_falling(log) or span.windows[-1].mean > 5 * bound else Level.WATCH
    text = f"KL to the reference is {span.windows[-1].mean:.3g} nats a token, {usual:.3g} in steps 5 to 20"
    return evidence_of(level, span, f"{text}, without a gain that is shown")


def gradient_spikes(log: RunLog) -> Evidence | None:
    """Find gradients that leap again and again."""
    points = [(step, value) for step, value in log.known("grad_norm") if value > 0]
    if len(points) < 2 * log.width:
        return None
    # Find gradients far above the usual
    values = [value for _, value in points]
    middle = median(values)
    bound = middle + SPIKE * max(spread(values), 0.1 * middle)
    leaps = [(step, value) for step, value in points if value > bound]
    # Find several of them within a few steps
    crowded = [
        (first, last)
        for first, last in zip(leaps, leaps[SPIKES - 1 :], strict=False)
        if last[0] - first[0] < SPIKE_STEPS
    ]
    if not crowded:
        return None
    # Judge by what the reward does meanwhile
    since, largest = crowded[0][0][0], max(value for _, value in leaps)
    level = Level.SICK if is_falling(log) else Level.WATCH
    text = f"the gradient leapt {len(leaps)} times, to {largest:.3g} where {middle:.3g} is usual"
    return Evidence(level, text, since, values={"largest": largest, "usual": middle})


def rate_too_high(log: RunLog) -> Evidence | None:
    """Find a reward that falls while the policy is thrown about."""
    name = reward_name(log)
    base = log.baseline(name)
    if base is None:
        return None

    def fell(window: Window) -> bool:
        error = (window.error**2 + base.error**2) ** 0.5
        return window.first > base.last and base.mean - window.mean > max(3 * error, 0.02 * abs(base.mean))

    # Find a fall of the reward or of held-out accuracy
    span = None if has_curriculum(log) else log.lasting(name, fell)
    change = accuracy_change(log)
    if span is None and not (change is not None and change.z < -3):
        return None
    # Find a policy that moves too far, without a gain elsewhere
    moved = _moved(log)
    if moved is None or (change is not None and change.z > 2):
        return None
    worth = f"the reward fell from {base.mean:.3g} to {span.windows[-1].mean:.3g}" if span else "held-out accuracy fell"
    if span is None:
        return Evidence(Level.SICK, f"{worth}, and {moved}", change.step if change else None)
    return evidence_of(Level.SICK, span, f"{worth}, and {moved}")


def _moved(log: RunLog) -> str | None:
    """Say by what the policy is seen to be thrown about, since the baseline or since the very first step."""
    for usual in (log.usual("entropy"), next(iter(log.values("entropy")), None)):
        span = None if not usual else log.lasting("entropy", _is_far_from(usual))
        if span is not None:
            return f"entropy went from {usual:.3g} to {span.windows[-1].mean:.3g} nats"
    clip = log.windows("clip_fraction")
    if len(clip) >= 2 and all(window.mean > 0.3 for window in clip[-2:]):
        return f"{percent(clip[-1].mean)} of the tokens are clipped"
    return None


def _is_far_from(usual: float) -> Callable[[Window], bool]:
    return lambda window: abs(window.mean - usual) > 0.5 * usual


def rate_too_low(log: RunLog) -> Evidence | None:
    """Find a policy that does not move though there is something to learn."""
    # Adapters need larger rates than all weights do
    rate, rank = log.setting("optimizer.lr"), log.setting("model.lora_rank")
    if isinstance(rate, float) and rank and rate < FULL_LR_OF_LORA and len(log.steps) >= 2 * log.width:
        text = f"optimizer.lr={rate:g} with adapters of rank {rank}"
        return None if is_rising(log) else Evidence(Level.WATCH, text, None, values={"lr": rate})
    # Excuse runs too short, or without a signal to learn from
    reward, signal = reward_change(log), log.windows("zero_std_fraction")
    if len(log.steps) < max(50, 4 * log.width) or reward is None or not signal or signal[-1].mean > 0.6:
        return None
    # Find measures that stand still, without a trend in rewards
    still = [name for name in ("entropy", "completion_length_mean") if _stands_still(log, name)]
    values = thinned(log.values(reward_name(log)))
    if len(still) < 2 or is_rising(log) or mann_kendall(values) < 0.05:
        return None
    slope = theil_sen(values)
    text = f"after {len(log.steps)} steps reward, entropy and length are where they began (slope {slope:.1g})"
    return Evidence(Level.WATCH, text, log.steps[0], values={"entropy_change": _relative(change_of(log, "entropy"))})


def _stands_still(log: RunLog, name: str) -> bool:
    change = change_of(log, name)
    return change is not None and (
        abs(_relative(change)) < 0.01 or (abs(change.z) < 2 and abs(_relative(change)) < 0.1)
    )


def _relative(change: Change | None) -> float:
    return change.gain / abs(change.first) if change and change.first else 0.0


def clip_works(log: RunLog) -> Evidence | None:
    """Find a clip that takes the gradient from many tokens, or from one side alone."""
    # Find a clip fraction that is large overall
    span = log.lasting("clip_fraction", lambda window: window.mean > 0.25)
    if span is not None:
        # A run that gets better learns from the rest, as where ratios against a reference leave their range
        level = Level.SICK if span.mean > 0.5 and not is_rising(log) else Level.WATCH
        return evidence_of(level, span, f"the clip takes the gradient from {percent(span.mean)} of the tokens")
    # Find a clip that works on one side
    low, high = log.windows("clip_low")[-2:], log.windows("clip_high")[-2:]
    if len(low) < 2 or len(high) < 2:
        return None
    of_low, of_high = (fmean(window.mean for window in side) for side in (low, high))
    if max(of_low, of_high) < 0.02 or max(of_low, of_high) < 10 * min(of_low, of_high):
        return None
    text = f"{percent(of_high)} of the tokens are clipped above the range, {percent(of_low)} below"
    return Evidence(Level.NOTE, text, low[0].first, values={"high": of_high, "low": of_low})
