"""Rows of files, in JSON, CSV, TSV, Parquet or Arrow, with places.

Files are streamed row by row, or in batches, and may be compressed.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO, cast

from covey.environments.data.entries import MAX_HELD_BYTES, MAX_ROW_BYTES, Entry, check_entry, first_line, too_long
from covey.environments.data.tables import read_arrow, read_parquet

HALF_PAIR = b"\\ud"
"""JSON can spell halves of surrogate pairs, which no tokenizer takes; only rows with this need a closer look."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""Beginning of the placeholder that a clone without Git LFS has in place of a file."""
EXCELS = re.compile(r"\ufeff?sep=(.)\r?\n")
"""The line before the header that names the separator of cells to Excel."""
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""Beginnings of text of two bytes a character."""


def is_row_file(path: Path) -> bool:
    """Return True for a name of a readable file of rows."""
    return _kind(path) in READERS


def read_files(paths: Iterable[Path]) -> Iterator[Entry]:
    """Yield the rows of several files in order. Raises as `read_file`."""
    for path in paths:
        yield from read_file(path)


def read_file(path: Path) -> Iterator[Entry]:
    """Yield a file's rows with line or number. ValueError if unreadable."""
    kind = _kind(path)
    if kind not in READERS or (_compression(path) and kind not in TEXT_READERS):
        raise ValueError(f"{path} must end in {', '.join(READERS)} (text also with {', '.join(OPENERS)})")
    try:
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty")
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
        if start.startswith(UTF_16):
            raise ValueError(f"{path} is UTF-16: save it as UTF-8")
        if start == LFS_POINTER:
            raise ValueError(f"{path} is a placeholder of Git LFS, not the file: `git lfs pull` fetches it")
        yield from READERS[kind](path)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{path} cannot be read: {first_line(error)}") from error


def _kind(path: Path) -> str:
    return (path.with_suffix("") if _compression(path) else path).suffix.lower()


def _compression(path: Path) -> str:
    return path.suffix if path.suffix in OPENERS else ""


def _open_zstandard(path: Path) -> BinaryIO:
    import pyarrow

    return cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd")))


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    opener = OPENERS.get(path.suffix)
    with path.open("rb") if opener is None else opener(path) as file:
        yield file


def _read_json_lines(path: Path) -> Iterator[Entry]:
    with _open(path) as file:
        for number in count(1):
            line = file.readline(MAX_ROW_BYTES + 1)
            size, rest = len(line), line
            while rest and size > MAX_ROW_BYTES and not rest.endswith(b"\n"):
                rest = file.readline(MAX_ROW_BYTES)
                size += len(rest)
            if not line:
                return
            if size > MAX_ROW_BYTES:
                yield too_long(f"{path} line {number}", size)
            elif line.strip():
                yield _parse(line, f"{path} line {number}")


def _parse(line: bytes, place: str) -> Entry:
    try:
        row = json.loads(line.decode("utf-8-sig").rstrip())
        if HALF_PAIR in line.lower():
            json.dumps(row, ensure_ascii=False).encode()
        return check_entry(row, place)
    except UnicodeDecodeError as error:
        return Entry(place, None, f"is not UTF-8 (byte {error.start})")
    except UnicodeEncodeError:
        return Entry(place, None, r"has half of a surrogate pair (\ud800 to \udfff), which is no character")
    except (ValueError, RecursionError) as error:
        if line.strip() == b"[":
            return Entry(place, None, "begins a list, where each line is a row: a file of one list ends in .json")
        return Entry(place, None, f"is not JSON ({json_fault(error)})")


def json_fault(error: ValueError | RecursionError) -> str:
    """Describe an error in a line of JSON, with the character.

    >>> json_fault(json.JSONDecodeError("Expecting ',' delimiter", "[1 2]", 3))
    "expecting ',' delimiter at character 4"
    """
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if not isinstance(error, json.JSONDecodeError):  # such as a number of thousands of digits
        return str(error)[:100]
    return f"{error.msg[:1].lower()}{error.msg[1:]} at character {error.colno}"


def _read_json(path: Path) -> Iterator[Entry]:
    """Read a list of objects, one object, or JSON lines in .json."""
    if _is_json_lines(path):
        yield from _read_json_lines(path)
        return
    with _open(path) as file:
        text = file.read(MAX_HELD_BYTES + 1) if _compression(path) else file.read()
    if _compression(path) and len(text) > MAX_HELD_BYTES:
        raise ValueError(f"{path} must be a list of at most {MAX_HELD_BYTES / 1e9:.1f} GB; JSON lines may be longer")
    try:
        content = json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        line = f"line {error.lineno} " if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"{path} {line}is not JSON ({json_fault(error)})") from error
    rows = content if isinstance(content, list) else [content]
    for number, row in enumerate(rows, start=1):
        yield check_entry(row, f"{path} entry {number}")


def _is_json_lines(path: Path) -> bool:
    with _open(path) as file:
        first = b"\n"
        while first and not first.strip():
            first = file.readline(MAX_ROW_BYTES)
    return _parse(first, "").row is not None


def _read_csv(path: Path) -> Iterator[Entry]:
    """Read a table with a header; empty cells are missing values."""
    csv.field_size_limit(MAX_ROW_BYTES)
    with _open(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        pieces = _pieces(text, path)
        header = next(pieces, "")
        if stated := EXCELS.fullmatch(header):
            header = next(pieces, "")
        mark = stated[1] if stated else _delimiter(path, header)
        lines = csv.reader(chain([header], pieces), delimiter=mark, strict=True)
        if len(header) >= MAX_ROW_BYTES:
            raise ValueError(f"{path} line 1 must be a header, got one of more than {MAX_ROW_BYTES / 1e6:.1f} MB")
        names = next(lines, [])
        if not _is_text(names):
            raise ValueError(f"{path} line 1 is not UTF-8; save the table as UTF-8")
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise ValueError(f"{path} has several columns {repeated[0]!r}")
        yield from _table_rows(lines, names, path)


def _pieces(text: io.TextIOWrapper, path: Path) -> Iterator[str]:
    """Yield lines, long ones in pieces. ValueError for unclosed quotes."""
    quotes = size = 0
    while line := text.readline(MAX_ROW_BYTES):
        quotes += line.count('"')
        size = size + len(line) if quotes % 2 else 0
        if size > 2 * MAX_ROW_BYTES:
            raise ValueError(f"{path} must close its quotes: a row has more than {MAX_ROW_BYTES / 1e6:.1f} MB")
        yield line


def _delimiter(path: Path, header: str) -> str:
    """Return the delimiter: tab for .tsv, else comma, semicolon or tab."""
    if _kind(path) == ".tsv":
        return "\t"
    return next((mark for mark in ",;\t" if mark in header), ",")


def _table_rows(lines: Any, names: Sequence[str], path: Path) -> Iterator[Entry]:
    """Yield nonblank rows of a csv.reader, with their first lines."""
    while True:
        place = f"{path} line {lines.line_num + 1}"
        try:
            cells = next(lines)
        except StopIteration:
            return
        except csv.Error as error:
            yield Entry(place, None, f"is not a line of a table ({error})")
            continue
        if cells:
            yield _row_of_cells(cells, names, place)


def _row_of_cells(cells: Sequence[str], names: Sequence[str], place: str) -> Entry:
    if len(cells) > len(names):
        return Entry(place, None, f"has {len(cells)} cells, the header {len(names)}")
    if not _is_text(cells):
        return Entry(place, None, "is not UTF-8")
    padded = [*cells, *[""] * (len(names) - len(cells))]
    return Entry(place, {name: cell or None for name, cell in zip(names, padded, strict=True)})


def _is_text(cells: Iterable[str]) -> bool:
    """Return True if all bytes were UTF-8, without surrogates."""
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        return False
    return True


TEXT_READERS: dict[str, Callable[[Path], Iterator[Entry]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
}
READERS: dict[str, Callable[[Path], Iterator[Entry]]] = {**TEXT_READERS, ".parquet": read_parquet, ".arrow": read_arrow}
OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstandard,
}
"""Openers by the suffix of the compression."""
