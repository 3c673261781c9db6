"""Figures of what was measured: the demo, every offline recipe, speed, architectures, one run's metrics."""

import gzip
import json
import math
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.checks.doctor.kept import KEPT
from benchmarks.figures.front import ROOT
from benchmarks.figures.shapes import Plot, axes
from benchmarks.figures.svg import Drawing

RESULTS = ROOT / "benchmarks" / "results"


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


# ------------------------------------------------------------------------------------------------ the demo


def demo() -> Drawing:
    """Return held-out accuracy over the steps: thin lines are seeds, thick ones their medians."""
    results = read("demo")
    runs = {kind: [result["curve"] for result in of_seed.values()] for kind, of_seed in results.items()}
    drawing = Drawing(900, 440, "The demo: held-out accuracy over GRPO steps")
    drawing.text(70, 36, "Two-digit addition: held-out accuracy", size=18, anchor="start", weight=600)
    last = runs["reward"][0][-1]["step"]
    plot = Plot(70, 62, 620, 318, (0, last), (0, 100))
    axes(
        drawing,
        plot,
        {step: str(step) for step in range(0, last + 1, 50)},
        {share: f"{share}%" for share in range(0, 101, 20)},
    )
    drawing.text(380, 424, "GRPO steps of 64 x 8 answers, after a supervised cold start", size=13, colour="muted")
    for kind, colour in (("control", "cool"), ("reward", "warm")):
        for curve in runs.get(kind, []):
            drawing.line(plot.points(_percent(curve)), colour, 1.1)
        if kind in runs:
            drawing.line(plot.points(_middle(runs[kind])), colour, 3.6)
    labels = {"reward": ("right or wrong", "as the reward"), "control": ("the same rewards,", "shuffled (control)")}
    for kind, lines in labels.items():
        if kind in runs:
            _end_label(drawing, plot, _middle(runs[kind])[-1], lines, len(runs[kind]))
    return drawing


def _percent(curve: Sequence[dict[str, float]]) -> list[tuple[float, float]]:
    return [(row["step"], 100 * row["accuracy"]) for row in curve]


def _middle(curves: Sequence[Sequence[dict[str, float]]]) -> list[tuple[float, float]]:
    """Return the median over seeds at each evaluated step."""
    columns = zip(*(_percent(curve) for curve in curves), strict=True)
    return [(column[0][0], median(y for _, y in column)) for column in columns]


def _end_label(drawing: Drawing, plot: Plot, end: tuple[float, float], lines: Sequence[str], seeds: int) -> None:
    x, y = plot.x(end[0]) + 14, min(plot.y(end[1]), plot.top + plot.height - 50)
    drawing.text(x, y, f"{end[1]:.0f}%", size=22, anchor="start", weight=700, colour="warm" if end[1] > 50 else "cool")
    for place, line in enumerate([*lines, f"median of {seeds} seeds"], start=1):
        drawing.text(x, y + 19 * place, line, size=13, anchor="start", colour="muted")


# ------------------------------------------------------------------------------------------------ recipes


def recipes() -> Drawing:
    """Return held-out reward before and after GRPO of each offline recipe: medians over seeds, with their spread."""
    results = {**read("demo_all"), "infill_nano": _infill()}
    drawing = Drawing(900, 80 + 38 * len(results), "Every offline recipe: held-out reward before and after")
    plot = Plot(230, 50, 560, 38 * len(results) - 10, (0, 1), (0, 1))
    axes(drawing, plot, {tick / 5: f"{tick / 5:g}" for tick in range(6)}, {})
    drawing.text(
        230,
        30,
        "mean reward before and after GRPO, and the gain (medians of 3 seeds; bars: all seeds)",
        size=14,
        anchor="start",
    )
    for place, (name, of_seed) in enumerate(sorted(results.items())):
        y = plot.top + 16 + 38 * place
        before, after = ([result[when]["value"] for result in of_seed.values()] for when in ("before", "after"))
        drawing.text(218, y + 5, name, size=14, anchor="end", font="mono")
        drawing.line([(plot.x(median(before)), y), (plot.x(median(after)), y)], "line", 2)
        for values, colour in ((before, "muted"), (after, "warm")):
            drawing.line([(plot.x(min(values)), y), (plot.x(max(values)), y)], colour, 3)
            drawing.dot(plot.x(median(values)), y, 6.5, colour)
        drawing.text(
            plot.left + plot.width + 20,
            y + 5,
            f"+{median(result['gain']['value'] for result in of_seed.values()):.2f}",
            size=14,
            anchor="start",
        )
    return drawing


def _infill() -> dict[str, Any]:
    """Return the infill runs in the form of the others: their reward is the judge's."""
    runs = read("demo_infill")
    return {seed: {when: run[when]["judge"] for when in ("before", "after", "gain")} for seed, run in runs.items()}


# ------------------------------------------------------------------------------------------------ speed


def speed() -> Drawing:
    """Return seconds of a full step of covey and of TRL over four axes, both scales logarithmic."""
    found = read("curves")["axes"]
    drawing = Drawing(1080, 380, "Seconds of a full step: covey and TRL on two CPU cores")
    drawing.text(64, 34, "Seconds of a full GRPO step on two CPU cores", size=18, anchor="start", weight=600)
    drawing.text(1056, 34, "covey", size=15, anchor="end", weight=600, colour="warm")
    drawing.text(1002, 34, "TRL", size=15, anchor="end", weight=600, colour="cool")
    everything = [_seconds(point, name) for points in found.values() for point in points for name in ("covey", "trl")]
    low, high = min(s["low"] for s in everything) * 0.8, max(s["high"] for s in everything) * 1.25
    ticks = {t: f"{t:g}" for t in (0.5, 1.0, 2.0, 5.0, 10.0, 20.0) if low <= t <= high}
    for place, (axis, points) in enumerate(found.items()):
        values = [point["value"] for point in points]
        span = (values[0] / 1.35, values[-1] * 1.35)
        plot = Plot(64 + 255 * place, 66, 215, 240, span, (low, high), math.log)
        axes(
            drawing, plot, {value: f"{value:,}" for value in values}, ticks if place == 0 else dict.fromkeys(ticks, "")
        )
        drawing.text(plot.left + plot.width / 2, 352, axis, size=14)
        for name, colour in (("trl", "cool"), ("covey", "warm")):
            drawing.line(plot.points([(p["value"], _seconds(p, name)["median"]) for p in points]), colour, 2.6)
            for point in points:
                drawing.dot(plot.x(point["value"]), plot.y(_seconds(point, name)["median"]), 4.5, colour)
        for point in points:
            x, y = plot.x(point["value"]), plot.y(_seconds(point, "trl")["median"])
            drawing.text(x, y - 11, f"{point['ratio']['median']:.1f}x", size=12, colour="muted")
    return drawing


def _seconds(point: dict[str, Any], name: str) -> dict[str, float]:
    return point["contestants"][name]["seconds"]["total"]


# ------------------------------------------------------------------------------------------------ others


def architectures() -> Drawing:
    """Return how many architectures of transformers are supported, refused and not tried."""
    counts = Counter(row["status"] for row in read("architectures"))
    names = {"fast": ("covey's attention and engine", "good"), "general": ("transformers' own passes", "warm")}
    names |= {"refused": ("refused, in one line", "muted"), "not built": ("no tiny model to try", "line")}
    total = sum(counts.values())
    drawing = Drawing(860, 150, f"{total} causal language models of transformers")
    drawing.text(30, 34, f"{total} causal language models of transformers", size=17, anchor="start", weight=600)
    x = 30.0
    for status, (label, colour) in names.items():
        if not counts[status]:
            continue
        wide = 800 * counts[status] / total
        drawing.rect(x, 52, wide - 4, 34, colour, colour)
        drawing.text(x, 108, str(counts[status]), size=17, anchor="start", weight=600)
        drawing.text(x, 128, label if wide > 150 else status, size=13, anchor="start", colour="muted")
        x += wide
    return drawing


def metrics() -> Drawing:
    """Return four metrics of the demo's seed 0 over its steps."""
    run = read("demo")["reward"]["0"]
    steps = run["steps"]
    shown = {
        "sampled_reward_mean": "rises while it learns",
        "entropy": "falls, but not to 0 at once",
        "completion_length_mean": "steady: the answers stay short",
        "accuracy": "held out: rises with the reward",
    }
    drawing = Drawing(1000, 270, "Four metrics of a healthy run: the demo, seed 0")
    for place, (name, meaning) in enumerate(shown.items()):
        pairs = list(enumerate(_smooth(steps[name], 10), start=1)) if name in steps else _accuracy(run["curve"])
        values = [value for _, value in pairs]
        top = max(values) * 1.1 or 1.0
        plot = Plot(56 + 240 * place, 66, 180, 130, (0, pairs[-1][0]), (0, top))
        half = float(f"{top / 2:.1g}")
        axes(drawing, plot, {0: "0", pairs[-1][0]: str(pairs[-1][0])}, {0: "0", half: f"{half:g}"})
        drawing.line(plot.points(pairs), "warm", 2)
        drawing.text(plot.left + 90, 40, name, size=13, font="mono")
        drawing.text(plot.left + 90, 246, meaning, size=12, colour="muted")
    return drawing


SICK = (
    ("lr_x10", "sampled_reward_mean", "a learning rate ten times too high"),
    ("many_updates", "sampled_reward_mean", "24 updates on each batch"),
    ("shuffled", "sampled_reward_mean", "rewards that mean nothing"),
    ("one_answer", "entropy", "one answer pays: entropy falls to 0"),
    ("entropy_bonus", "entropy", "an entropy bonus that is too strong"),
    ("length_pays", "completion_length_mean", "length pays"),
    ("nothing_pays", "completion_length_mean", "silence pays"),
    ("outliers", "grad_norm", "a reward of 10,000 now and then"),
)
"""Runs that were made sick, the metric that shows it, and by what."""


def tuning() -> Drawing:
    """Return a metric of each run that was made sick (red) beside that of the healthy run (green)."""
    runs = json.loads(gzip.decompress(KEPT.read_bytes()))
    drawing = Drawing(1000, 520, "Healthy (green, thin) and sick (red): the arithmetic task, 60 steps")
    for place, (name, metric, cause) in enumerate(SICK):
        lines = [_smooth(runs[run]["columns"][metric], 5) for run in ("healthy", name)]
        top = max(map(max, lines)) * 1.1
        row, column = divmod(place, 4)
        plot = Plot(56 + 240 * column, 66 + 250 * row, 180, 130, (1, len(lines[0])), (0, top))
        half = float(f"{top / 2:.1g}")
        axes(drawing, plot, {1: "1", len(lines[0]): str(len(lines[0]))}, {0: "0", half: f"{half:g}"})
        for values, colour, width in zip(lines, ("good", "bad"), (1.4, 2.4), strict=True):
            drawing.line(plot.points(list(enumerate(values, start=1))), colour, width)
        drawing.text(plot.left + 90, 42 + 250 * row, metric, size=12, font="mono")
        drawing.text(plot.left + 90, 246 + 250 * row, cause, size=12, colour="muted")
    return drawing


def _accuracy(curve: Sequence[dict[str, float]]) -> list[tuple[float, float]]:
    return [(row["step"], row["accuracy"]) for row in curve]


def _smooth(values: Sequence[float], width: int) -> list[float]:
    """Return the mean of the last `width` values at each place."""
    windows = (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
