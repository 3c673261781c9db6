"""Keep plans by their settings, for reports to compare."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from covey.system.disk import cache_folder
from covey.system.jsonl import finite, read_object, write_json

BESIDE = ("output.", "doctor.", "preflight.", "timeouts.", "resume", "trust_run", "seed", "cold_start.cache_dir")
"""Settings that change neither memory nor time, or hardly."""


def keep_plan(settings: Mapping[str, Any], row: Mapping[str, Any]) -> None:
    keep(plan_path(settings), row)


def kept_plan(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    return read_object(plan_path(settings)) or None


def keep(path: Path, row: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, row)


def plan_path(settings: Mapping[str, Any]) -> Path:
    """Return where the plan for these settings is kept."""
    said = {name: value for name, value in settings.items() if not name.startswith(BESIDE)}
    digest = hashlib.sha256(json.dumps(finite(said), sort_keys=True, default=str).encode()).hexdigest()
    return Path(cache_folder()) / "plans" / f"run-{digest[:16]}.json"


def against(row: Mapping[str, Any], summary: Mapping[str, Any]) -> list[tuple[str, float | None, float | None]]:
    """Compare a finished run with its plan, by phase."""
    phases, taken = row.get("phases") or {}, summary.get("phases") or {}
    steps = summary.get("steps") or 0
    found: list[tuple[str, float | None, float | None]] = []
    for name, planned in phases.items():
        seconds = (taken.get(name) or {}).get("seconds")
        found.append((f"{name}, s a step", planned, seconds / steps if seconds is not None and steps else None))
    hours = (row.get("hours") or {}).get("value")
    found.append(("whole run, s", None if hours is None else 3600 * hours, summary.get("seconds")))
    return found
