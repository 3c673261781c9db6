"""Terminal output without control characters from text. Imports rich, which takes time."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from covey.system.text.escaping import escape, is_visible

PLAIN = str.maketrans(dict(zip("▁▂▃▄▅▆▇█■□▣·×", "_.:-=+*##.+-x", strict=True)) | {"→": "->", "…": "..."})
"""ASCII for the characters that covey draws, for terminals with ASCII or a page of 256 characters alone."""


class CleanConsole(Console):
    """A terminal that shows only rich's own control characters.

    Text is no markup and names no emoji; characters that the encoding lacks are written out, as in `\\u65e5`.
    """

    def __init__(self, **options: Any) -> None:
        plain: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
        super().__init__(**plain | options)

    def on_broken_pipe(self) -> None:
        raise  # rich would leave the program with exit code 1

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else self._show(segment.text)
            yield segment if text is segment.text else Segment(text, segment.style)

    def _show(self, text: str) -> str:
        if not all(c == "\n" or is_visible(c) for c in text):
            text = escape(text, keep="\n")
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            return text.translate(PLAIN).encode(self.encoding, "backslashreplace").decode(self.encoding)
        return text
