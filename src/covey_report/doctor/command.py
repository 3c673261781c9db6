"""`covey doctor RUN ...`: findings from logs, with an exit code."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from covey.system.text.console import CleanConsole
from covey_doctor.diagnose import EXIT_CODES, worst
from covey_report.doctor.health import Health, health_of, read_for_doctor
from covey_report.page.make import names_of
from covey_report.runs.folders import read_flags, run_folders

INDENT = "      "
WITH_VALUE = {"--control": "the folder of a run with shuffled rewards"}
ALONE = ("--json",)


def run_doctor(words: Sequence[str]) -> int:
    """Print the findings of each run; return the worst exit code."""
    folders, flags = read_words(words)
    control = read_for_doctor(Path(flags["--control"])) if "--control" in flags else None
    found = [health_of(read_for_doctor(folder), control) for folder in folders]
    names = names_of(folders)
    if "--json" in flags:
        rows = [
            {"run": name, "verdict": of_run.line, "findings": [one.as_row() for one in of_run.findings]}
            for name, of_run in zip(names, found, strict=True)
        ]
        print(json.dumps(rows, indent=1))
    else:
        console = CleanConsole()
        for name, of_run in zip(names, found, strict=True):
            _print(console, name, of_run)
    return max(EXIT_CODES[worst(of_run.findings)] for of_run in found)


def _print(console: Console, name: str, health: Health) -> None:
    lines = [f"{name}: {health.line}"]
    for one in health.findings:
        lines += ["", f"{one.level.word:<5} {one.title}"]
        if one.cause is not None:
            continue
        lines.append(f"{INDENT}why:   {one.rule.why}")
        lines.append(f"{INDENT}from:  {one.rule.source}")
        lines.append(f"{INDENT}try:   {'; '.join(one.advice)}")
        lines.append(f"{INDENT}wrong: if {one.rule.refuted}")
        if one.evidence.prompts:
            lines.append(f"{INDENT}see:   {', '.join(one.evidence.prompts)}")
    for line in lines:
        console.print(line, soft_wrap=True)


def read_words(words: Sequence[str]) -> tuple[list[Path], dict[str, str]]:
    """Split runs from flags. ValueError for unknown flags or no run."""
    others, flags = read_flags(words, WITH_VALUE, ALONE)
    return run_folders("doctor", others), flags
