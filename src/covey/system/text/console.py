"""Terminal output in which no text acts. Imports rich, for which a refusal need not wait."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from covey.system.text.escaping import escape, is_visible


class CleanConsole(Console):
    """A terminal that shows only what rich itself makes of control characters, none that came in a text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or all(c == "\n" or is_visible(c) for c in segment.text):
                yield segment
            else:
                yield Segment(escape(segment.text, keep="\n"), segment.style)
