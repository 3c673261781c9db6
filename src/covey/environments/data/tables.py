"""Rows of Parquet and Arrow tables, in batches of bounded memory."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from covey.environments.data.entries import MAX_HELD_BYTES, MAX_ROW_BYTES, Entry, check_entry, first_line, too_long

BATCH_ROWS = 1024
"""Rows of a table of columns that are Python objects at the same time."""
MAX_SWELLING = 1000
"""Bytes that one of a file may become, beyond the bound on held ones."""
BATCH_BYTES = 64 << 20
"""Bytes of a columnar table's rows held at a time, unless one row alone has more."""


def read_parquet(path: Path) -> Iterator[Entry]:
    import pyarrow

    try:
        yield from _of_batches(_parquet_batches(path), path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a Parquet file: {first_line(error)}") from error


def _parquet_batches(path: Path) -> Iterator[Any]:
    """Yield batches of bounded size; repeated texts stay in dictionaries."""
    from pyarrow.parquet import ParquetFile, read_metadata

    found = read_metadata(path)
    leaves = [found.schema.column(place) for place in range(found.num_columns)]
    texts = [place for place, leaf in enumerate(leaves) if leaf.physical_type == "BYTE_ARRAY"]
    in_codes = ParquetFile(path, metadata=found, read_dictionary=[leaves[place].path for place in texts])
    with ParquetFile(path, metadata=found) as plain, in_codes:
        for number in range(found.num_row_groups):
            group, most = found.row_group(number), 0.0
            # Repeated and empty values take next to nothing in the file
            values = sum(group.column(place).num_values * max(8, leaf.length) for place, leaf in enumerate(leaves))
            size = max(group.total_byte_size, values)
            mean = size // max(1, group.num_rows)
            if mean > MAX_ROW_BYTES:
                raise ValueError(f"{path}: a row {too_long('', mean).problem}, on average")
            if size > max(MAX_HELD_BYTES, MAX_SWELLING * path.stat().st_size):
                raise ValueError(f"{path} unpacks {size / 1e6:.1f} MB at once, of {path.stat().st_size} bytes")
            # A text of a batch is one of its column's dictionary, which the first row shows unless it is empty
            for first in in_codes.iter_batches(1, row_groups=[number]):
                longest = [longest_text(part) for column in first.columns for part in coded_parts(column)]
                for place, size in zip(texts, longest, strict=True):
                    is_flat = leaves[place].max_repetition_level == 0
                    most += size * (BATCH_ROWS if is_flat else group.column(place).num_values)
                break
            reader = plain if most <= MAX_HELD_BYTES else in_codes
            yield from reader.iter_batches(max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, mean))), row_groups=[number])


def coded_parts(column: Any) -> Iterator[Any]:
    """Yield the dictionary-coded parts of an Arrow column."""
    from pyarrow import types

    if types.is_dictionary(column.type):
        yield column
    elif types.is_nested(column.type):
        inner = column.flatten() if types.is_struct(column.type) else [column.values]
        for part in [column.keys, column.items] if types.is_map(column.type) else inner:
            yield from coded_parts(part)


def longest_text(part: Any) -> float:
    """Return the longest possible text's bytes, infinite if unknown."""
    return float(row_bytes(part.dictionary).max()) if len(part.dictionary) else math.inf


def read_arrow(path: Path) -> Iterator[Entry]:
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
    import numpy as np

    first = 0
    for batch in batches:
        sizes, start = sum(map(row_bytes, batch.columns), np.zeros(batch.num_rows)), 0
        held = np.where(sizes <= MAX_ROW_BYTES, sizes, np.inf)
        while start < batch.num_rows:
            fits = int(np.searchsorted(np.cumsum(held[start : start + BATCH_ROWS]), BATCH_BYTES, side="right"))
            rows = batch.slice(start, fits).to_pylist() if fits else [None]
            for number, row in enumerate(rows, start=first + start + 1):
                place, size = f"{path} row {number}", sizes[number - first - 1]
                yield check_entry(row, place) if size <= MAX_ROW_BYTES else too_long(place, size)
            start += len(rows)
        first += batch.num_rows


def row_bytes(column: Any) -> Any:
    """Return each row's bytes as objects, at least 8 without text."""
    import numpy as np
    from pyarrow import ExtensionArray, compute, large_binary, types

    kind, rows = column.type, len(column)
    if isinstance(column, ExtensionArray):
        return row_bytes(column.storage)
    if types.is_dictionary(kind):
        places = compute.fill_null(column.indices, 0).to_numpy(zero_copy_only=False)
        return row_bytes(column.dictionary)[places] if len(column.dictionary) else np.zeros(rows)
    if types.is_struct(kind):
        return sum((row_bytes(part) for part in column.flatten()), np.zeros(rows))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        parts = (column.keys, column.items) if types.is_map(kind) else (column.values,)
        ends = np.concatenate([[0], np.cumsum(sum(map(row_bytes, parts)))])
        return np.diff(ends[column.offsets.to_numpy()])
    if types.is_fixed_size_list(kind):
        inside = column.values.slice(column.offset * kind.list_size, rows * kind.list_size)
        return row_bytes(inside).reshape(rows, kind.list_size).sum(axis=1)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        column = column.cast(large_binary())
    if any(
        fits(column.type) for fits in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    ):
        return compute.fill_null(compute.binary_length(column), 0).to_numpy(zero_copy_only=False)
    try:
        return np.full(rows, max(8, kind.bit_width // 8))
    except ValueError:  # of no width: a row may be all of it
        return np.full(rows, max(8, column.get_total_buffer_size()))
