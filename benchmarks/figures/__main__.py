"""Draw every figure: `python -m benchmarks.figures` (or some by name, without the film), and write measured numbers."""

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image, ImageOps, ImageSequence

from benchmarks.figures import develop, front, gpu, measured, panel, real, sentences, tasks, trust, use
from benchmarks.figures.front import ROOT

FOLDER = ROOT / "docs" / "figures"
MACHINE = ROOT / "examples" / "catapult.json"

FIGURES: dict[str, Callable[[], object]] = {
    "front/banner": front.banner,
    "front/rooms": front.rooms,
    "front/real": real.real,
    "use/real_sizes": real.sizes,
    "front/demo": measured.demo,
    "tasks/recipes": measured.recipes,
    "front/speed": measured.speed,
    "develop/architectures": measured.architectures,
    "use/metrics": measured.metrics,
    "use/tuning": measured.tuning,
    "front/panel": panel.panel,
    "use/settings": use.settings,
    "use/rewards": use.rewards,
    "use/python": use.python,
    "use/trl": use.trl,
    "use/traces": use.traces,
    "use/plan": use.plan,
    "use/using_results": use.using_results,
    "use/algorithms": use.algorithms,
    "use/curriculum": use.curriculum,
    "use/distributed": use.distributed,
    "use/scale": use.scale,
    "tasks/math": tasks.math,
    "tasks/code": tasks.code,
    "tasks/ifeval": tasks.ifeval,
    "tasks/infill": tasks.infill,
    "tasks/machines": tasks.machines,
    "tasks/documents": tasks.documents,
    "tasks/turns": tasks.turns,
    "tasks/conversations": tasks.conversations,
    "trust/guarantees": trust.guarantees,
    "trust/reliability": trust.reliability,
    "trust/deadlines": trust.deadlines,
    "trust/preflight": trust.preflight,
    "trust/sandbox": trust.sandbox,
    "trust/security": trust.security,
    "develop/architecture": develop.architecture,
    "develop/glossary": develop.glossary,
    "develop/gpu": gpu.gpu,
}
"""Names of files in docs/figures/, and what draws them."""


def film() -> None:
    """Simulate the catapult of the examples, and film it."""
    words = ["machines", "simulate", str(MACHINE), "--film", str(FOLDER / "tasks" / "catapult.gif")]
    picture = ["--out", str(FOLDER / "tasks" / "catapult.png")]
    subprocess.run([sys.executable, "-m", "covey", *words, *picture], check=True, stdout=subprocess.DEVNULL)
    darken(FOLDER / "tasks" / "catapult.gif", FOLDER / "tasks" / "catapult-dark.gif")


def darken(film: Path, dark: Path) -> None:
    """Write a film for dark pages: lightness is turned over, hues stay."""
    with Image.open(film) as frames:
        turned = [(_turned_over(frame), frame.info["duration"]) for frame in ImageSequence.Iterator(frames)]
    (first, *others), pauses = zip(*turned, strict=True)
    first.save(dark, save_all=True, append_images=others, duration=list(pauses), loop=0)


def _turned_over(frame: Image.Image) -> Image.Image:
    lightness, *hues = frame.convert("YCbCr").split()
    turned = Image.merge("YCbCr", (ImageOps.invert(lightness), *hues)).convert("RGB")
    return turned.quantize(64, dither=Image.Dither.NONE)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"some of {', '.join(FIGURES)}; none: all, and the film"
    )
    names = parser.parse_args(words).names
    for name in names or FIGURES:
        file = FOLDER / f"{name}.svg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(FIGURES[name]()), encoding="utf-8")
    sentences.write()
    if not names:
        film()
    return 0


if __name__ == "__main__":
    sys.exit(main())
