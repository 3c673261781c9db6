"""Read the folder of a run, without trust in its content."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.run.folder import (
    AUDIT,
    CONFIG,
    EVALUATIONS,
    METRICS,
    ROLLOUTS,
    TRACES,
    UPDATES,
    VERDICTS,
    VERSIONS,
    last_settings,
    read_summary,
)
from covey.system.disk import read_regular
from covey.system.jsonl import MAX_BYTES, read_object, read_rows
from covey_doctor.verdicts import with_prompts

Row = dict[str, Any]

MAX_TEXT = 4000
"""Characters of a prompt or an answer on the page."""
LOG = "covey.log"
ENDED = "the run ended here: "
"""Beginning of the log's line that says why a run ended early."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The rows of a run; missing or unreadable files are empty."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    """Dotted name -> value."""
    versions: Row = field(default_factory=dict)
    summary: Row | None = None
    steps: list[Row] = field(default_factory=list)
    """Training rows of metrics.jsonl."""
    looks: list[Row] = field(default_factory=list)
    """Evaluation rows of metrics.jsonl."""
    verdicts: list[Row] = field(default_factory=list)
    """Verdicts on all prompts of each evaluation."""
    answers: list[Row] = field(default_factory=list)
    """Answers of evaluations."""
    rollouts: list[Row] = field(default_factory=list)
    traces: list[Row] = field(default_factory=list)
    updates: list[Row] = field(default_factory=list)
    audit: Row = field(default_factory=dict)
    """Result of `covey audit`."""
    error: str | None = None
    """Reason why the run ended early."""


def read_run(folder: Path) -> RunFiles:
    """Read a run. ValueError where the folder holds none."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is no run folder: it has no {CONFIG}")
    metrics = list(read_rows(folder / METRICS))
    summary = read_summary(folder)
    return RunFiles(
        folder=folder,
        settings=last_settings(folder),
        versions=read_object(folder / VERSIONS),
        summary=summary,
        steps=[row for row in metrics if row.get("kind") == "train"],
        looks=[row for row in metrics if row.get("kind") == "evaluate"],
        verdicts=with_prompts(read_rows(folder / VERDICTS)),
        answers=list(read_rows(folder / EVALUATIONS)),
        rollouts=list(read_rows(folder / ROLLOUTS)),
        traces=list(read_rows(folder / TRACES)),
        updates=list(read_rows(folder / UPDATES)),
        audit=read_object(folder / AUDIT),
        error=_error(folder) if summary is not None and summary.get("status") != "completed" else None,
    )


def cut(text: Any, most: int = MAX_TEXT) -> Any:
    """Cut text, or each turn of a conversation, to that many characters."""
    if isinstance(text, list):
        return [_turn(turn, most) for turn in text if isinstance(turn, dict)]
    shown = "" if text is None else str(text)
    return shown if len(shown) <= most else shown[:most] + "…"


def _turn(turn: Row, most: int) -> Row:
    content = turn.get("content")
    shown = {"role": str(turn.get("role")), "content": cut("" if content is None else str(content), most)}
    if turn.get("name"):
        shown["name"] = cut(turn["name"], 80)
    if turn.get("tool_calls"):
        shown["calls"] = cut(json.dumps(turn["tool_calls"], default=str, ensure_ascii=False), most)
    return shown


def plain_mapping(value: Any) -> Row:
    """Return a mapping, an empty one in place of other values."""
    return value if isinstance(value, dict) else {}


def _error(folder: Path) -> str | None:
    """Read why a run ended from its log, or None."""
    try:
        lines = read_regular(folder / LOG, MAX_BYTES).decode("utf-8", "replace").splitlines()
    except (OSError, ValueError):
        return None
    found = [line.partition(ENDED)[2] for line in lines if ENDED in line]
    return found[-1] if found else None
