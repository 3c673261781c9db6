"""Hand the files of a run to the doctor."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from covey.config.checks import Found, walk
from covey.config.schema import Config
from covey.environments.registry import known_class
from covey.system.disk import as_written
from covey_doctor.advice import ALL, Facts, Field
from covey_doctor.catalogue import RULES
from covey_doctor.diagnose import diagnose, in_a_line
from covey_doctor.finding import Finding
from covey_doctor.log import NOT_SHOWN, RunLog, log_of
from covey_report.logs.foreign import read_any
from covey_report.logs.other_metrics import read_other_metrics
from covey_report.logs.read import RunFiles, read_run
from covey_report.page.curves import prompts_of
from covey_report.page.origins import preset_settings
from covey_report.runs.outcome import not_shown


def read_for_doctor(path: Path) -> RunFiles:
    """Read a run of covey or of another tool. ValueError."""
    if not (path / "config.yaml").is_file():
        found = read_other_metrics(path)
        if found is not None:
            return found
    return read_any(path)


@dataclass(frozen=True, slots=True)
class Health:
    """Health of a run."""

    line: str
    findings: list[Finding]
    """The most severe first."""


def health_of(run: RunFiles, control: RunFiles | None = None) -> Health:
    """Diagnose a run; `control` is the same run with shuffled rewards.

    ValueError where a file is not as a run writes it.
    """
    with as_written(run.folder):
        log = run_log(run, None if control is None else run_log(control))
        found = [_with_hint(one, run.folder) for one in diagnose(log, facts_of(log.settings))]
    return Health(in_a_line(found, log), found)


def _with_hint(finding: Finding, folder: Path) -> Finding:
    """Name the command that continues a failed run."""
    if finding.rule.id != FAILED:
        return finding
    from covey.run.checkpoints.resume import resume_hint  # imports torch

    return replace(finding, advice=(*finding.advice[:-1], f"once the cause is gone: {resume_hint(folder)}"))


def lines_below_tables(folder: Path) -> list[str]:
    """Describe a run's health: the doctor's line, then its worst causes."""
    try:
        health = health_of(read_run(folder))
    except ValueError as error:  # the result is shown all the same
        return [f"doctor: {error}"]
    own = [one for one in health.findings if one.cause is None and one.rule.id != TABLE_SAYS]
    return [f"doctor: {health.line}", *(f"  {one.level.word}, {one.title}" for one in own[:MOST_FINDINGS])]


MOST_FINDINGS = 3
TABLE_SAYS, FAILED = "D32", "D36"
"""The finding that the title of the tables has already, and that of a failed run."""


def run_log(run: RunFiles, control: RunLog | None = None) -> RunLog:
    return log_of(
        run.steps,
        run.looks,
        settings=run.settings,
        updates=run.updates,
        verdicts=run.verdicts,
        answers=run.answers,
        rollouts=run.rollouts,
        summary={**run.summary, NOT_SHOWN: not_shown(run.summary)}
        if run.summary
        else {"after": {"num_prompts": prompts_of(run)}},
        error=run.error,
        control=control,
        is_foreign=not run.settings,
    )


def doctor_page(run: RunFiles) -> dict[str, Any]:
    """Build the doctor's page: a line, findings, and steps to look at."""
    health = health_of(run)
    rows = [finding.as_row() | {"look": _look(run, finding)} for finding in health.findings]
    return {"line": health.line, "findings": rows, "num_rules": len(RULES)}


def _look(run: RunFiles, finding: Finding) -> list[int]:
    """Choose traced steps of a finding, near its beginning and its end."""
    steps = sorted({row["step"] for row in run.traces})
    if not steps:
        return []
    since, until = finding.evidence.since, finding.evidence.until
    first = steps[0] if since is None else min(steps, key=lambda step: abs(step - since))
    last = steps[-1] if until is None else min(steps, key=lambda step: abs(step - until))
    return sorted({first, last})


def facts_of(settings: Mapping[str, Any]) -> Facts:
    """Gather the ranges of a run's settings, and which are read."""
    known = _settings_of(str(settings.get("environment.name")))
    return Facts({name: _field(found, settings, known) for name, found in known.items()}, preset_settings)


def _field(found: Found, settings: Mapping[str, Any], known: Mapping[str, Found]) -> Field:
    bounds = found.bounds
    needs = [need for need in bounds.needs if need.value is None]
    values = [[settings.get(one, known[one].default if one in known else None) for one in n.partners] for n in needs]
    section, _, last = found.name.rpartition(".")
    is_on = last == "enabled" or settings.get(f"{section}.enabled") is not False
    is_read = is_on and all(need.holds(*own) for need, own in zip(needs, values, strict=True))
    return Field(0.0 if bounds.ge is None else bounds.ge, ALL if bounds.le is None else bounds.le, is_read)


@cache
def _settings_of(environment: str) -> Mapping[str, Found]:
    config = Config()
    config.environment = known_class(environment)()
    return {found.name: found for found in walk(config)}
