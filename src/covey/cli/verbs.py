"""Verbs that read no settings: covey's own, and those of installed packages."""

from collections.abc import Callable, Sequence
from typing import Any

from covey.cli import help as usage
from covey.system.extensions import Extensions
from covey.system.lookup import resolve

OWN = {
    "machines": "covey_report.machines.command:run_command",
    "show": "covey_report.runs.show:run_show",
    "rollouts": "covey_report.runs.rollouts:run_rollouts",
    "report": "covey_report.command:run_report",
    "watch": "covey_report.command:run_watch",
    "export": "covey_report.export.command:run_export",
    "translate": "covey_trl.translation.command:run_translate",
    "doctor": "covey_report.doctor.command:run_doctor",
    "status": "covey_report.runs.status:run_status",
    "replay": "covey_report.runs.command:run_replay",
    "serve": "covey_serve.command:run_serve",
    "verify": "covey_report.verify.command:run_verify",
    "branch": "covey_report.branch.command:run_branch",
}
"""Verb -> function of the words that follow it, which may return an exit code. Imported when it is called."""
PARTS = {
    "plan flags": "covey_report.plan.command:read_flags",
    "plan": "covey_report.plan.command:print_plans",
    "settings": "covey_report.plan.settings:report",
    "report": "covey_report.command:report_at_the_end",
    "summary": "covey_report.runs.tables:print_summary",
    "folder": "covey_report.runs.tables:print_folder",
    "side by side": "covey_report.runs.show:print_side_by_side",
    "worst answers": "covey_report.runs.show:print_worst_answers",
}
"""Functions of packages beside covey, by name: the core imports none of them."""


def part(name: str) -> Callable[..., Any]:
    """Import a function of a package beside covey."""
    return resolve(PARTS[name], {})


COMMANDS = Extensions("covey.commands", "verb", OWN)


def command_of(verb: str, words: Sequence[str]) -> Callable[[list[str]], Any]:
    """Import the function of a verb. ValueError for an unknown verb."""
    if verb not in COMMANDS:
        raise ValueError(usage.unknown_verb(verb, words, all_verbs()))
    return COMMANDS.load(verb)


def all_verbs() -> dict[str, str]:
    """List all verbs with a line of help each."""
    others = {verb: COMMANDS.first_line(verb) for verb in COMMANDS.names() if verb not in usage.VERBS}
    return usage.VERBS | others
