"""The live panel of a terminal as it stood in a recorded run, exported by rich.

covey train recipe=arithmetic hydra.run.dir=RUN
python -m benchmarks.figures.panel RUN                   # keeps its numbers in benchmarks/results/panel.json
"""

import io
import json
import sys
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.demo.runs import machine
from benchmarks.figures.measured import RESULTS, read
from covey.run.records import terminal
from covey.system.jsonl import read_rows

STEP = 220
"""Of 350: the panel has an evaluation, a trend and a time left by then."""
SIZE = (100, 16)
LOOKS = ("step", "accuracy", "reward_mean", "pass_at_1", "pass_at_4", "pass_at_8")


@dataclass
class RecordedClock:
    """The time of a recorded run: the ends of its steps, one after the other."""

    ends: list[float]
    place: int = -1

    def __call__(self) -> float:
        self.place += 1
        return self.ends[self.place]


def keep(run: Path) -> None:
    """Keep what the panel of a run shows: the columns of its steps, and its evaluations."""
    rows = list(read_rows(run / "metrics.jsonl"))
    steps = [row for row in rows if row["kind"] == "train"]
    names = [name for _, name, _ in terminal.COLUMNS if name in steps[0]]
    kept = {
        "command": "covey train recipe=arithmetic",
        "machine": machine(),
        "num_steps": len(steps),
        "steps": {name: [row[name] for row in steps[:STEP]] for name in (*names, "seconds")},
        "looks": [{name: row[name] for name in LOOKS} for row in rows if row["kind"] == "evaluate"],
    }
    (RESULTS / "panel.json").write_text(json.dumps(kept) + "\n", encoding="utf-8")


def panel() -> str:
    """Return the panel after STEP steps, with the numbers that the run recorded."""
    run: dict[str, Any] = read("panel")
    steps: dict[str, list[float]] = run["steps"]
    console = Console(record=True, width=SIZE[0], height=SIZE[1], force_terminal=True, file=io.StringIO())
    shown = terminal.LiveProgress(run["num_steps"], console)
    shown._pace.clock = RecordedClock(list(accumulate(steps["seconds"])))
    for step in range(1, STEP + 1):
        shown.update(step, {name: values[step - 1] for name, values in steps.items() if name != "seconds"})
    *earlier, last = [row for row in run["looks"] if row["step"] <= STEP]
    for row in earlier:
        console.print(terminal.evaluation_line(row["step"], {name: row[name] for name in LOOKS[1:]}), style="dim")
    shown.evaluation(last["step"], {name: last[name] for name in LOOKS[1:]})
    console.print(shown.render())
    return console.export_svg(title=run["command"], unique_id="panel")


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
