"""The live panel of a terminal as it stood in a recorded run, exported by rich."""

import io
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rich.console import Console

from benchmarks.figures.measured import read
from covey.run.records import terminal

STEP = 220
"""Of 350: the panel has an evaluation, a trend and a time left by then."""
SIZE = (100, 16)
NAMES = ("sampled_reward_mean", "entropy", "tokens_per_second", "reward/correct", "completion_length_mean")


@dataclass
class RecordedClock:
    """The time of a recorded run: the ends of its steps, one after the other."""

    ends: list[float]
    place: int = -1

    def __call__(self) -> float:
        self.place += 1
        return self.ends[self.place]


def panel() -> str:
    """Return the panel after STEP steps of the demo's seed 0, with the numbers that the run recorded."""
    run = read("demo")["reward"]["0"]
    steps: dict[str, list[float]] = run["steps"]
    num_steps = len(steps["seconds"])
    console = Console(record=True, width=SIZE[0], height=SIZE[1], force_terminal=True, file=io.StringIO())
    shown = terminal.LiveProgress(num_steps, console)
    shown._pace.clock = RecordedClock(list(accumulate(steps["seconds"])))
    for step in range(1, STEP + 1):
        shown.update(step, {name: steps[name][step - 1] for name in NAMES})
    seen: list[dict[str, Any]] = [row for row in run["curve"] if row["step"] <= STEP]
    for row in seen:
        line = terminal.evaluation_line(row["step"], {name: row[name] for name in row if name != "step"})
        console.print(line, style="dim", highlight=False) if row is not seen[-1] else None
    last = {name: value for name, value in seen[-1].items() if name != "step"}
    shown.evaluation(seen[-1]["step"], last)
    console.print(shown.render())
    return console.export_svg(title="covey train recipe=arithmetic", unique_id="panel")
