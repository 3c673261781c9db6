"""Tell changed files from machines with other rounding."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from covey.config.schema import Config
from covey.run.records.facts import changed_code
from covey_report.verify.differences import Difference
from covey_report.verify.proof import OWN_CODE, facts_that_differ

CONFIRMED, DIFFERS, UNKNOWN = "confirmed", "differs", "cannot be verified"
EXIT_CODES = {CONFIRMED: 0, DIFFERS: 1, UNKNOWN: 2}
ROUNDING = {"float32": 1e-3, "float64": 1e-6}
"""Largest relative difference of a metric that other hardware makes, by precision."""
ROUNDING_OF_HALF = 0.05
SAME_TOKENS = {"float32": 0.9, "float64": 0.99}
"""Least share of a step's rollouts whose tokens stay the same on other hardware."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of a verification, and its reason in one line."""

    word: str
    reason: str


def judge(found: Sequence[Difference], then: Mapping[str, Any], now: Mapping[str, Any], config: Config) -> Judgement:
    """Judge the differences of a run by its machine and this one."""
    if not found:
        return Judgement(CONFIRMED, "the same numbers to the bit")
    others = facts_that_differ(then, now) if then else ["the run did not note its machine"]
    others += [why for why, is_so in INEXACT.items() if is_so(config, now)]
    larger = [one for one in found if not is_rounding(one, config)]
    own = [
        f"{name} ({', '.join(files)})"
        for name, files in changed_code(then.get(OWN_CODE), now.get(OWN_CODE, {})).items()
    ]
    if own and (larger or not others):
        return Judgement(DIFFERS, f"the run's own code was changed since, which may be all: {_some(own)}")
    if not others:
        why = "processor, packages, code and threads are the same: a file was changed, or other settings made the run"
        return Judgement(DIFFERS, why)
    if larger:
        why = f"more than rounding, though the machine differs too ({_some(others)})"
        return Judgement(DIFFERS, "other data or another model than the run had" if larger[0].kind == "data" else why)
    return Judgement(UNKNOWN, f"what differs is of the size of rounding, and the machine is another: {_some(others)}")


def is_rounding(one: Difference, config: Config) -> bool:
    """Return True if other hardware or packages may explain a difference."""
    precision = config.model.precision
    if one.kind == "data":
        return False
    if one.kind == "reward":
        return config.environment.learned_judge != "none"
    if one.same_tokens is not None and one.same_tokens < 1:
        return one.same_tokens >= SAME_TOKENS.get(precision, 0.0)
    return one.gap is None or one.gap <= ROUNDING.get(precision, ROUNDING_OF_HALF)


def _some(others: Sequence[str]) -> str:
    return "; ".join(others[:3]) + (f"; {len(others) - 3} more" if len(others) > 3 else "")


INEXACT: dict[str, Callable[[Config, Mapping[str, Any]], bool]] = {
    "streaming=true adds gradients as groups arrive, and when they arrived is not kept": lambda config, now: (
        config.streaming and config.source == "local"
    ),
    "kernels of a GPU need not repeat their sums (model.deterministic=false)": lambda config, now: (
        now.get("device") == "cuda" and not config.model.deterministic
    ),
}
"""Reasons why a run's own machine need not compute the same bits again."""
