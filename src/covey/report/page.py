"""One HTML file with all that it needs: it asks nobody for anything, and runs no code but its own.

What a model wrote is data in one block of JSON, in which no character can end it; the scripts put it on the page as
text alone, and the Content-Security-Policy lets only these very scripts and styles run.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from covey.system.jsonl import finite

ASSETS = Path(__file__).parent / "assets"
STYLES = ("uPlot.min.css", "report.css")
SCRIPTS = (
    "uPlot.iife.min.js",
    "tools.js",
    "charts.js",
    "groups.js",
    "conversations.js",
    "machines.js",
    "pages.js",
    "report.js",
)
UPLOT_SHA256 = "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
"""Of uPlot.iife.min.js 1.6.32 as npm has it."""


def page(content: Mapping[str, Any], title: str, foot: str, refresh: int | None = None) -> str:
    """Return the page of a report's content. `refresh` is the seconds after which it loads itself again."""
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
    """Return JSON in which nothing can end a script element or begin a comment: no <, > or &, ASCII alone.

    >>> as_data("</script>")
    '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(finite(content), ensure_ascii=True, allow_nan=False, separators=(",", ":"), default=str)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def policy(styles: Sequence[str], scripts: Sequence[str]) -> str:
    """Return a Content-Security-Policy that lets these run and nothing else, and nothing be loaded."""
    allowed = {"style-src": styles, "script-src": scripts}
    rules = [f"{name} {' '.join(map(_source, texts))}" for name, texts in allowed.items()]
    return "; ".join(["default-src 'none'", *rules, "img-src data:", "base-uri 'none'", "form-action 'none'"])


def _source(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


@cache
def asset(name: str) -> str:
    """Read a file of the page."""
    return (ASSETS / name).read_text(encoding="utf-8")
