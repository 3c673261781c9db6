"""Shapes that several figures share: boxes with text, chains of boxes, axes of a plot."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.figures.svg import Drawing, fits

HEAD, SUB = 15.0, 12.5
"""Font sizes of a box: its first line and the others."""
LEADING = 17.0
PAD = 12.0


@dataclass(frozen=True)
class Box:
    """A head and lines below it; `tone` colours the box."""

    head: str
    lines: tuple[str, ...] = ()
    tone: Literal["panel", "warm", "cool", "good", "bad"] = "panel"


def box(drawing: Drawing, place: tuple[float, float], size: tuple[float, float], content: Box) -> None:
    """Draw a box around its centred text. ValueError for text that may not fit."""
    (x, y), (width, height) = place, size
    plain = content.tone == "panel"
    drawing.rect(x, y, width, height, "panel" if plain else f"{content.tone}-soft", "line" if plain else content.tone)
    top = y + (height - LEADING * (len(content.lines) + 1)) / 2 + HEAD * 0.85
    for text, font in [(content.head, HEAD), *((line, SUB) for line in content.lines)]:
        if not fits(text, font, width - PAD):
            raise ValueError(f"{drawing.title}: {text!r} is wider than its box of {width:g}")
    drawing.text(x + width / 2, top, content.head, size=HEAD, weight=600)
    for place_of, line in enumerate(content.lines, start=1):
        drawing.text(x + width / 2, top + LEADING * place_of, line, size=SUB, colour="muted")


def width_of(content: Box, least: float = 96.0) -> float:
    """Return the width of a box that surely holds its text."""
    widths = [len(content.head) * HEAD * 0.62, *(len(line) * SUB * 0.56 for line in content.lines)]
    return max(least, max(widths) + 2 * PAD)


def chain(title: str, boxes: Sequence[Box], note: str = "", gap: float = 34.0) -> Drawing:
    """Return boxes in a row, each with an arrow to the next, and a line of text below."""
    widths = [width_of(content) for content in boxes]
    height = LEADING * (1 + max(len(content.lines) for content in boxes)) + 2 * PAD + 4
    width = sum(widths) + gap * (len(boxes) - 1) + 48
    drawing = Drawing(max(width, 640.0), height + (78 if note else 48), title)
    x = (drawing.width - width) / 2 + 24
    for place, (content, wide) in enumerate(zip(boxes, widths, strict=True)):
        if place:
            drawing.arrow((x - gap + 4, 24 + height / 2), (x - 4, 24 + height / 2))
        box(drawing, (x, 24), (wide, height), content)
        x += wide + gap
    if note:
        if not fits(note, 13, drawing.width - 24):
            raise ValueError(f"{title}: the note is too long")
        drawing.text(drawing.width / 2, height + 54, note, size=13, colour="muted")
    return drawing


@dataclass(frozen=True)
class Plot:
    """The place of a plot in a drawing, and how values become coordinates."""

    left: float
    top: float
    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    scale: Callable[[float], float] = float

    def x(self, value: float) -> float:
        low, high = (self.scale(end) for end in self.x_range)
        return self.left + self.width * (self.scale(value) - low) / (high - low)

    def y(self, value: float) -> float:
        low, high = (self.scale(end) for end in self.y_range)
        return self.top + self.height * (1 - (self.scale(value) - low) / (high - low))

    def points(self, pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(self.x(x), self.y(y)) for x, y in pairs]


def axes(drawing: Drawing, plot: Plot, x_ticks: dict[float, str], y_ticks: dict[float, str]) -> None:
    """Draw the frame of a plot: a light line at each tick, labels outside."""
    for value, label in y_ticks.items():
        drawing.line([(plot.left, plot.y(value)), (plot.left + plot.width, plot.y(value))], width=1)
        drawing.text(plot.left - 8, plot.y(value) + 4, label, size=12, colour="muted", anchor="end")
    bottom = plot.top + plot.height
    for value, label in x_ticks.items():
        drawing.line([(plot.x(value), bottom), (plot.x(value), bottom + 5)], width=1)
        drawing.text(plot.x(value), bottom + 20, label, size=12, colour="muted")
    drawing.line([(plot.left, bottom), (plot.left + plot.width, bottom)], "muted", 1.2)
