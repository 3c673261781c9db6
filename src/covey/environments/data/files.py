"""Rows of files: JSON lines, JSON, CSV, TSV, Parquet and Arrow, compressed or not, each row with its place.

Files are read as a stream, a row or a batch of rows at a time, so that a large one takes no memory of its own.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

Row = Mapping[str, Any]

MAX_ROW_BYTES = 4 << 20
"""A longer row is taken for a mistake (a prompt of megabytes fits no policy) and treated as broken."""
HALF_PAIR = b"\\ud"
"""JSON can spell halves of surrogate pairs, which no tokenizer takes; only rows with this need a closer look."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""How the placeholder begins that a clone without Git LFS has in place of a file."""
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""How text of two bytes a character begins."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What stands at one place of a source: a row, or why there is none."""

    place: str
    row: Row | None
    problem: str = ""


def is_row_file(path: Path) -> bool:
    """Return whether the file's name says that it holds rows which can be read here."""
    return _kind(path) in READERS


def read_files(paths: Iterable[Path]) -> Iterator[Entry]:
    """Yield the rows of several files, one file after the other. Raises what `read_file` raises."""
    for path in paths:
        yield from read_file(path)


def read_file(path: Path) -> Iterator[Entry]:
    """Yield the rows of a file, each with its line or number. ValueError for a file that cannot be read."""
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


def checked(row: Any, place: str) -> Entry:
    """Return the entry of a row. One that is no mapping of columns is a problem."""
    if not isinstance(row, Mapping):
        return Entry(place, None, f"is not an object with columns but {type(row).__name__}")
    return Entry(place, row)


def first_line(error: Exception) -> str:
    """Return the type of an error and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _kind(path: Path) -> str:
    """Return the suffix that says how a file is read, without that of its compression."""
    return (path.with_suffix("") if _compression(path) else path).suffix.lower()


def _compression(path: Path) -> str:
    return path.suffix if path.suffix in OPENERS else ""


def _open_zstandard(path: Path) -> BinaryIO:
    import pyarrow

    return cast(BinaryIO, io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd")))


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading bytes, decompressed."""
    opener = OPENERS.get(path.suffix)
    with path.open("rb") if opener is None else opener(path) as file:
        yield file


# ------------------------------------------------------------------------------------------------ JSON


def _read_json_lines(path: Path) -> Iterator[Entry]:
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parsed(line, f"{path} line {number}")


def _parsed(line: bytes, place: str) -> Entry:
    if len(line) > MAX_ROW_BYTES:
        return Entry(place, None, f"has {len(line) / 1e6:.1f} MB, more than {MAX_ROW_BYTES / 1e6:.1f} MB")
    try:
        row = json.loads(line.decode("utf-8-sig").rstrip())
        if HALF_PAIR in line.lower():
            json.dumps(row, ensure_ascii=False).encode()
        return checked(row, place)
    except UnicodeDecodeError as error:
        return Entry(place, None, f"is not UTF-8 (byte {error.start})")
    except UnicodeEncodeError:
        return Entry(place, None, r"has half of a surrogate pair (\ud800 to \udfff), which is no character")
    except (ValueError, RecursionError) as error:
        if line.strip() == b"[":
            return Entry(place, None, "begins a list, where each line is a row: a file of one list ends in .json")
        return Entry(place, None, f"is not JSON ({json_fault(error)})")


def json_fault(error: ValueError | RecursionError) -> str:
    """Say what is wrong in a line of JSON, and at which character.

    >>> json_fault(json.JSONDecodeError("Expecting ',' delimiter", "[1 2]", 3))
    "expecting ',' delimiter at character 4"
    """
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if not isinstance(error, json.JSONDecodeError):  # such as a number of thousands of digits
        return str(error)[:100]
    return f"{error.msg[:1].lower()}{error.msg[1:]} at character {error.colno}"


def _read_json(path: Path) -> Iterator[Entry]:
    """Read one list of objects, or one object. Some .json files are JSON lines, which are read as such."""
    # One row per line, whatever the name ends in
    if _is_json_lines(path):
        yield from _read_json_lines(path)
        return
    try:
        with _opened(path) as file:
            content = json.loads(file.read().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        line = f"line {error.lineno} " if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"{path} {line}is not JSON ({json_fault(error)})") from error
    # A list of rows, or one row
    rows = content if isinstance(content, list) else [content]
    for number, row in enumerate(rows, start=1):
        yield checked(row, f"{path} entry {number}")


def _is_json_lines(path: Path) -> bool:
    """Return whether the first line that is not blank is a whole object."""
    with _opened(path) as file:
        first = b"\n"
        while first and not first.strip():
            first = file.readline(MAX_ROW_BYTES)
    return _parsed(first, "").row is not None


# ------------------------------------------------------------------------------------------------ tables of text


def _read_csv(path: Path) -> Iterator[Entry]:
    """Read a table with a header. Cells are text, numbers too. An empty one is a missing value."""
    csv.field_size_limit(MAX_ROW_BYTES)
    with _opened(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        header = text.readline()
        lines = csv.reader(chain([header], text), delimiter=_delimiter(path, header), strict=True)
        names = next(lines, [])
        if not _is_text(names):
            raise ValueError(f"{path} line 1 is not UTF-8; save the table as UTF-8")
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise ValueError(f"{path} has several columns {repeated[0]!r}")
        yield from _table_rows(lines, names, path)


def _delimiter(path: Path, header: str) -> str:
    """Return a tab for .tsv, else a comma, or where the header has none a semicolon or a tab, as spreadsheets write."""
    if _kind(path) == ".tsv":
        return "\t"
    return next((mark for mark in ",;\t" if mark in header), ",")


def _table_rows(lines: Any, names: Sequence[str], path: Path) -> Iterator[Entry]:
    """Yield the rows of a csv.reader that are not blank, each by the first line that it stands on."""
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
    """Return whether all bytes were UTF-8: others have become halves of surrogate pairs."""
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        return False
    return True


# ------------------------------------------------------------------------------------------------ columns


def _read_parquet(path: Path) -> Iterator[Entry]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from _of_batches(file.iter_batches(batch_size=BATCH_ROWS), path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a Parquet file: {first_line(error)}") from error


def _read_arrow(path: Path) -> Iterator[Entry]:
    """Read an Arrow file, or an Arrow stream, which `datasets` writes."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as source:
            try:
                reader: Any = pyarrow.ipc.open_file(source)
                batches: Iterable[Any] = (reader.get_batch(index) for index in range(reader.num_record_batches))
            except pyarrow.ArrowInvalid:
                source.seek(0)
                batches = pyarrow.ipc.open_stream(source)
            yield from _of_batches(batches, path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not an Arrow file: {first_line(error)}") from error


def _of_batches(batches: Iterable[Any], path: Path) -> Iterator[Entry]:
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, BATCH_ROWS):
            for row in batch.slice(start, BATCH_ROWS).to_pylist():
                number += 1
                yield checked(row, f"{path} row {number}")


BATCH_ROWS = 1024
"""Rows of a table of columns that are Python objects at the same time."""
TEXT_READERS: dict[str, Callable[[Path], Iterator[Entry]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
}
READERS: dict[str, Callable[[Path], Iterator[Entry]]] = {
    **TEXT_READERS,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstandard,
}
"""By the suffix of the compression."""
