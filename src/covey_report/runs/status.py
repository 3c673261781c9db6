"""`covey status RUN`: the last state of trainer and samplers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from covey.run.folder import STATUS, is_running, read_summary
from covey.system.disk import as_written, read_regular
from covey.system.jsonl import MAX_BYTES
from covey.system.text.console import CleanConsole
from covey.system.text.format import number_of
from covey_report.runs.folders import run_folder_of


def run_status(words: Sequence[str]) -> None:
    """Print the last status of trainer and samplers. ValueError."""
    folder = run_folder_of("status", words)
    path = folder / STATUS
    if not path.is_file():
        when = "its samplers have not started yet, or it has none" if is_running(folder) else "it had no samplers"
        raise ValueError(
            f"{folder} has no {STATUS}, {when}: runs write it once samplers of their own are there (source=ray, "
            f"devices.sampler >= 1); covey watch {folder} shows any run"
        )
    with as_written(path):
        status = json.loads(read_regular(path, MAX_BYTES))
        ended = None if is_running(folder) else (read_summary(folder) or {}).get("steps", status["trainer"]["step"])
        table, when = _table(status, ended), status["time"]
    console = CleanConsole()
    console.print(table)
    said = "at" if ended is None else f"this run has ended after {number_of(ended, 'step')}; its last word was at"
    console.print(f"{said} {when}, {folder}", soft_wrap=True)


def _table(status: Mapping[str, Any], ended: int | None) -> Table:
    trainer = status["trainer"]
    table = Table("role", "state", "version", "groups", "tokens", "restarts", "process")
    groups = f"{trainer['groups_finished']} finished of {trainer['groups_pending']}"
    state = f"step {trainer['step'] + 1}, {trainer['state']}" if ended is None else "ended"
    table.add_row("trainer", state, str(trainer["version"]), groups, "", "", "")
    for one in status["samplers"]:
        numbers = (one["version"], f"{one['groups_under_way']} under way", one["tokens"], one["restarts"], one["pid"])
        table.add_row(f"sampler {one['sampler']}", *map(str, (one["state"] if ended is None else "ended", *numbers)))
    return table
