"""The change between two evaluations, in one sentence and one word."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

from covey.algorithm.intervals import FEW_PROMPTS
from covey.run.records.summary import HELD_OUT
from covey.system.text.format import number_of

WORDS = {
    "shown": "gain shown",
    "lost": "got worse",
    "unclear": "gain not shown",
    "few": "too few to tell",
    "none": "no gain measured",
}
"""Words for each state."""
MEASURES = {"accuracy": "accuracy, %", "reward_mean": "mean reward"}


class Outcome(NamedTuple):
    """Outcome of a run by its evaluations before and after."""

    state: str
    """A key of WORDS."""
    measure: str
    """accuracy, or reward_mean where rewards do not say which answers are right."""

    fell: tuple[str, ...] = ()
    """The pass@k whose whole interval is below 0."""

    @property
    def words(self) -> str:
        told = f"{', '.join(self.fell[:-1])} and {self.fell[-1]}" if self.fell[1:] else "".join(self.fell)
        said = [WORDS[self.state]] if self.state != "unclear" or not told else []
        return ", ".join([*said, f"{told} fell"] if told else said)


def state_of(change: Mapping[str, Any] | None, num_prompts: int) -> str:
    """Classify a paired change over this many prompts, as a key of WORDS."""
    low, high = ((change or {}).get(name) for name in ("low", "high"))
    if not change or not is_number(change.get("value")):
        return "none"
    if num_prompts < FEW_PROMPTS or not is_number(low) or not is_number(high):
        return "few"
    return "shown" if float(low) > 0 else "lost" if float(high) < 0 else "unclear"


def measure_of(*looks: Mapping[str, Any]) -> str:
    """Return the metric that evaluations are judged by. Accuracy repeats the rewards if all are 0."""
    earned = {look.get("reward_mean", {}).get("value") for look in looks} != {0.0}
    return "accuracy" if earned and all(look.get("accuracy") for look in looks) else "reward_mean"


def outcome_of(summary: Mapping[str, Any]) -> Outcome:
    """Classify the change between a summary's evaluations."""
    before, after, gain = summary.get("before"), summary.get("after"), summary.get("gain")
    if not before or not after or not gain:
        return Outcome("none", measure_of(*(look for look in (before, after) if look)))
    measure = measure_of(before, after)
    number = gain.get("num_prompts", after["num_prompts"])
    passes = gain.get("pass_at_k", {}).items() if measure == "accuracy" else ()
    fell = tuple(f"pass@{k}" for k, change in passes if state_of(change, number) == "lost")
    return Outcome(state_of(gain.get(measure), number), measure, fell)


def sentence(summary: Mapping[str, Any]) -> str:
    """Describe the change between two evaluations: values, difference, prompts."""
    found = outcome_of(summary)
    factor, form, unit = (100, ".1f", " %") if found.measure == "accuracy" else (1, ".3f", "")
    level = f"{100 * (summary.get('confidence') or 0.95):.4g} %"
    name = MEASURES[found.measure].partition(",")[0].capitalize()
    if found.state == "none":
        look = (summary.get("after") or summary.get("before") or {}).get(found.measure) or {}
        interval = f" ({level} {spell(look, factor, form)})" if is_number(look.get("low")) else ""
        value = f"{name} {factor * look['value']:{form}}{unit}" if is_number(look.get("value")) else ""
        return f"{value}{interval} on {prompts_in_words(summary)}" if value else "Nothing was evaluated"
    before, after, change = (summary[name][found.measure] for name in ("before", "after", "gain"))
    interval = f", {level} {spell(change, factor, form)}" if is_number(change["low"]) else ""
    gain = f"{factor * change['value']:+{form}}{interval}"
    values = f"{factor * before['value']:{form}} → {factor * after['value']:{form}}{unit}"
    return f"{name} {values} ({gain}) on {prompts_in_words(summary)}"


def not_shown(summary: Mapping[str, Any]) -> str | None:
    """Describe a result that chance may have made, None for others."""
    found = outcome_of(summary)
    is_open = summary.get("status") == "completed" and found.state in ("unclear", "few")
    return f"{sentence(summary)}: {found.words}" if is_open else None


def spell(change: Mapping[str, float], factor: float, form: str) -> str:
    """Write an interval."""
    return f"[{factor * change['low']:{form}}, {factor * change['high']:{form}}]"


def prompts_in_words(summary: Mapping[str, Any]) -> str:
    """Describe the number of evaluated prompts, and whether held out."""
    some = summary.get("after") or summary.get("before") or {}
    return number_of(some.get("num_prompts", 0), summary.get("looked_at", HELD_OUT))


def is_number(value: Any) -> TypeGuard[float]:
    """Return True for numbers, not None or the text of an unmeasured value."""
    return isinstance(value, int | float) and math.isfinite(value)
