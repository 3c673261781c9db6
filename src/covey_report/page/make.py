"""Make the page of runs, once or repeatedly while they train.

It is one HTML file with all that it needs, which asks nobody for anything and runs no code but its own. A model's text
is data in one block of JSON, in which no character can end it; the scripts put it on the page as text alone, and the
Content-Security-Policy lets only these very scripts and styles run.
"""

import base64
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from covey import __version__
from covey.run.folder import is_running
from covey.system.disk import atomic_file
from covey.system.jsonl import finite
from covey_report.logs.foreign import read_any
from covey_report.page.content import content

REPORT, SEVERAL = "report.html", "compared.html"
FOLLOW_SECONDS = 10


def make_report(folders: Sequence[Path], out: Path | None = None, refresh: int | None = None) -> Path:
    """Write the page to `out`.

    By default that is report.html in the run's folder, and compared.html here for several runs.

    ValueError where a folder holds no run, WriteError where the disk does not take it.
    """
    runs = [read_any(folder) for folder in folders]
    path = out or (folders[0] / REPORT if len(folders) == 1 else Path(SEVERAL))
    names = names_of(folders)
    foot = f"Made {time.strftime('%Y-%m-%d %H:%M:%S')} by covey {__version__}; it loads nothing and sends nothing."
    shown = content(runs, names)
    text = page(shown, f"covey: {'; '.join(run['title'] for run in shown['runs'])}", foot, refresh)
    with atomic_file(path) as file:
        file.write(text)
    return path


def follow(folders: Sequence[Path], out: Path | None, seconds: int = FOLLOW_SECONDS) -> Path:
    """Renew the page until no run is active; it reloads itself."""
    while any(map(is_running, folders)):
        began = time.monotonic()
        make_report(folders, out, refresh=seconds)
        time.sleep(pause(seconds, time.monotonic() - began))
    return make_report(folders, out)


def pause(seconds: float, spent: float) -> float:
    """Choose a pause that leaves four fifths of a core to training.

    >>> pause(2.0, 0.1), pause(2.0, 3.0)
    (2.0, 12.0)
    """
    return max(seconds, 4 * spent)


def names_of(folders: Sequence[Path]) -> list[str]:
    """Name folders by their last differing parts, a sweep's numbers by two.

    >>> names_of([Path("a/one"), Path("b/one")])
    ['a/one', 'b/one']
    """
    paths = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, paths)) + 1):
        found = ["/".join(parts[-length:]) for parts in paths]
        if len(set(found)) == len(found) and not any(name.isdecimal() for name in found):
            return found
    return [f"{'/'.join(parts[-2:])} ({number})" for number, parts in enumerate(paths, start=1)]


ASSETS = Path(__file__).parent / "assets"
STYLES = ("uPlot.min.css", "report.css")
SCRIPTS = (
    *("uPlot.iife.min.js", "tools.js", "charts.js", "groups.js", "conversations.js", "machines.js"),
    *("pages.js", "report.js"),
)


def page(content: Mapping[str, Any], title: str, foot: str, refresh: int | None = None) -> str:
    """Render a page, which reloads itself after `refresh` seconds."""
    styles, scripts = ([asset(name) for name in names] for names in (STYLES, SCRIPTS))
    template = Environment(autoescape=True).from_string(asset("page.html.j2"))
    # Own files and escaped data alone are not escaped by the template.
    return template.render(
        policy=policy(styles, scripts),
        title=title,
        foot=foot,
        refresh=refresh,
        styles=list(map(Markup, styles)),
        scripts=list(map(Markup, scripts)),
        data=Markup(as_data(content)),
    )


def as_data(content: Any) -> str:
    """Write JSON for a script element, without <, > and &.

    >>> as_data("</script>")
    '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(finite(content), ensure_ascii=True, allow_nan=False, separators=(",", ":"), default=str)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def policy(styles: Sequence[str], scripts: Sequence[str]) -> str:
    """Write a Content-Security-Policy for these styles and scripts alone."""
    allowed = {"style-src": styles, "script-src": scripts}
    rules = [f"{name} {' '.join(map(_source, texts))}" for name, texts in allowed.items()]
    return "; ".join(["default-src 'none'", *rules, "img-src data:", "base-uri 'none'", "form-action 'none'"])


def _source(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


@cache
def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
