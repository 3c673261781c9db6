"""Draw every figure: `python -m benchmarks.figures` (or some by name, without the film)."""

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence

from benchmarks.figures import develop, front, measured, panel, tasks, trust, use
from benchmarks.figures.front import ROOT

FOLDER = ROOT / "docs" / "figures"
MACHINE = ROOT / "examples" / "catapult.json"

FIGURES: dict[str, Callable[[], object]] = {
    "banner": front.banner,
    "badges": front.badges,
    "rooms": front.rooms,
    "demo": measured.demo,
    "recipes": measured.recipes,
    "speed": measured.speed,
    "architectures": measured.architectures,
    "metrics": measured.metrics,
    "panel": panel.panel,
    "settings": use.settings,
    "rewards": use.rewards,
    "python": use.python,
    "using_results": use.using_results,
    "algorithms": use.algorithms,
    "curriculum": use.curriculum,
    "distributed": use.distributed,
    "math": tasks.math,
    "code": tasks.code,
    "ifeval": tasks.ifeval,
    "infill": tasks.infill,
    "machines": tasks.machines,
    "turns": tasks.turns,
    "guarantees": trust.guarantees,
    "reliability": trust.reliability,
    "deadlines": trust.deadlines,
    "preflight": trust.preflight,
    "sandbox": trust.sandbox,
    "security": trust.security,
    "architecture": develop.architecture,
    "glossary": develop.glossary,
}
"""Names of files in docs/figures/, and what draws them."""


def film() -> None:
    """Simulate the catapult of the examples, and film it."""
    words = ["machines", "simulate", str(MACHINE), "--film", str(FOLDER / "catapult.gif")]
    picture = ["--out", str(FOLDER / "catapult.png")]
    subprocess.run([sys.executable, "-m", "covey", *words, *picture], check=True, stdout=subprocess.DEVNULL)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"some of {', '.join(FIGURES)}; none: all, and the film"
    )
    names = parser.parse_args(words).names
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names or FIGURES:
        (FOLDER / f"{name}.svg").write_text(str(FIGURES[name]()), encoding="utf-8")
    if not names:
        film()
    return 0


if __name__ == "__main__":
    sys.exit(main())
