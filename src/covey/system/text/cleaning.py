"""Log records and terminal output in which no text acts, poses as another line, or shows a secret."""

import logging
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from covey.system.text.escaping import escape, is_visible
from covey.system.text.masking import without

INDENT = "\n    "
"""Begins every line of a record but its first, so that none looks like a record of its own."""


def clean(text: str, secrets: tuple[str, ...] = ()) -> str:
    """Return a text for people: line breaks stay, all else that acts or hides is written out, secrets are masked."""
    return escape(without(text, secrets), keep="\n")


class CleanRecords(logging.Filter):
    """Cleans records before a handler formats them, whoever logged them and whatever they were made of."""

    def __init__(self, secrets: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._secrets = secrets

    def filter(self, record: logging.LogRecord) -> bool:
        record.name, record.msg, record.args = escape(record.name), self._indented(_message(record)), None
        if record.exc_info and record.exc_info[0] is not None:
            record.exc_text = self._indented("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
        return True

    def _indented(self, text: str) -> str:
        return clean(text, self._secrets).replace(INDENT, "\n").replace("\n", INDENT)


@contextmanager
def clean_handlers(secrets: Iterable[str] = ()) -> Iterator[None]:
    """Clean what the handlers of a program that runs covey get, inside."""
    found = [*logging.getLogger().handlers, *logging.getLogger("covey").handlers]
    handlers = [*found, *([] if logging.lastResort is None else [logging.lastResort])]
    cleaner = CleanRecords(tuple(secrets))
    for handler in handlers:
        handler.addFilter(cleaner)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(cleaner)


class CleanConsole(Console):
    """A terminal that shows only what rich itself makes of control characters, none that came in a text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or all(c == "\n" or is_visible(c) for c in segment.text):
                yield segment
            else:
                yield Segment(escape(segment.text, keep="\n"), segment.style)


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # a format that does not fit its arguments is no reason to lose them
        return f"{record.msg} {record.args}"
