"""The curves of runs as PNG files, for papers and chats."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covey_report.logs.read import RunFiles
from covey_report.page.curves import curves_of, span_of

STYLES = ("-", "--", ":", "-.")


def draw_curves(runs: Sequence[RunFiles], names: Sequence[str], folder: Path) -> list[Path]:
    """Draw each curve into its own file. ValueError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("covey report --png needs matplotlib: pip install 'covey[report]'") from error
    folder.mkdir(parents=True, exist_ok=True)
    curves = [{curve["name"]: curve for curve in curves_of(run)} for run in runs]
    spans = [span_of(run) for run in runs]
    found = []
    for name in dict.fromkeys(name for of_run in curves for name in of_run):
        figure = Figure(figsize=(6.0, 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for place, (of_run, run_name) in enumerate(zip(curves, names, strict=True)):
            if name in of_run:
                _draw(axes, of_run[name], run_name, STYLES[place % len(STYLES)])
        first = next(of_run[name] for of_run in curves if name in of_run)
        axes.set_title(first["title"], loc="left", fontsize=10, parse_math=False)  # names may hold $
        axes.set_xlabel("step")
        axes.set_xlim(min(first for first, _ in spans) - 0.5, max(last for _, last in spans) + 0.5)
        if len(runs) > 1:
            for text in axes.legend(fontsize=8, frameon=False).get_texts():
                text.set_parse_math(False)
        path = folder / f"{name.replace('/', '_')}.png"
        figure.savefig(path, dpi=130)
        found.append(path)
    return found


def _draw(axes: Any, curve: dict[str, Any], name: str, style: str) -> None:

    def floats(values: Sequence[float | None]) -> list[float]:
        return [float("nan") if value is None else value for value in values]

    if curve.get("log"):
        axes.set_yscale("log")
    (line,) = axes.plot(
        curve["x"], floats(curve["y"]), style, lw=1.6, label=name, marker="o" if curve.get("points") else ""
    )
    axes.fill_between(curve["x"], floats(curve["low"]), floats(curve["high"]), color=line.get_color(), alpha=0.18, lw=0)
    axes.spines[["top", "right"]].set_visible(False)
