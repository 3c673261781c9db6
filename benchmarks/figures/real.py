"""What a real model learns on a laptop: rewards of every seed of `recipe=brief`, and of its control."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.figures.measured import read
from benchmarks.figures.shapes import Plot, axes
from benchmarks.figures.svg import Drawing
from covey.system.text.format import number_of

TITLE = "SmolLM2-135M on two CPU cores: one short sentence that makes sense"


def real() -> Drawing:
    """Return the mean reward of each step's answers: thin lines are seeds, the thick one their median."""
    results = read("real_recipes")
    runs, control = results["brief"], results.get("brief, control", {})
    curves = [found["steps"] for found in runs.values()]
    drawing = Drawing(900, 400, TITLE)
    drawing.text(70, 36, TITLE, size=18, anchor="start", weight=600)
    plot = Plot(70, 62, 620, 278, (1, len(curves[0])), (0, 1))
    ticks = {step: str(step) for step in range(2, len(curves[0]) + 1, 2)}
    axes(drawing, plot, {1: "1", **ticks}, {tick / 5: f"{tick / 5:g}" for tick in range(6)})
    drawing.text(380, 384, "GRPO steps of 8 x 8 answers", size=13, colour="muted")
    for found in control.values():
        _curve(drawing, plot, found["steps"], "cool", 2.2)
    for curve in curves:
        _curve(drawing, plot, curve, "warm", 1.1)
    middle = [median(values) for values in zip(*curves, strict=True)]
    _curve(drawing, plot, middle, "warm", 3.6)
    held_out = _ends(runs)
    _label(drawing, plot, middle[-1], "warm", ("mean reward of a step's", f"answers, {len(runs)} seeds;", held_out))
    for found in control.values():
        held_out = _ends({"0": found})
        _label(drawing, plot, found["steps"][-1], "cool", ("the same rewards, shuffled", "(control);", held_out))
    return drawing


def _ends(runs: Mapping[str, Mapping[str, Any]]) -> str:
    before, after = (median(found["reward"][when]["value"] for found in runs.values()) for when in ("before", "after"))
    return f"held out {before:.2f} to {after:.2f}"


def _curve(drawing: Drawing, plot: Plot, values: Sequence[float], colour: str, width: float) -> None:
    drawing.line(plot.points(list(enumerate(values, start=1))), colour, width)


def _label(drawing: Drawing, plot: Plot, end: float, colour: str, lines: Sequence[str]) -> None:
    x, y = plot.left + plot.width + 14, min(plot.y(end) + 6, plot.top + plot.height - 50)
    drawing.text(x, y, f"{end:.2f}", size=22, anchor="start", weight=700, colour=colour)
    for place, line in enumerate(lines, start=1):
        drawing.text(x, y + 19 * place, line, size=13, anchor="start", colour="muted")


# ------------------------------------------------------------------------------------------------ real sizes

SAMPLERS = {"covey": "warm", "vllm": "cool", "llama": "muted", "transformers": "line"}
NAMES = {"vllm": "vLLM", "llama": "llama.cpp"}
MODELS = {"135M": "SmolLM2-135M", "0.5B": "Qwen2.5-0.5B", "0.6B": "Qwen3-0.6B"}
SIZES = "Sampling on two CPU cores: tokens a second, as a share of the limit"


def sizes() -> Drawing:
    """Return a bar for each sampler at each size, precision and number of rows, with tokens a second beside it."""
    cells = {name: cell for name, cell in read("real_sizes")["cells"].items() if _is_compared(name, cell)}
    drawing = Drawing(900, 108 + 84 * len(cells), SIZES)
    drawing.text(40, 34, SIZES, size=18, anchor="start", weight=600)
    plot = Plot(250, 58, 480, 84 * len(cells), (0, 1), (0, 1))
    axes(drawing, plot, {tick / 4: f"{25 * tick} %" for tick in range(5)}, {})
    for place, name in enumerate(sorted(cells, key=_rank)):
        _, size, precision, rows, *_ = name.split()
        top = plot.top + 6 + 84 * place
        drawing.text(238, top + 24, MODELS[size], size=15, anchor="end", weight=600)
        drawing.text(
            238, top + 44, f"{precision}, {number_of(int(rows), 'row')}", size=13, anchor="end", colour="muted"
        )
        for line, (sampler, found) in enumerate((one, cells[name]["contestants"].get(one)) for one in SAMPLERS):
            if found is not None:
                width, y = plot.x(min(1.0, found["shares"]["sampling"])) - plot.left, top + 17 * line
                drawing.rect(plot.left, y, width, 14, SAMPLERS[sampler], SAMPLERS[sampler])
                said = f"{found['tokens_per_second']['median']:,.0f}  {NAMES.get(sampler, sampler)}"
                drawing.text(plot.left + width + 8, y + 12, said, size=13, anchor="start")
    return drawing


def _is_compared(name: str, cell: Mapping[str, Any]) -> bool:
    return name.startswith("sampling ") and len(cell.get("contestants", ())) > 1 and "cuda" not in name


def _rank(name: str) -> tuple[int, str, int]:
    _, size, precision, rows, *_ = name.split()
    return [*MODELS].index(size), precision, int(rows)
