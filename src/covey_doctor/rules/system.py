"""System rules: cut answers, lost verdicts, turns, time, infinite numbers."""

import math
from dataclasses import replace
from textwrap import shorten

from covey_doctor.finding import Evidence, Level
from covey_doctor.log import RunLog
from covey_doctor.measures import mann_kendall, theil_sen, thinned
from covey_doctor.rules.common import above, evidence_of, from_to, percent, reward_name

TOOL_ERRORS = ("tools/failure_frequency", "tool_error_fraction", "tool_errors")
"""Names in logs for the share of tool calls that failed."""
TURNS = ("num_turns/mean", "turns_mean")
MOST_OF_ERROR = 600
"""Characters of an error, which says what to do at its end."""
FLOAT16_SEARCH = 20
"""Steps in which float16 may skip updates while it looks for its loss scale."""


def cut_answers(log: RunLog) -> Evidence | None:
    """Find answers that the token limit cuts."""
    found = _cut(log)
    penalised = any(name.startswith("algorithm.shaping.soft_overlong") for name in log.settings)
    shaped = log.setting("algorithm.mask_truncated") or penalised
    if found is None or found.level is not Level.SICK or not (shaped or _cut_answers_earn(log)):
        return found
    return replace(found, level=Level.WATCH)


def _cut(log: RunLog) -> Evidence | None:
    values = log.known("truncated_fraction")
    if len(values) >= 3 and all(value > 0.9 for _, value in values[-3:]):
        since = next(step for place, (step, _) in enumerate(values) if all(v > 0.9 for _, v in values[place:]))
        level = Level.SICK if len(values) >= log.width else Level.WATCH  # what is to end is learnt in the first steps
        return Evidence(level, f"{percent(values[-1][1])} of the answers are cut by the token limit", since)
    text = "the token limit cuts {} of the answers"
    return above(log, "truncated_fraction", 0.05, 0.2, text, strict=True)


def _cut_answers_earn(log: RunLog) -> bool:
    """Return True if cut answers earn half of a full reward."""
    cut, rewards = dict(log.known("truncated_fraction")[-3:]), log.known(reward_name(log))
    if not cut or any(value > 1 for _, value in rewards):
        return False
    earned = [value - (1 - cut[step]) for step, value in rewards if step in cut]
    return sum(earned) >= 0.5 * sum(cut.values())


def never_stops(log: RunLog) -> Evidence | None:
    """Find a policy that has never ended an answer."""
    values = log.known("truncated_fraction")[:3]
    if log.setting("model.kind") == "masked" or len(values) < 1 or any(value < 0.999 for _, value in values):
        return None
    longest = log.setting("sampling.max_tokens")
    within = f" within {longest} tokens" if longest else ""
    ended = any(value < 0.5 for value in log.values("truncated_fraction")[-3:])
    # Two steps may be a policy that has not learnt to end yet.
    level = Level.NOTE if ended else Level.SICK if len(values) == 3 else Level.WATCH
    steps = "step" if len(values) == 1 else f"{len(values)} steps"
    return Evidence(level, f"no answer of the first {steps} ended by itself{within}", values[0][0])


def verifier_fails(log: RunLog) -> Evidence | None:
    """Find answers that the system failed to judge."""
    shares: list[tuple[int, float]] = []
    lost, size = dict(log.known("dropped/unscored_rollouts")), log.setting("group_size")
    sampled = dict(log.known("num_groups_sampled"))
    fractions = dict(log.known("unscored_fraction"))  # none where every group was dropped
    for step in sorted({*fractions, *lost}):
        number = sampled.get(step, 0.0) * (size if isinstance(size, int) else 8)
        dropped = lost.get(step, 0.0) / number if number else 0.0
        shares.append((step, max(fractions.get(step, 0.0), min(1.0, dropped))))
    text = "{} of the answers could not be judged"
    return above(log.derived("unscored", shares), "unscored", 0.01, 0.05, text, strict=True)


def turns_go_wrong(log: RunLog) -> Evidence | None:
    """Find conversations with failing tools, one turn, or all turns."""
    for name in [name for name in log.columns if name.endswith(TOOL_ERRORS)]:
        found = above(log, name, 0.2, 0.5, "{} of the tool calls fail", strict=True)
        if found is not None:
            return found
    for name in [name for name in log.columns if name.endswith(TURNS)]:
        span, usual = log.lasting(name, lambda window: window.mean < 1.2), log.usual(name)
        if span is not None and usual is not None and usual.value > 1.5:
            went = from_to(usual, span.windows[-1].part)
            return evidence_of(Level.WATCH, span, f"the turns of a conversation fell {went}")
    return None


def slower(log: RunLog) -> Evidence | None:
    """Find steps that take longer and longer for as many tokens."""
    speed = [(step, value) for step, value in log.known("tokens_per_second") if value > 0]
    if len(speed) < 4 * log.width:
        return None
    costs = log.derived("cost", ((step, 1 / value) for step, value in speed))
    windows, usual = costs.windows("cost"), costs.usual("cost")
    values = thinned([window.mean for window in windows])
    slope, p = theil_sen(values), mann_kendall(values)
    if usual is None or slope <= 0 or p > 0.001 or windows[-1].mean < 1.5 * usual.value:
        return None
    span = costs.lasting("cost", lambda window: window.mean > 1.2 * usual.value)
    if span is None or span.is_over:
        return None
    went = from_to(usual, windows[-1].part, lambda seconds: f"{1000 * seconds:.3g} ms")
    times = f"{windows[-1].mean / usual.value:.2g} times as long"
    return evidence_of(Level.WATCH, span, f"a token takes {times}, more with every window: {went}", p=p)


def numbers_break(log: RunLog) -> Evidence | None:
    """Find infinite losses or rewards, and skipped updates."""
    for name in ("loss", "grad_norm", "sampled_reward_mean", "reward_mean", "reward_std", "kl"):
        column = log.columns.get(name, ())
        bad = [
            step for step, v in zip(log.steps, column, strict=bool(column)) if v is not None and not math.isfinite(v)
        ]
        if bad:
            number = f"{len(bad)} step{'s' * (len(bad) > 1)}"
            return Evidence(Level.SICK, f"{name} was no number in {number}, first in step {bad[0]}", bad[0])
    patience = FLOAT16_SEARCH if log.setting("model.precision") == "float16" else 0
    skipped = [(step, value) for step, value in log.known("skipped") if value > 0 and step > patience]
    if not skipped:
        return None
    share = len(skipped) / len(log.steps)
    level = Level.SICK if share > 0.01 and len(skipped) > 1 else Level.WATCH
    text = f"{len(skipped)} of {len(log.steps)} updates were skipped, as loss or gradient was not finite"
    return Evidence(level, text, skipped[0][0], values={"share": share})


def ended_early(log: RunLog) -> Evidence | None:
    """Find a run that failed."""
    if log.error is not None and log.summary.get("status") == "failed":
        where = f"after step {log.steps[-1]}" if log.steps else "before the first step was done"
        why = shorten(log.error, MOST_OF_ERROR, placeholder=" …")
        return Evidence(Level.SICK, f"the run ended {where}: {why}", None)
    return None
