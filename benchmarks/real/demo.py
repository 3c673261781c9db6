"""A real model learns on this machine: `make demo-real`.

    python -m benchmarks.real.demo --seed 1 --folder outputs/real

Makes the model where it is not there yet (benchmarks/real/models.py), trains it by `covey train recipe=brief`, and ends
with what it says to six held-out questions before and after, and the gain in held-out reward with its interval.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.demo.runs import estimate, read_run
from benchmarks.real.models import main as make_real_model
from benchmarks.real.models import model_folder
from benchmarks.real.recipes import MODEL, answers


def shown(said: Sequence[dict[str, Any]]) -> Table:
    """Return answers before and after, side by side, with what each earned."""
    table = Table(box=box.SIMPLE, show_lines=True, expand=True)
    for head, share in (("asked", 3), ("before", 5), ("after", 4)):
        table.add_column(head, ratio=share)
    for row in said:
        worth = [f"{row[when]['text'].strip()} [{row[when]['reward']:.2f}]" for when in ("before", "after")]
        table.add_row(row["prompt"].partition(" Answer in")[0], *(cell.replace("[", r"\[") for cell in worth))
    return table


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="of the run (default: outputs/real/ and the time)")
    asked = parser.parse_args(words)
    began = time.monotonic()
    if make_real_model([MODEL]):
        return 1
    folder = asked.folder or Path("outputs", "real", time.strftime("%Y-%m-%d-%H-%M-%S"))
    settings = [f"model.name={model_folder(MODEL)}", f"seed={asked.seed}", f"hydra.run.dir={folder}"]
    code = subprocess.run([sys.executable, "-m", "covey", "train", "recipe=brief", *settings], check=False).returncode
    if code:
        return code
    summary, *_ = read_run(folder)
    console = Console()
    console.print(shown(answers(folder)))
    gain = summary["gain"]["reward_mean"]
    ends = " -> ".join(f"{summary[part]['reward_mean']['value']:.3f}" for part in ("before", "after"))
    console.print(f"held-out reward {ends}, gain {estimate(gain, '+')}", markup=False)
    console.print(f"{time.monotonic() - began:.0f} s in all; {folder}/report.html has every token", markup=False)
    return 0 if gain["low"] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
