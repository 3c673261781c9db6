"""Looks at a run with every rule, and says how it is."""

from collections.abc import Sequence

from covey.run.doctor.catalogue import RULES
from covey.run.doctor.finding import Finding, Level
from covey.run.doctor.log import RunLog

EXIT_CODES = {None: 0, Level.NOTE: 0, Level.WATCH: 3, Level.SICK: 4}
"""Of `covey doctor` by the worst finding; 1 and 2 are a defect of covey and a mistake of its user."""


def diagnose(log: RunLog) -> list[Finding]:
    """Return what is found, the most severe first. Of equal severity a cause before what follows from it."""
    found = [Finding(rule, evidence) for rule in RULES if (evidence := rule.look(log)) is not None]
    return sorted(found, key=lambda finding: -finding.level)


def worst(findings: Sequence[Finding]) -> Level | None:
    return max((finding.level for finding in findings), default=None)


def in_a_line(findings: Sequence[Finding], log: RunLog) -> str:
    """Say how a run is, and where it is too short to tell.

    >>> in_a_line([], RunLog())
    'too early to say, after 0 steps'
    """
    # Count the findings by level
    level, needed = worst(findings), 2 * log.width
    counts = {one: sum(finding.level is one for finding in findings) for one in (Level.SICK, Level.WATCH, Level.NOTE)}
    # Begin with the worst, or with being too early
    first = "healthy" if len(log.steps) >= needed else f"too early to say, after {len(log.steps)} steps"
    if level is Level.SICK:
        first = f"sick: {findings[0].rule.id} {findings[0].rule.name}"
    elif level is Level.WATCH and len(log.steps) < needed:
        first = f"after {len(log.steps)} steps"
    # Add how many there are besides
    more = f"{counts[Level.SICK] - 1} more sick" if counts[Level.SICK] > 1 else ""
    watch = f"{counts[Level.WATCH]} to watch" if counts[Level.WATCH] else ""
    know = f"{counts[Level.NOTE]} to know" if counts[Level.NOTE] else ""
    return ", ".join(word for word in (first, more, watch, know) if word)
