"""A drawing as SVG text: one palette, which follows the reader's light or dark colour scheme."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

LIGHT = {
    "page": "#fbfaf7",
    "ink": "#1e2630",
    "muted": "#5f6b7a",
    "line": "#c9d0d8",
    "panel": "#eef1f4",
    "warm": "#c2571a",
    "warm-soft": "#f8e3d3",
    "cool": "#2368a8",
    "cool-soft": "#dceaf7",
    "good": "#2b7a4b",
    "good-soft": "#dcf0e3",
    "bad": "#b23a2e",
    "bad-soft": "#f8dfdb",
}
DARK = {
    "page": "#12161c",
    "ink": "#e7eaee",
    "muted": "#a0abba",
    "line": "#3b4655",
    "panel": "#1d242e",
    "warm": "#f2985a",
    "warm-soft": "#472b18",
    "cool": "#74b4f2",
    "cool-soft": "#1a3450",
    "good": "#66c78e",
    "good-soft": "#173a27",
    "bad": "#f0857a",
    "bad-soft": "#4a221d",
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, 'DejaVu Sans Mono', monospace"
WIDTH_OF_A_LETTER = {"sans": 0.56, "mono": 0.61}
"""In units of the font size, on average and rather too wide: a check of what fits, not typography."""


@dataclass
class Drawing:
    """Shapes on a card. Colours are names of the palette."""

    width: float
    height: float
    title: str
    parts: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, fill: str = "panel", edge: str = "line") -> None:
        self.parts.append(
            f'<rect x="{n(x)}" y="{n(y)}" width="{n(width)}" height="{n(height)}" rx="8" class="f-{fill} s-{edge}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 14,
        colour: str = "ink",
        anchor: str = "middle",
        weight: int = 400,
        font: str = "sans",
    ) -> None:
        """Write one line whose baseline is at y."""
        style = f"font-size:{n(size)}px;font-weight:{weight};text-anchor:{anchor}"
        self.parts.append(
            f'<text x="{n(x)}" y="{n(y)}" class="f-{colour} {font}" style="{style}">{escape(text)}</text>'
        )

    def line(
        self, points: Sequence[tuple[float, float]], colour: str = "line", width: float = 1.5, dash: str = ""
    ) -> None:
        path = "M" + "L".join(f"{n(x)} {n(y)}" for x, y in points)
        self.path(path, colour=colour, width=width, dash=dash)

    def path(self, path: str, *, colour: str = "line", fill: str = "none", width: float = 1.5, dash: str = "") -> None:
        style = f"stroke-width:{n(width)}" + (f";stroke-dasharray:{dash}" if dash else "")
        self.parts.append(f'<path d="{path}" class="f-{fill} s-{colour}" style="{style}"/>')

    def arrow(self, start: tuple[float, float], end: tuple[float, float], colour: str = "muted") -> None:
        style = "stroke-width:1.8"
        (x0, y0), (x1, y1) = start, end
        self.parts.append(
            f'<path d="M{n(x0)} {n(y0)}L{n(x1)} {n(y1)}" class="f-none s-{colour}" style="{style}"'
            f' marker-end="url(#to-{colour})"/>'
        )

    def dot(self, x: float, y: float, radius: float, fill: str = "warm") -> None:
        self.parts.append(f'<circle cx="{n(x)}" cy="{n(y)}" r="{n(radius)}" class="f-{fill}"/>')

    def __str__(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {n(self.width)} {n(self.height)}"'
            f' width="{n(self.width)}" height="{n(self.height)}" role="img">'
        )
        card = f'<rect width="{n(self.width)}" height="{n(self.height)}" rx="12" class="f-page"/>'
        body = "\n".join([f"<title>{escape(self.title)}</title>", STYLE, MARKERS, card, *self.parts])
        return f"{head}\n{body}\n</svg>\n"


def fits(text: str, size: float, width: float, font: str = "sans") -> bool:
    """Return whether a line of text is surely no wider than `width`."""
    return len(text) * size * WIDTH_OF_A_LETTER[font] <= width


def n(value: float) -> str:
    """Format a coordinate: at most one digit after the point, none where it is 0."""
    return f"{value:.1f}".removesuffix(".0")


def _rules(palette: dict[str, str]) -> str:
    return "".join(f".f-{name}{{fill:{value}}}.s-{name}{{stroke:{value}}}" for name, value in palette.items())


STYLE = (
    f"<style>.sans{{font-family:{FONT}}}.mono{{font-family:{MONO}}}.f-none{{fill:none}}.s-none{{stroke:none}}"
    f"{_rules(LIGHT)}@media (prefers-color-scheme: dark){{{_rules(DARK)}}}</style>"
)
MARKERS = (
    "<defs>"
    + "".join(
        f'<marker id="to-{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0.6L7.4 4L0 7.4z" class="f-{name}"/></marker>'
        for name in ("muted", "warm", "cool", "good", "bad")
    )
    + "</defs>"
)
