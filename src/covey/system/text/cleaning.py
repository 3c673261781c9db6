"""Clean log records and messages of control characters and secrets."""

import logging
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from covey.system.text.escaping import escape
from covey.system.text.masking import without

INDENT = "\n    "
"""Begins every line of a record but its first, so that none looks like a record of its own."""


def clean(text: str, secrets: tuple[str, ...] = ()) -> str:
    """Escape control and invisible characters but line breaks, and mask secrets."""
    return escape(without(text, secrets), keep="\n")


class CleanRecords(logging.Filter):
    """Cleans records before a handler formats them."""

    def __init__(self, secrets: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._secrets = secrets

    def filter(self, record: logging.LogRecord) -> bool:
        record.name, record.msg, record.args = escape(record.name), self._indent(_message(record)), None
        if record.exc_info and record.exc_info[0] is not None:
            record.exc_text = self._indent("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
        return True

    def _indent(self, text: str) -> str:
        return clean(text, self._secrets).replace(INDENT, "\n").replace("\n", INDENT)


@contextmanager
def clean_handlers(secrets: Iterable[str] = ()) -> Iterator[None]:
    """Clean the records of the calling program's handlers inside."""
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


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # a format that does not fit its arguments is no reason to lose them
        return f"{record.msg} {record.args}"
