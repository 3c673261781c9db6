"""Looks at a run with every rule, and says how it is."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from covey_doctor.advice import ALL, NO_FACTS, Facts, still_open
from covey_doctor.catalogue import RULES
from covey_doctor.finding import Finding, Level
from covey_doctor.log import MIN_WINDOW, RunLog
from covey_doctor.rules.common import num_prompts

EXIT_CODES = {None: 0, Level.NOTE: 0, Level.WATCH: 3, Level.SICK: 4}
"""Exit code of `covey doctor` by the worst finding; 1 and 2 are a defect of covey and a mistake of its user."""
TRAINED = "training prompt"
"""Name in summaries of evaluation prompts where none were held out."""


def diagnose(log: RunLog, facts: Facts = NO_FACTS) -> list[Finding]:
    """Apply every rule to a log; list findings, the most severe first.

    At equal severity a cause comes before its consequences, which keep their severity: `doctor.stop_on` and scripts
    may ask for it. Advice that a run follows already is left out, by its settings and `facts` about them.
    """
    first, settings = log.steps[0] if log.steps else 1, log.settings
    has_no_more = num_prompts(log) < settings.get("evaluation.num_prompts", 0)
    if settings and (has_no_more or log.summary.get("looked_at") == TRAINED):
        settings = {**settings, "evaluation.num_prompts": ALL}
    found = [
        Finding(rule, evidence, first_step=first, advice=still_open(rule.advice, settings, facts))
        for rule in RULES
        if (evidence := rule.look(log)) is not None
    ]
    sick = [finding.rule for finding in found if finding.level is Level.SICK]
    causes = {id: rule.id for rule in reversed(sick) for id in rule.brings}
    found = [replace(finding, cause=causes.get(finding.rule.id)) for finding in found]
    return sorted(found, key=lambda finding: (-finding.level, finding.cause is not None))


def worst(findings: Sequence[Finding]) -> Level | None:
    return max((finding.level for finding in findings), default=None)


def in_a_line(findings: Sequence[Finding], log: RunLog) -> str:
    """Describe a run in one line.

    >>> in_a_line([], RunLog())
    'too early to say, after 0 steps'
    """
    level, needed, number = worst(findings), 2 * log.width, len(log.steps)
    own = [finding for finding in findings if finding.cause is None]
    counts = {one: sum(finding.level is one for finding in own) for one in (Level.SICK, Level.WATCH, Level.NOTE)}
    first = "healthy" if number >= needed else f"too early to say, after {number_of(number, 'step')}"
    if level is Level.SICK:
        first = f"sick: {findings[0].rule.id} {findings[0].rule.name}"
    elif level is Level.WATCH and number < needed:
        first = f"after {number_of(number, 'step')}"
    elif MIN_WINDOW <= number < needed:
        first = f"nothing wrong is seen in {number} steps{_rewards(log)}; some rules need {needed}"
    more = f"{counts[Level.SICK] - 1} more sick ({_named(own[1:], Level.SICK)})" if counts[Level.SICK] > 1 else ""
    watch = f"{counts[Level.WATCH]} to watch ({_named(own, Level.WATCH)})" if counts[Level.WATCH] else ""
    know = f"{number_of(counts[Level.NOTE], 'note')} ({_named(own, Level.NOTE)})" if counts[Level.NOTE] else ""
    follow = f"{len(findings) - len(own)} in consequence" if len(own) < len(findings) else ""
    return ", ".join(word for word in (first, more, watch, know, follow) if word)


def number_of(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _named(findings: Sequence[Finding], level: Level) -> str:
    own = [(finding.rule, finding.evidence.until) for finding in findings if finding.level is level]
    return ", ".join(f"{rule.id} {rule.name}{' over now' * (until is not None)}" for rule, until in own)


def _rewards(log: RunLog) -> str:
    values = log.values("sampled_reward_mean") or log.values("reward_mean")
    half = MIN_WINDOW // 2
    return f" (reward {fmean(values[:half]):.3g} to {fmean(values[-half:]):.3g})" if len(values) >= MIN_WINDOW else ""
