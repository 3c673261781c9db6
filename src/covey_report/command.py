"""`covey report RUN ...` and `covey watch RUN`."""

import logging
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.live import Live
from rich.text import Text

from covey.config.schema import OutputConfig
from covey.run.folder import is_running
from covey.system.text.console import CleanConsole
from covey_report.logs.foreign import read_any
from covey_report.page.make import FOLLOW_SECONDS, follow, make_report, names_of, pause
from covey_report.page.png import draw_curves
from covey_report.runs.folders import read_flags, run_folders
from covey_report.text import COLUMNS, as_lines

LOGGER = logging.getLogger(__name__)
WITH_VALUE = dict.fromkeys(("--out", "--png"), "a value")
ALONE = ("--follow", "--text")
WATCH_SECONDS = 2.0


def run_report(words: Sequence[str]) -> None:
    """Make the report. ValueError for wrong words."""
    folders, flags = read_words("report", words)
    names, say = names_of(folders), partial(CleanConsole().print, soft_wrap=True)
    if "--text" in flags:
        for line in as_lines([read_any(folder) for folder in folders], names, columns()):
            say(line)
    elif "--png" in flags:
        for path in draw_curves([read_any(folder) for folder in folders], names, Path(flags["--png"])):
            say(f"picture: {path}")
    else:
        out = Path(flags["--out"]) if "--out" in flags else None
        if "--follow" in flags:
            first = make_report(folders, out, refresh=FOLLOW_SECONDS)
            say(f"report: {first} (made anew every {FOLLOW_SECONDS} s until the run ends)")
            follow(folders, out)
        else:
            say(f"report: {make_report(folders, out)}")


def run_watch(words: Sequence[str]) -> None:
    """Show a run in the terminal until it ends. ValueError."""
    if flags := [word for word in words if word.startswith("-")]:
        raise ValueError(f"covey watch takes run folders alone, got {flags[0]}; covey report RUN --text prints it once")
    folders = run_folders("watch", words)
    names, console = names_of(folders), CleanConsole()
    if not console.is_terminal:
        console.width = columns()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            began = time.monotonic()
            runs = [read_any(folder) for folder in folders]
            lines = as_lines(runs, names, columns())
            live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
            if not any(map(is_running, folders)):
                return
            time.sleep(pause(WATCH_SECONDS, time.monotonic() - began))


def columns() -> int:
    """Return the terminal's width, or a page's."""
    return shutil.get_terminal_size((COLUMNS, 0)).columns


def report_at_the_end(output: OutputConfig, folder: Path) -> Path | None:
    """Write a run's report if configured; failures are warnings."""
    if not output.report:
        return None
    try:
        return make_report([folder])
    except Exception as error:
        LOGGER.warning("no report was written (%s); covey report %s tries again", error, folder)
        return None


def read_words(verb: str, words: Sequence[str]) -> tuple[list[Path], dict[str, str]]:
    """Split folders from flags. ValueError for unknown flags or none."""
    others, flags = read_flags(words, WITH_VALUE, ALONE)
    out = Path(flags.get("--out", "page.html"))
    if out.suffix != ".html" or not out.parent.is_dir():
        wanted = "be a .html file" if out.suffix != ".html" else f"lie in a folder that is there ({out.parent} is not)"
        raise ValueError(f"--out must {wanted}, got {out}")
    return run_folders(verb, others), flags
