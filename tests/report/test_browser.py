"""A real browser opens reports: it draws every page, runs nothing that a model wrote, and says nothing is wrong."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import covey_report.page.make
from covey.cli.main import main
from covey_report.page.make import make_report

from .test_environments import HOSTILE_PAGES, changed
from .test_report import hostile_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAGES = {
    "overview": "reward of training",
    "groups": "answer 1",
    "pairs": "The same prompts",
    "doctor": "rules looked at",
    "time": "The longest part",
    "settings": "settings are as by default",
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


def test_ticks_of_an_axis_have_digits_that_tell_them_apart(tmp_path: Path) -> None:
    tools = (Path(covey_report.page.make.__file__).parent / "assets" / "tools.js").read_text()
    ticks = "[0.9978, 0.998, 0.9982], [0, 0.5, null, 1], [1234.2, 1234.4]"
    written = f"document.body.append(JSON.stringify([{ticks}].map(labels)))"
    (tmp_path / "ticks.html").write_text(f"<body><p id='data'>{{}}</p><script>{tools}\n{written}</script></body>")
    dom, console = opened(tmp_path / "ticks.html", "", 1280)
    assert console == ""
    assert '[["0.9978","0.998","0.9982"],["0","0.5","","1"],["1234","1234"]]' in dom


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
        assert name != "pairs" or re.search(r">all \d+<.*>gained \d+<.*>lost \d+<", shown)
    groups = opened(page, "tab=groups&trace=-3&step=%zz&theme=dark", width)[0]
    assert 'data-theme="dark"' in groups
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;" in groups
    assert "\\u202e\\u2028\\U000e0041{{ 7*7 }}" in groups


@pytest.mark.parametrize("kind", HOSTILE_PAGES)
def test_a_browser_draws_hostile_pages_of_environments_as_text(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = make_report([changed(hostile_run(tmp_path, monkeypatch), *HOSTILE_PAGES[kind])])
    for name in ("environment", "groups"):
        dom, console = opened(page, f"tab={name}", 1280)
        shown = dom[dom.index("<body") : dom.index('<script type="application/json"')]
        assert console == ""
        assert f'aria-labelledby="tab-{name}"' in shown
        assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;" in shown
        assert not re.search(r"<(img|b>bold|script)", shown)


SMALL = (
    *("num_steps=2", "groups_per_step=2", "group_size=3", "evaluation.num_prompts=2", "output.progress=false"),
    *("output.report=false", "output.save_every=1", "preflight.enabled=false", "cold_start.enabled=false"),
    *("model.nano_hidden_size=16", "model.nano_num_layers=1", "model.nano_num_heads=2", "hydra.run.dir=run"),
)
RUNS = {
    "causal": ["recipe=arithmetic"],
    "adapters": ["recipe=arithmetic", "model.lora_rank=2"],
    "masked": ["recipe=infill_nano", "environment.judge_num_steps=2", "environment.judge_floor=0"],
    "machines": ["recipe=machines_nano"],
    "code": ["recipe=code"],
    "conversation": ["recipe=guess_nano"],
    "failed": [
        *("environment=reward_functions", "environment.in_process=true", "rewards=[broken:broken]"),
        *("data.path=rows.jsonl", "evaluation.num_prompts=0"),
    ],
    "resumed": ["recipe=arithmetic"],
}


BROKEN = """
calls = []

def broken(prompts, completions, **columns):
    calls.append(len(completions))
    if len(calls) > 3:  # in the second step
        raise OSError("gone")
    return [float(len(completion) % 2) for completion in completions]
"""


@pytest.mark.parametrize("kind", RUNS)
def test_a_browser_draws_the_report_of_every_kind_of_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n' * 4)
    assert main(["train", *RUNS[kind], *SMALL]) == (2 if kind == "failed" else 0)
    if kind == "resumed":
        assert main(["train", "resume=run", "num_steps=4", "resume_changes=[num_steps]", "output.progress=false"]) == 0
    page = make_report([tmp_path / "run"])
    assert page.stat().st_size < 3_000_000
    for width in (1280, 420):
        for name in (*PAGES, "environment"):
            dom, console = opened(page, f"tab={name}", width)
            assert console == ""
            assert "covey report" in dom
            assert not re.search(r"""(src|href)=["'](?!#|data:)""", dom[dom.index("<body") :])
