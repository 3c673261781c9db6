"""Changes of reward, held-out accuracy and columns, for several rules."""

from collections.abc import Callable, Sequence
from math import isfinite, nan, sqrt
from statistics import NormalDist
from typing import NamedTuple

from covey_doctor.finding import Evidence, Level
from covey_doctor.log import LogSpan, LogWindow, RunLog, RunPart, as_number
from covey_doctor.verdicts import pair, paired_change

REWARDS = ("sampled_reward_mean", "reward_mean")
USUAL_PROMPTS = 128
"""Prompts of an evaluation that does not say how many it had."""
CONFIDENCE = 0.95
"""Confidence of the intervals of a summary that does not say."""
FEW_PROMPTS = 30
"""Held-out prompts whose greedy answers alone say little."""


Show = Callable[[float], str]
"""Says a number in words of its kind."""


def number(value: float) -> str:
    """Say a number.

    >>> number(0.25634)
    '0.256'
    """
    return f"{value:.3g}"


def percent(value: float) -> str:
    """Say a share.

    >>> percent(0.256)
    '25.6 %'
    """
    return f"{100 * value:.3g} %"


def nats(value: float) -> str:
    return f"{value:.3g} nats"


def from_to(first: RunPart, last: RunPart, show: Show = number) -> str:
    """Describe a comparison, in the one form of all findings.

    >>> from_to(RunPart(0.25, 3, 12), RunPart(0.5, 51, 60), percent)
    'from 25 % (steps 3 to 12) to 50 % (steps 51 to 60)'
    """
    return f"from {show(first.value)} ({first.steps}) to {show(last.value)} ({last.steps})"


class Change(NamedTuple):
    """A change between the first and last part of a run."""

    before: RunPart
    after: RunPart
    error: float
    """Standard error of the difference."""

    @property
    def first(self) -> float:
        return self.before.value

    @property
    def last(self) -> float:
        return self.after.value

    def seen(self, show: Show = number) -> str:
        """Say it with the steps of both numbers."""
        return from_to(self.before, self.after, show)

    @property
    def gain(self) -> float:
        return self.last - self.first

    @property
    def z(self) -> float:
        if self.error > 0:
            return self.gain / self.error
        return 1e9 * ((self.gain > 0) - (self.gain < 0))


def reward_name(log: RunLog) -> str:
    return next((name for name in REWARDS if log.known(name)), REWARDS[0])


def change_of(log: RunLog, name: str) -> Change | None:
    """Return a column's course from its baseline to its last window."""
    base, windows = log.baseline(name), log.windows(name)
    if base is None or not windows or windows[-1].first <= base.last:
        return None
    last = windows[-1]
    return Change(base.part, last.part, sqrt(base.error**2 + last.error**2))


def reward_change(log: RunLog) -> Change | None:
    return change_of(log, reward_name(log))


def accuracy_change(log: RunLog) -> Change | None:
    return _change_of_looks(log, "accuracy")


def held_out_change(log: RunLog) -> Change | None:
    """Return the change of held-out answers, by accuracy or reward."""
    return _change_of_looks(log, held_out_measure(log))


def held_out_measure(log: RunLog) -> str:
    return "accuracy" if log.looks_at("accuracy") else "reward_mean"


def _change_of_looks(log: RunLog, name: str) -> Change | None:
    """Return a measure's change, paired over prompts where possible."""
    looks = log.looks_at(name)
    if len(looks) < 2:
        return None
    before, after = looked(looks[0]), looked(looks[-1])
    first, last = before.value, after.value
    # Take the first paired error that is of this change, a run's own verdicts before what its summary says
    ends = [row for row in log.verdicts if row["step"] in (looks[0][0], looks[-1][0])]
    found = [paired_change(*pair(ends[0], ends[-1], name))] if len(ends) > 1 else []
    for value, error in (*found, _change_of_summary(log, name)):
        if abs(value - (last - first)) < 1e-4 and isfinite(error):
            return Change(before, after, error)
    if name != "accuracy":
        return None
    prompts = num_prompts(log)
    variance = first * (1 - first) + last * (1 - last)
    return Change(before, after, sqrt(max(variance, 1 / prompts) / prompts))


def _change_of_summary(log: RunLog, name: str) -> tuple[float, float]:
    """Read the paired gain of the summary and its standard error."""
    gain = (log.summary.get("gain") or {}).get(name) or {}
    low, high, value = (nan if (end := as_number(gain.get(key))) is None else end for key in ("low", "high", "value"))
    level = as_number(log.summary.get("confidence")) or CONFIDENCE
    return value, (high - low) / (2 * NormalDist().inv_cdf((1 + level) / 2))


LEAST_CHANCE = 0.002
"""False-alarm rate of a healthy run's evaluations, over the whole run."""


def chance_at_look(log: RunLog) -> float:
    """Return the significance level of the newest evaluation.

    The levels of all evaluations add up to LEAST_CHANCE (Bonferroni over 1 / (k (k - 1)), k evaluations so far).
    """
    looks = max(2, len(log.look_steps))
    return LEAST_CHANCE / (looks * (looks - 1))


def errors_at_look(log: RunLog) -> float:
    """Return the standard errors required at the newest evaluation, at least 3."""
    return max(3.0, NormalDist().inv_cdf(1 - chance_at_look(log)))


def is_worse(change: Change | None, log: RunLog) -> bool:
    """Return True if held-out answers got worse beyond chance."""
    return change is not None and change.z < -errors_at_look(log)


def held_out_seen(change: Change, log: RunLog) -> str:
    if held_out_measure(log) == "accuracy":
        return f"held-out accuracy fell {change.seen(percent)}"
    return f"the reward of held-out prompts fell {change.seen()}"


def looked(look: tuple[int, float]) -> RunPart:
    return RunPart(look[1], look[0], look[0], is_look=True)


def onset(parts: Sequence[tuple[int, float]]) -> int | None:
    """Return the step after which numbers are nearer to the last.

    >>> onset([(1, 0.2), (11, 0.3), (21, 0.6), (31, 0.7)])
    21
    """
    if len(parts) < 2:
        return None
    middle, rises = (parts[0][1] + parts[-1][1]) / 2, parts[-1][1] > parts[0][1]
    found = parts[-1][0]
    for step, value in reversed(parts):
        if (value > middle) is not rises:
            break
        found = step
    return found


def since_moved(log: RunLog, name: str) -> int | None:
    """Return the step since which a column is nearer to its last value."""
    return onset([(window.first, window.mean) for window in log.windows(name)])


def since_look(looks: Sequence[tuple[int, float]]) -> int | None:
    """Return the same for evaluations."""
    if len(looks) < 2:
        return None
    before = [0, *(step for step, _ in looks)]
    return onset([(before[place] + 1, value) for place, (_, value) in enumerate(looks)])


def num_prompts(log: RunLog) -> int:
    """Return the number of held-out prompts per evaluation."""
    after = log.summary.get("after") or {}
    found = after.get("num_prompts") or log.setting("evaluation.num_prompts")
    return found if isinstance(found, int) and found > 0 else USUAL_PROMPTS


def has_curriculum(log: RunLog) -> bool:
    return log.setting("curriculum.name", "none") not in (None, "none")


def is_falling(log: RunLog, errors: float = 2.0) -> bool:
    """Return True if evaluations, else training rewards, get worse."""
    change = held_out_change(log)
    if change is not None:
        return change.z < -errors
    found = None if has_curriculum(log) else reward_change(log)
    return found is not None and found.z < -errors


def is_rising(log: RunLog, errors: float = 2.0) -> bool:
    """Return True if evaluations, else training rewards, get better.

    An accuracy that was at its ceiling from the beginning says nothing, so the reward is asked.
    """
    change = held_out_change(log)
    if change is None or min(change.first, change.last) >= 1:
        change = reward_change(log)
    return change is not None and change.z > errors


def gets_more_accurate(log: RunLog) -> bool:
    change = held_out_change(log)
    return change is not None and change.z > 2


def samples_deny(log: RunLog) -> bool:
    """Return True if sampled answers contradict a loss of few greedy ones.

    Greedy answers of few prompts that are much alike change all at once.
    """
    sampled = log.looks_at("pass_at_1")
    return num_prompts(log) < FEW_PROMPTS and len(sampled) >= 2 and sampled[-1][1] >= sampled[0][1]


def above(
    log: RunLog, name: str, watch: float, sick: float, text: str, show: Show = percent, *, strict: bool = False
) -> Evidence | None:
    """Return evidence of windows above a bound, critical above the higher. `text` has {} for their mean."""

    def over(bound: float) -> Callable[[LogWindow], bool]:
        return lambda window: window.mean > bound if strict else window.mean >= bound

    for bound, level in ((sick, Level.SICK), (watch, Level.WATCH)):
        span = log.lasting(name, over(bound))
        if span is not None:
            return evidence_of(level, span, text.format(show(span.mean)))
    return None


def evidence_of(level: Level, span: LogSpan, seen: str, **values: float) -> Evidence:
    """Return the evidence of a span, milder if it is over."""
    level = level.milder() if span.is_over else level
    return Evidence(level, seen, span.since, span.until, {"mean": span.mean, **values})
