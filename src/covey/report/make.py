"""Makes the page of one or several runs, once or again and again while they train."""

import time
from collections.abc import Sequence
from pathlib import Path

from covey import __version__
from covey.report.content import content
from covey.report.foreign import read_any
from covey.report.page import page
from covey.run.folder import is_running
from covey.system.disk import atomic_file

REPORT = "report.html"
FOLLOW_SECONDS = 10


def make_report(folders: Sequence[Path], out: Path | None = None, refresh: int | None = None) -> Path:
    """Write the page, whole or not at all, and return where: `out`, else report.html in the first folder.

    ValueError where a folder holds no run, WriteError where the disk does not take it.
    """
    runs = [read_any(folder) for folder in folders]
    path = out or folders[0] / REPORT
    names = names_of(folders)
    foot = f"Made {time.strftime('%Y-%m-%d %H:%M:%S')} by covey {__version__}; it loads nothing and sends nothing."
    text = page(content(runs, names), f"covey: {', '.join(names)}", foot, refresh)
    with atomic_file(path) as file:
        file.write(text)
    return path


def follow(folders: Sequence[Path], out: Path | None, seconds: int = FOLLOW_SECONDS) -> Path:
    """Make the page anew every so many seconds until no run is under way. It loads itself again meanwhile."""
    while any(map(is_running, folders)):
        began = time.monotonic()
        make_report(folders, out, refresh=seconds)
        time.sleep(pause(seconds, time.monotonic() - began))
    return make_report(folders, out)


def pause(seconds: float, spent: float) -> float:
    """Return how long to wait after a look at a run that took `spent`: so long that a core has four fifths to train.

    >>> pause(2.0, 0.1), pause(2.0, 3.0)
    (2.0, 12.0)
    """
    return max(seconds, 4 * spent)


def names_of(folders: Sequence[Path]) -> list[str]:
    """Name folders by as many of their last parts as tell them apart.

    >>> names_of([Path("a/one"), Path("b/one")])
    ['a/one', 'b/one']
    """
    paths = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, paths)) + 1):
        found = ["/".join(parts[-length:]) for parts in paths]
        if len(set(found)) == len(found):
            return found
    return [f"{'/'.join(parts[-2:])} ({number})" for number, parts in enumerate(paths, start=1)]
