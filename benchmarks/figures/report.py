"""Screenshots of the report, light and dark: `python -m benchmarks.figures.report FOLDER` trains short runs there.

About six minutes on two cores. Runs that FOLDER has already are taken as they are. Needs Chromium and Pillow.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from benchmarks.figures.front import ROOT
from covey_report.page.make import make_report

FOLDER = ROOT / "docs" / "figures" / "report"
TRAIN, PLANTED = ("covey", "train"), ("benchmarks.checks.doctor.planted",)
RUNS = {
    "arithmetic": (*TRAIN, "recipe=arithmetic", "num_steps=60"),
    "guess": (*TRAIN, "recipe=guess_nano", "num_steps=20"),
    "machines": (*TRAIN, "recipe=machines_clamped_nano", "num_steps=100"),
    "code": (*TRAIN, "recipe=code_summed", "num_steps=6"),
    "form_pays": (*PLANTED, "form_pays"),
}
QUIET = ("output.progress=false", "preflight.enabled=false", "evaluation.num_prompts=128")
THEMES = {"light": 1, "dark": 0}
"""Blink's numbers of the colour schemes that a reader may prefer."""
NUM_COLOURS = 64


@dataclass(frozen=True, slots=True)
class Shot:
    """A page of the report of a run, and how much of it is shown."""

    run: str
    address: str
    height: int


SHOTS = {
    "report-overview": Shot("arithmetic", "tab=overview", 900),
    "report-tokens": Shot("arithmetic", "tab=groups&colour=logprob", 760),
    "report-conversations": Shot("guess", "tab=environment&colour=entropy", 1180),
    "report-machines": Shot("machines", "tab=environment&moment=0.6", 760),
    "report-programs": Shot("code", "tab=environment", 700),
    "doctor": Shot("form_pays", "tab=doctor", 660),
}


def trained(folder: Path, name: str) -> Path:
    """Return the folder of a run, trained now if it is not there."""
    run = folder / name
    if not (run / "summary.json").exists():
        words = [*RUNS[name], *QUIET, f"hydra.run.dir={name}"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        subprocess.run(
            [sys.executable, "-m", *words], check=True, stdout=subprocess.DEVNULL, cwd=folder, env=environment
        )
    return run


def take(page: Path, shot: Shot, theme: str, out: Path) -> None:
    """Photograph a page in few colours."""
    browser = shutil.which("chromium") or "google-chrome"
    words = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000"),
        *(f"--window-size=1180,{shot.height}", f"--blink-settings=preferredColorScheme={THEMES[theme]}"),
        *(f"--screenshot={out}", f"{page.as_uri()}#{shot.address}"),
    ]
    subprocess.run([browser, *words], check=True, capture_output=True)
    Image.open(out).convert("RGB").quantize(NUM_COLOURS, dither=Image.Dither.NONE).save(out, optimize=True)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/report-figures").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name, shot in SHOTS.items():
        page = make_report([trained(folder, shot.run)])
        for theme in THEMES:
            out = FOLDER / (f"{name}.png" if theme == "light" else f"{name}-{theme}.png")
            take(page, shot, theme, out)
            print(f"{out.relative_to(ROOT)} {out.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
