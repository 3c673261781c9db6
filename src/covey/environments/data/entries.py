"""The entries of a source of rows: rows, or errors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from covey.environments.data.columns import is_turn

Row = Mapping[str, Any]

MAX_ROW_BYTES = 4 << 20
"""A longer row is taken for a mistake (a prompt of megabytes fits no policy) and treated as broken."""
MAX_HELD_BYTES = 256 << 20
"""Bytes of compressed data held at a time, where a row is no measure: a list of .json, texts that repeat."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a source: a row, or an error."""

    place: str
    row: Row | None
    problem: str = ""


def check_entry(row: Any, place: str) -> Entry:
    """Return a row's entry, with an error for anything but a mapping.

    A row that is nothing but turns, by number in a table, is a conversation.
    """
    turns = list(row.values()) if isinstance(row, Mapping) and all(map(str.isdigit, map(str, row))) else row
    row = {"conversations": turns} if isinstance(turns, list) and turns and all(map(is_turn, turns)) else row
    if not isinstance(row, Mapping):
        return Entry(place, None, f"is not an object with columns but {type(row).__name__}")
    if is_table(row):
        return Entry(place, None, f"is a table of columns ({', '.join(map(str, row))[:80]}); give a list of rows")
    if unnamed := [name for name in row if not isinstance(name, str)]:
        return Entry(place, None, f"has the column {unnamed[0]!r}, whose name is no text")
    return Entry(place, row)


WRAPPERS = {"data", "rows", "examples", "instances", "train", "test"}
"""Names under which a file holds all of its rows."""


def is_table(row: Mapping[Any, Any]) -> bool:
    """Return True for a table of columns, such as pandas'."""
    columns = list(row.values())
    if columns and all(isinstance(cells, Mapping) for cells in columns):
        return any(keys and list(map(str, keys)) == list(map(str, range(len(keys)))) for keys in (row, *columns))
    if not columns or not all(isinstance(cells, list) and cells for cells in columns):
        return False
    # Messages of a prompt, blocks of a machine: one value of one row
    is_value = any(isinstance(cells[0], Mapping) for cells in columns) and not WRAPPERS.issuperset(row)
    return not is_value and len({len(cells) for cells in columns}) == 1


def first_line(error: Exception) -> str:
    """Return an error's type and first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def too_long(place: str, size: float) -> Entry:
    return Entry(place, None, f"has {size / 1e6:.1f} MB, more than {MAX_ROW_BYTES / 1e6:.1f} MB")
