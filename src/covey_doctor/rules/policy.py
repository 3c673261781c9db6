"""Policy rules: entropy, length, KL, gradients, the clip."""

import re
from collections.abc import Callable
from statistics import fmean, median

from covey_doctor.finding import Evidence, Level
from covey_doctor.log import LogSpan, LogWindow, RunLog, RunPart
from covey_doctor.measures import mann_kendall, spread, theil_sen, thinned
from covey_doctor.rules.common import (
    Change,
    Show,
    change_of,
    evidence_of,
    from_to,
    gets_more_accurate,
    has_curriculum,
    held_out_change,
    held_out_measure,
    held_out_seen,
    is_falling,
    is_rising,
    is_worse,
    looked,
    nats,
    percent,
    reward_change,
    reward_name,
    since_look,
)

COLLAPSED = 0.15
"""Share of the entropy at the beginning."""
FEW_UNIQUE = 0.25
ALMOST_ALL = 0.99
"""A pass@k above it has lost nothing to fewer kinds of answers."""
SPIKE, SPIKE_STEPS, SPIKES = 8.0, 50, 3
"""Deviations of a gradient above the median, how often, in how many steps."""
FAR = 1.0
"""KL, nats per token, at which the policy has left the reference."""
CLIPPED = 0.25
"""Share of tokens: with more a batch moves the policy too far."""
AGREES = 0.2
"""Correlation of advantages with rewards: 1 where nothing but the reward is in them."""
FEWEST_LOOKS = 5
"""Second looks: fewer do not show that updates gained nothing."""
VANISHED, VANISHED_STEPS = 0.1, 10
"""Share of the first step's reward, and the least number of steps averaged."""
UNMOVED = 1e-3
"""Nats by which answers differ where the weights that were stepped are not those of the policy."""
FULL_LR_OF_LORA = 2e-5
"""Below it adapters hardly move: they take about ten times the rate of full training."""

SHORTER = 0.7
"""Share of their usual length below which answers have become short."""
DOUBT = re.compile(r"\b(wait|hmm|actually|perhaps|maybe|alternatively|let me check|not sure|on second thought)\b", re.I)
"""Words of someone who looks again."""
FEW_ANSWERS, OFTEN_IN_DOUBT = 20, 0.1
"""Fewest logged answers of each half, and least share of them with such a word before."""


def entropy_collapse(log: RunLog) -> Evidence | None:
    """Find entropy that is gone, together with the variety of the answers."""
    usual = log.at_first("entropy", max)
    if usual is None or usual.value <= 0:
        return None
    span = log.lasting("entropy", lambda window: window.mean < COLLAPSED * usual.value)
    if span is None:
        return None
    lost, text = _variety_lost(log), f"entropy fell {_to_the_end(usual, span, nats)}"
    if lost is None:
        return evidence_of(Level.WATCH, span, text)
    return evidence_of(Level.SICK, span, f"{text}, and {lost}") if lost else None


def _to_the_end(usual: RunPart, span: LogSpan, show: Show) -> str:
    return from_to(usual, span.windows[-1].part, show)


def teacher_costs_thinking(log: RunLog) -> Evidence | None:
    """Find a teacher beside which answers shorten, doubt goes, or variety falls."""
    if not log.windows("teacher/kl"):
        return None
    usual = log.at_first("completion_length_mean", max)
    if usual is None or usual.value <= 0:
        return None
    span = log.lasting("completion_length_mean", lambda window: window.mean < SHORTER * usual.value)
    doubt, variety = doubt_lost(log), _variety_lost(log)
    signs = [sign for sign in (doubt, variety) if sign]
    if span is None:
        # Short answers that never doubted lose nothing that shows in their length
        if not (doubt and variety):
            return None
        return Evidence(Level.WATCH, f"beside a teacher {' and '.join(signs)}", log.steps[0])
    if not signs and gets_more_accurate(log):
        return None
    told = "; ".join([f"beside a teacher answers shrank {_to_the_end(usual, span, _tokens)}", *signs])
    return evidence_of(Level.SICK if is_falling(log) else Level.WATCH, span, told)


def doubt_lost(log: RunLog) -> str | None:
    """Describe answers without their former doubt, None otherwise."""
    middle = log.steps[-1] // 2 if log.steps else 0
    shares = []
    for rows in ([r for r in log.rollouts if r["step"] <= middle], [r for r in log.rollouts if r["step"] > middle]):
        if len(rows) < FEW_ANSWERS:
            return None
        shares.append(fmean(bool(DOUBT.search(str(row.get("completion")))) for row in rows))
    early, late = shares
    if early < OFTEN_IN_DOUBT or late > early / 3:
        return None
    return f"the share of answers with a word of doubt fell from {percent(early)} to {percent(late)}"


def _variety_lost(log: RunLog) -> str | None:
    """Describe lost variety of answers, "" if none, None if unknown."""
    names = sorted((name for name in log.looks if name.startswith("pass_at_")), key=lambda name: int(name[8:]))
    if len(names) >= 2:
        few, many = log.looks_at(names[0]), log.looks_at(names[-1])
        if len(few) >= 2 and len(many) == len(few):
            before, after = many[0][1] - few[0][1], many[-1][1] - few[-1][1]
            if after < 0.5 * before and many[-1][1] <= min(many[0][1], ALMOST_ALL):
                went = from_to(looked((many[0][0], before)), looked((many[-1][0], after)))
                return f"pass@{names[-1][8:]} less pass@{names[0][8:]} went {went}"
            return _unique_lost(log) or ""
    return _unique_lost(log)


def _unique_lost(log: RunLog) -> str | None:
    change = change_of(log, "unique_fraction")
    if change is None:
        return None
    if change.last < FEW_UNIQUE and change.last < 0.5 * change.first and not is_rising(log):
        return f"the share of a group's answers that differ fell {change.seen(percent)}"
    return ""


def entropy_explosion(log: RunLog) -> Evidence | None:
    """Find entropy that grows while the reward does not."""
    usual = log.at_first("entropy", min)
    if usual is None or is_rising(log):
        return None
    bound = min(max(2 * usual.value, usual.value + 0.3), usual.value + 1.5)
    span = log.lasting("entropy", lambda window: window.mean > bound)
    if span is None:
        return None
    level = Level.SICK if is_falling(log) or span.windows[-1].mean > usual.value + 1.5 else Level.WATCH
    return evidence_of(level, span, f"entropy rose {_to_the_end(usual, span, nats)}, and the reward does not rise")


def length_explosion(log: RunLog) -> Evidence | None:
    """Find answers that grow without gain, or until they are cut."""
    usual = log.at_first("completion_length_mean", min)
    if usual is None or usual.value <= 0:
        return None
    span = log.lasting("completion_length_mean", lambda window: window.mean > 1.5 * usual.value)
    if span is None or span.is_over:
        return None
    cut = change_of(log, "truncated_fraction")
    more_cut = cut is not None and cut.gain > 0.1
    if (is_rising(log) and not more_cut) or gets_more_accurate(log):
        return None
    level = Level.SICK if more_cut or is_falling(log) else Level.WATCH
    cuts = f"; the share that is cut rose {cut.seen(percent)}" if cut is not None and more_cut else ""
    return evidence_of(level, span, f"answers grew {_to_the_end(usual, span, _tokens)} without better ones{cuts}")


def _tokens(value: float) -> str:
    return f"{value:.3g} tokens"


def length_collapse(log: RunLog) -> Evidence | None:
    """Find answers that have shrunk, all alike, or by half."""
    usual, spread_usual = log.at_first("completion_length_mean", max), log.at_first("mean_group_std", max)
    if usual is None or usual.value <= 0 or spread_usual is None:
        return None
    span = log.lasting("completion_length_mean", lambda window: window.mean < 0.3 * usual.value)
    if span is None or log.windows("mean_group_std")[-1].mean > 0.2 * spread_usual.value:
        last = log.windows("completion_length_mean")[-1].part
        text = f"answers shrank {from_to(usual, last, _tokens)}: read some (covey show)"
        return Evidence(Level.NOTE, text, last.first) if last.value < 0.5 * usual.value else None
    text = f"answers shrank {_to_the_end(usual, span, _tokens)}, and rewards hardly differ any more"
    return evidence_of(Level.WATCH if gets_more_accurate(log) else Level.SICK, span, text)


def kl_runs_away(log: RunLog) -> Evidence | None:
    """Find a KL that grows without gain, or beyond its target."""
    points = log.known("kl")
    early = [(step, value) for step, value in points if 5 <= step <= 20]
    if not early:
        return None
    usual = RunPart(median(value for _, value in early), early[0][0], early[-1][0])
    target = log.setting("algorithm.target_kl")
    bound = 3 * target if isinstance(target, int | float) and target > 0 else min(max(10 * usual.value, 0.1), FAR)
    span = log.lasting("kl", lambda window: window.mean > bound)
    if span is None or (is_rising(log) and span.windows[-1].mean < 10 * bound):
        return None
    level = Level.SICK if is_falling(log) or span.windows[-1].mean > 5 * bound else Level.WATCH
    text = f"KL to the reference, a token, went {_to_the_end(usual, span, nats)}, without a gain that is shown"
    return evidence_of(level, span, text)


def gradient_spikes(log: RunLog) -> Evidence | None:
    """Find gradients that leap again and again."""
    points = [(step, value) for step, value in log.known("grad_norm") if value > 0]
    if len(points) < 2 * log.width:
        return None
    values = [value for _, value in points]
    middle = median(values)
    bound = middle + SPIKE * max(spread(values), 0.1 * middle)
    # In the first window a gradient may be large and settle
    leaps = [(step, value) for step, value in points[log.width :] if value > bound]
    pairs = zip(leaps, leaps[SPIKES - 1 :], strict=False)
    crowded = [first for first, last in pairs if last[0] - first[0] < SPIKE_STEPS]
    if not crowded:
        return None
    since, (farthest, largest) = crowded[0][0], max(leaps, key=lambda leap: leap[1])
    level = Level.SICK if is_falling(log) else Level.WATCH
    went = from_to(RunPart(middle, points[0][0], points[-1][0]), RunPart(largest, farthest, farthest))
    text = f"the gradient leapt {len(leaps)} times, the farthest {went}"
    return Evidence(level, text, since, values={"largest": largest, "usual": middle})


def rate_too_high(log: RunLog) -> Evidence | None:
    """Find a reward that falls while the policy is thrown about."""
    name = reward_name(log)
    base = log.baseline(name)
    if base is None:
        return None

    def fell(window: LogWindow) -> bool:
        error = (window.error**2 + base.error**2) ** 0.5
        return window.first > base.last and base.mean - window.mean > max(3 * error, 0.02 * abs(base.mean))

    span = None if has_curriculum(log) else log.lasting(name, fell)
    change = held_out_change(log)
    if span is None and not is_worse(change, log):
        return None
    since = since_look(log.looks_at(held_out_measure(log))) if span is None else span.since
    moved = _moved(log, since or 0)
    if moved is None or gets_more_accurate(log):
        return None
    if span is not None:
        went = from_to(base.part, span.windows[-1].part)
        return evidence_of(Level.SICK, span, f"the reward fell {went}, and {moved}")
    assert change is not None
    return Evidence(Level.SICK, f"{held_out_seen(change, log)}, and {moved}", since)


def _moved(log: RunLog, since: int) -> str | None:
    """Describe how far the policy was thrown, by its clip since then."""
    first = next((RunPart(value, step, step) for step, value in log.known("entropy")), None)
    for usual in (log.usual("entropy"), first):
        span = None if usual is None or not usual.value else log.lasting("entropy", _is_far_from(usual.value))
        if usual is not None and span is not None:
            return f"entropy went {_to_the_end(usual, span, nats)}"
    span = log.lasting("clip_fraction", lambda window: _usual_clip(window) > CLIPPED)
    if span is None or span.windows[-1].last < since:
        return None
    last = span.windows[-1]
    return f"{percent(_usual_clip(last))} of the tokens are clipped where rewards differ ({last.part.steps})"


def _usual_clip(window: LogWindow) -> float:
    """Average over steps that clip: without differing rewards none does."""
    return fmean([value for value in window.values if value > 0] or [0.0])


def _is_far_from(usual: float) -> Callable[[LogWindow], bool]:
    return lambda window: abs(window.mean - usual) > 0.5 * usual


def astray(log: RunLog) -> Evidence | None:
    """Find updates that do not raise rewarded answers above others."""
    agreement = log.known("advantage_agreement")
    mean = fmean(value for _, value in agreement) if agreement and len(log.steps) >= 3 else 1.0
    # A wrong sign leaves nothing to compare after a step or two: all answers are wrong then
    if mean < (AGREES if len(agreement) >= 3 else -AGREES):
        seen = f"the correlation of advantages with the rewards of their answers is {mean:.2g}"
        return Evidence(Level.SICK, seen, agreement[0][0], values={"agreement": mean})
    # Total gain of the second looks, and its error
    errors = dict(log.known("update_gain_error"))
    looks = [one for one in log.known("update_gain") if one[0] in errors]
    if len(looks) < 3:
        return _undone(log, looks)
    gain = fmean(value for _, value in looks)
    error = sum(errors[step] ** 2 for step, _ in looks) ** 0.5 / len(looks)
    is_few = len(looks) < FEWEST_LOOKS
    is_sick = gain < -3 * error or (abs(gain) + 2 * error < UNMOVED and not is_few)
    if gain > 2 * error or (not is_sick and (is_few or is_rising(log))):
        return None
    text = f"updates moved the best answer of a group by {gain:.2g} nats against its worst (error {error:.1g}"
    values = {"gain": gain, "error": error}
    return Evidence(Level.SICK if is_sick else Level.WATCH, f"{text}, {len(looks)} looks)", looks[0][0], values=values)


def _undone(log: RunLog, looks: list[tuple[int, float]]) -> Evidence | None:
    """Find rewards that vanish by updates that lowered the best answers."""
    rewards = log.known(reward_name(log))
    after = [value for step, value in rewards if looks and step > looks[-1][0]]
    if len(looks) < 2 or len(after) < VANISHED_STEPS or max(gain for _, gain in looks) >= 0:
        return None
    # A first reward below 0 has vanished by nothing above it
    if fmean(after) >= min(rewards[0][1], VANISHED * rewards[0][1]):
        return None
    mean = fmean(gain for _, gain in looks)
    lowered = f"updates moved the best answer of a group by {mean:.2g} nats against its worst"
    text = f"{lowered} ({len(looks)} looks), and rewards fell from {rewards[0][1]:.3g} to {fmean(after):.2g}"
    return Evidence(Level.SICK, text, looks[0][0])


def rate_too_low(log: RunLog) -> Evidence | None:
    """Find a policy that does not move despite a signal."""
    # Adapters need larger rates than all weights do
    rate, rank = log.setting("optimizer.lr"), log.setting("model.lora_rank")
    is_seen = len(log.steps) >= 2 * log.width or len(log.looks_at(held_out_measure(log))) > 1
    if isinstance(rate, float) and rank and rate < FULL_LR_OF_LORA and is_seen:
        text = f"optimizer.lr={rate:g} with adapters of rank {rank}"
        return None if is_rising(log) else Evidence(Level.WATCH, text, None, values={"lr": rate})
    reward, signal = reward_change(log), log.windows("zero_std_fraction")
    if len(log.steps) < max(50, 4 * log.width) or reward is None or not signal or signal[-1].mean > 0.6:
        return None
    # TRL with scale_rewards="batch" logs whether all rewards of a batch are equal, which says nothing of its groups
    if log.is_foreign and {*log.values("zero_std_fraction")} <= {0.0, 1.0}:
        return None
    entropy, length = change_of(log, "entropy"), change_of(log, "completion_length_mean")
    values = thinned(log.values(reward_name(log)))
    if not (_stands_still(entropy) and _stands_still(length)) or is_rising(log) or mann_kendall(values) < 0.05:
        return None
    went = [f"{name} {one.seen()}" for name, one in (("entropy", entropy), ("length", length)) if one is not None]
    text = f"all is where it began: the reward went {reward.seen()}, {', '.join(went)} (slope {theil_sen(values):.1g})"
    return Evidence(Level.WATCH, text, log.steps[0], values={"entropy_change": _relative(entropy)})


def _stands_still(change: Change | None) -> bool:
    share = abs(_relative(change))
    return change is not None and (share < 0.01 or (abs(change.z) < 2 and share < 0.1))


def _relative(change: Change | None) -> float:
    return change.gain / abs(change.first) if change and change.first else 0.0


def clip_works(log: RunLog) -> Evidence | None:
    """Find a clip that drops many tokens' gradients, or one side's."""
    span = log.lasting("clip_fraction", lambda window: window.mean > CLIPPED)
    if span is not None:
        # A run that gets better learns from the rest, as where ratios against a reference leave their range
        level = Level.SICK if span.mean > 0.5 and not is_rising(log) else Level.WATCH
        return evidence_of(level, span, f"{percent(span.mean)} of the tokens lose their gradient to the clip")
    low, high = log.windows("clip_low"), log.windows("clip_high")
    if len(low) < 2 or len(high) < 2:
        return None
    of_low, of_high = (fmean(window.mean for window in side[-2:]) for side in (low, high))
    if not _is_one_sided(of_low, of_high):
        return None
    since = low[-2].first
    for one, other in zip(reversed(low), reversed(high), strict=False):
        if not _is_one_sided(one.mean, other.mean) or (one.mean > other.mean) is not (of_low > of_high):
            break
        since = min(since, one.first if one is not low[0] else log.known("clip_low")[0][0])
    text = f"{percent(of_high)} of the tokens are clipped above the range, {percent(of_low)} below"
    seen = f"{text} (steps {low[-2].first} to {low[-1].last})"
    return Evidence(Level.NOTE, seen, since, values={"high": of_high, "low": of_low})


def _is_one_sided(low: float, high: float) -> bool:
    return max(low, high) >= 0.02 and max(low, high) >= 10 * min(low, high)
