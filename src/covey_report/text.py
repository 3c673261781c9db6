"""Report runs in a terminal: verdict, curves, comparison."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from covey.run.records.terminal import average_bins, sparkline
from covey.system.disk import as_written
from covey.system.text.escaping import escape
from covey_doctor.finding import Level
from covey_report.compare import comparison
from covey_report.doctor.health import health_of
from covey_report.logs.read import RunFiles
from covey_report.page.content import verdict
from covey_report.page.curves import curves_of

WIDTH, USUAL_WIDTH, LEAST_WIDTH, TITLE, LEAST_TITLE = 40, 12, 6, 26, 18
"""Characters of a curve, and those of its title that a narrow terminal and a very narrow one keep."""
COLUMNS = 128
"""Columns where no terminal says how many it has."""
STATES = ("running", "failed", "interrupted", "none")
"""States of runs that are described in full by their sentence."""


def as_lines(runs: Sequence[RunFiles], names: Sequence[str], columns: int = COLUMNS) -> list[str]:
    """Write the report of runs as lines of text."""
    lines: list[str] = []
    for run, name in zip(runs, names, strict=True):
        with as_written(run.folder):
            found, health = verdict(run), health_of(run)
            told = found["text"] if found["state"] in STATES else f"{found['text']} {found['badge'].capitalize()}."
            grave = [f"{one.level.word}, {one.title}" for one in health.findings if one.level > Level.NOTE]
            lines.append(name)
            for text in (told, *(f"doctor: {line}" for line in (health.line, *grave))):
                lines += textwrap.wrap(text, max(columns, 30), initial_indent="  ", subsequent_indent="    ")
            lines += [f"  {line}" for line in (*_drawn(curves_of(run), columns - 2), *_last_groups(run))] + [""]
    return lines + (compared_lines(runs, names) if len(runs) > 1 else [])


def _drawn(curves: Sequence[Mapping[str, Any]], columns: int) -> list[str]:
    """Draw a line for each curve: title, curve, sentence."""
    longest = max((len(curve["title"]) for curve in curves), default=0)
    sentence = max((len(curve["reading"]) for curve in curves), default=0)
    # Titles give way to the curve, and the curve to the sentence
    room = columns - sentence - 4
    title = min(longest, max(LEAST_TITLE, min(TITLE, room - USUAL_WIDTH), room - WIDTH))
    width = min(WIDTH, max(LEAST_WIDTH, room - title))
    return [f"{_cut(c['title'], title):<{title}}  {_line(c, width):<{width}}  {c['reading']}" for c in curves]


def _cut(title: str, most: int) -> str:
    return title if len(title) <= most else title[: most - 1] + "…"


def _line(curve: Mapping[str, Any], width: int) -> str:
    """Draw a curve by its steps, or moving means if too many."""
    values = curve["raw"] if len(curve["raw"]) <= width else curve["y"]
    return sparkline(average_bins([math.nan if value is None else value for value in values], width))


def _last_groups(run: RunFiles, most: int = 6) -> list[str]:
    if not run.updates or not run.updates[-1].get("groups"):
        return []
    row = run.updates[-1]
    groups = row["groups"][:most]
    return [f"groups of step {row['step']}:"] + [
        f"  {glyphs(one['rewards'])}  {escape(str(one['prompt_id']))}" for one in groups
    ]


def compared_lines(runs: Sequence[RunFiles], names: Sequence[str]) -> list[str]:
    """Describe how groups of runs compare, and the settings that differ."""
    found = comparison(runs, names)
    differ = [f"  {name}: {' | '.join(values)}" for name, values in found["settings"]]
    lines = [found["together"]] if found["together"] else []
    for gain in found["gains"]:
        first, *measures = gain["lines"]
        lines += [f"{first}: {gain['words']}", *(f"  {one}" for one in measures)]
    return [*lines, "settings that differ:", *(differ or ["  none"])]


def glyphs(rewards: Sequence[Any]) -> str:
    """Draw rewards as squares: full from 1, empty to 0, else half.

    >>> glyphs([1.0, 0.0, 0.5])
    '■□▣'
    """
    known = [reward for reward in rewards if isinstance(reward, int | float)]
    return "".join("■" if reward >= 1 else "□" if reward <= 0 else "▣" for reward in known)
