"""JSON files of a run, without silent loss of rows."""

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from covey.system.disk import WriteError, atomic_file, cannot_write, catch_write_errors, read_regular
from covey.system.text.escaping import is_visible

LOGGER = logging.getLogger(__name__)
MAX_BYTES = 512 << 20
"""Maximum bytes of a run's file to read; nothing that a run wrote within its bounds is longer."""


class JsonlWriter:
    """Adds rows to a file, each written through at once.

    A row that the disk refuses stops the run (WriteError) or, with `wait`, is kept in memory and tried again with the
    next row and at the end. So is one whose file was moved or deleted.
    """

    def __init__(self, path: Path, *, wait: bool = False) -> None:
        self._path = path
        self._wait = wait
        with catch_write_errors(path):  # its folder is not made: one that was deleted must not come back as a stump
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._left = b""
        """Bytes that are not in the file yet."""
        self._failed = self._is_closed = False

    def write(self, row: Mapping[str, Any]) -> None:
        self.write_line(encode_row(row))

    def write_line(self, line: bytes) -> None:
        """Write a row made by `encode_row`."""
        self._left += line
        try:
            self._flush()
        except OSError as error:
            self._note(cannot_write(self._path, error), error)

    def close(self) -> None:
        """Write the remaining rows and close; again it does nothing.

        WriteError where the disk refuses, unless `write` has raised it.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._flush()
        except OSError as error:
            if self._wait or not self._failed:
                raise WriteError(f"{cannot_write(self._path, error)}; its last rows are lost") from error
        finally:
            os.close(self._descriptor)

    def _note(self, found: WriteError, cause: OSError) -> None:
        first, self._failed = not self._failed, True
        if not self._wait:
            raise found from cause
        if first:
            LOGGER.warning("%s; the run continues (output.on_write_error=continue), rows wait in memory", found)

    def _flush(self) -> None:
        if not self._left:
            return
        if not os.path.samestat(os.stat(self._path), os.fstat(self._descriptor)):
            raise FileNotFoundError(2, os.strerror(2))
        while self._left:
            self._left = self._left[os.write(self._descriptor, self._left) :]
        if self._failed:
            LOGGER.warning("%s can be written again; nothing is missing in it", self._path)
        self._failed = False


def encode_row(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line, with `finite` and `plain_data` applied."""
    return (_one_line(json.dumps(finite(row), ensure_ascii=False, allow_nan=False, default=plain_data)) + "\n").encode()


def _one_line(text: str) -> str:
    """Return JSON with control and invisible characters escaped.

    The same values are read from it. Lone surrogates, which UTF-8 cannot hold, become U+FFFD.
    """
    if text.isprintable():
        return text
    return "".join(c if is_visible(c) else json.dumps("\ufffd" if "\ud800" <= c <= "\udfff" else c)[1:-1] for c in text)


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file atomically, with numbers as in `finite`.

    WriteError where the disk fails. Unknown objects are written as text.
    """
    with atomic_file(path) as file:
        file.write(json.dumps(finite(content), indent=2, default=str, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot hold by "nan", "inf" and "-inf"."""
    return map_leaves(value, lambda one: str(one) if isinstance(one, float) and not math.isfinite(one) else one)


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested mappings and lists with every other value changed."""
    if isinstance(value, Mapping):
        return {key: map_leaves(item, change) for key, item in value.items()}
    return [map_leaves(item, change) for item in value] if isinstance(value, list | tuple) else change(value)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows with a step, without a torn last line."""
    if not path.is_file():
        return
    for line in read_regular(path, MAX_BYTES).split(b"\n"):
        row = object_of(line)
        if type(row.get("step")) is int:
            yield row


def read_object(path: Path, most_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Return the JSON object of a file, empty without one."""
    try:
        return object_of(read_regular(path, most_bytes))
    except (OSError, ValueError):
        return {}


def object_of(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object of a text, empty without one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def as_lists(value: Any) -> Any:
    """Return an array as lists or a number, other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def plain_data(value: Any) -> Any:
    """Return a foreign value as data for JSON and checkpoints.

    Numbers of arrays are numbers, other objects are text.

    >>> plain_data({"scores": np.array([0.5, 1.0]), "file": Path("a.txt")})
    {'scores': [0.5, 1.0], 'file': 'a.txt'}
    """
    value = as_lists(value)
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    # Not what is derived from these, such as members of an enumeration
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and abs(value) < float("inf"):
        return float(value)
    return str.__str__(value) if isinstance(value, str) else str(value)
