"""A real browser opens reports: it draws every page, runs nothing that a model wrote, and says nothing is wrong."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from covey.report.make import make_report

from .test_report import hostile_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAGES = {
    "overview": "reward of training",
    "groups": "answer 1",
    "pairs": "The same prompts",
    "time": "Most of the time",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]


def opened(page: Path, address: str, width: int) -> tuple[str, str]:
    """The page as it stands once its scripts have run, and what the browser's console said."""
    done = subprocess.run(
        [
            *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"),
            *("--enable-logging=stderr", "--virtual-time-budget=4000", "--dump-dom", f"{page.as_uri()}#{address}"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.parametrize("width", [1280, 420])
def test_a_browser_draws_every_page_of_a_hostile_run_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    page = make_report([hostile_run(tmp_path, monkeypatch)])
    for name, words in PAGES.items():
        dom, console = opened(page, f"tab={name}&colour=logprob&numbers=true", width)
        shown = dom[dom.index("<body") : dom.index('<script type="application/json"')]
        assert console == ""
        assert words in shown
        assert not re.search(r"<(img|b>bold|script)", shown)
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;" in opened(page, "tab=groups", width)[0]
