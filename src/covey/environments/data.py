"""Rows of a data set: local JSON lines, JSON and Parquet, hub data sets, and objects already in memory.

Whatever is wrong with the data is one line that names the file and the line in it.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from covey.environments.base import Split
from covey.tables import names_function, resolve

Row = Mapping[str, Any]

MAX_ROW_BYTES = 4 << 20
"""A longer row is taken for a mistake (a prompt of megabytes fits no policy) and treated as broken."""

FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".txt", ".gz", ".zst", ".zip", ".arrow", ".yaml", ".py")
"""No data set of a hub is called so: a name that ends in one of them is a file, also of a kind that cannot be read."""

HALF_PAIR = b"\\ud"
"""JSON can spell halves of surrogate pairs, which no tokenizer takes; only rows with this need a closer look."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowSettings:
    """How rows are read; what `DataConfig` explains."""

    columns: tuple[str, ...] = ()
    """Columns that every row must have."""
    column_setting: str | None = None
    """The setting that says how the column is called, where it is only one."""
    prompt_columns: tuple[str, ...] = ()
    """Columns that make the prompt: rows equal in them are held out together. Empty takes the whole row."""
    subset: str | None = None
    train_split: str = "train"
    test_split: str = "test"
    test_fraction: float = 0.1
    max_rows: int | None = None
    bad_rows: str = "error"

    def __post_init__(self) -> None:
        if self.bad_rows not in {"error", "skip"}:
            raise ValueError(f"bad_rows must be error or skip, got {self.bad_rows!r}")
        if not 0 < self.test_fraction < 1:
            raise ValueError(f"test_fraction must be between 0 and 1, got {self.test_fraction}")
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"max_rows must be >= 1, got {self.max_rows}")


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of both splits, and how many broken ones were left out.

    >>> Rows(splits={"train": [{"prompt": "2+2="}], "test": []}, num_skipped=0)
    """

    splits: Mapping[Split, list[Row]]
    num_skipped: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """What stands at one place of a source: a row, or why there is none."""

    place: str
    row: Row | None
    problem: str = ""


def load_rows(path: str | None, settings: RowSettings | None = None) -> Rows:
    """Rows of a file, of a directory with train.* and test.* files, of a hub data set, or that a function returns.

    Where there is no test split, `test_fraction` of the rows is held out: those whose content hashes lowest, so the
    choice is the same every time, rows with equal prompts all or none. Raises ValueError for whatever a user can mend.
    """
    settings = settings or RowSettings()
    if path is None:
        raise ValueError("no data: set data.path to a .jsonl, .json or .parquet file, a directory, or a hub name")
    if names_function(path):
        return _collected(_named_splits(_returned(path), settings, path), settings, path)
    local = Path(path).expanduser()
    if local.is_file():
        return _collected({"train": _read_file(local)}, settings, path)
    if local.is_dir():
        return _collected(_directory(local, settings), settings, path)
    if local.suffix in FILE_SUFFIXES or path.startswith(("/", ".", "~")) or path.endswith("/") or path.count("/") > 1:
        raise ValueError(f"no file or directory {path}")
    return _collected(_hub(path, settings), settings, path)


def as_rows(data: Iterable[Row] | Mapping[str, Iterable[Row]], settings: RowSettings | None = None) -> Rows:
    """Rows of a `datasets.Dataset`, a `DatasetDict`, a list of dictionaries, or a mapping of split names to those."""
    settings = settings or RowSettings()
    named = data if isinstance(data, Mapping) else {settings.train_split: data}
    return _collected(_named_splits(named, settings, "the data"), settings, "the data")


def _collected(sources: Mapping[Split, Iterable[_Entry]], settings: RowSettings, name: str) -> Rows:
    """Both splits, the test rows held out of the training rows where they have no source of their own."""
    _check_test_split("test" in sources, settings, name)
    limit = settings.max_rows if "test" in sources else None
    num_skipped = 0
    splits: dict[Split, list[Row]] = {}
    for split, source in sources.items():
        splits[split], skipped = _usable(source, settings, limit)
        num_skipped += skipped
        if not splits[split]:
            raise ValueError(f"{name} has no usable rows for split {split} ({skipped} broken)")
    if "test" not in splits:
        splits["train"], splits["test"] = _held_out(splits["train"], settings)
    if num_skipped:
        _log.warning("%s: %d broken rows skipped", name, num_skipped)
    return Rows({split: rows[: settings.max_rows] for split, rows in splits.items()}, num_skipped)


def _check_test_split(is_there: bool, settings: RowSettings, name: str) -> None:
    """ValueError for a setting about the test split that these data would leave unread."""
    usual = RowSettings()
    if is_there and settings.test_fraction != usual.test_fraction:
        raise ValueError(f"data.test_fraction={settings.test_fraction} needs data without a test split; {name} has one")
    if not is_there and settings.test_split not in (usual.test_split, settings.train_split):
        raise ValueError(f"data.test_split={settings.test_split} names no split of {name}")


def _usable(source: Iterable[_Entry], settings: RowSettings, limit: int | None) -> tuple[list[Row], int]:
    """The good rows, at most `limit`, and the number of broken ones; with bad_rows=error the first of those raises."""
    rows: list[Row] = []
    num_skipped = 0
    entries = iter(source)
    for entry in entries:
        if len(rows) == limit:
            break
        problem = entry.problem or _missing_column(entry.row or {}, settings.columns)
        if problem and settings.bad_rows == "error":
            others = chain(rows, (other.row or {} for other in entries))
            raise ValueError(f"{entry.place} {problem}{_remedy(entry, others, settings)}")
        num_skipped += bool(problem)
        if not problem and entry.row is not None:
            rows.append(entry.row)
    return rows, num_skipped


def _missing_column(row: Row, columns: Iterable[str]) -> str:
    for column in columns:
        if column not in row or row[column] is None:
            return f"has no column {column!r} (has: {', '.join(row) or 'none'})"
    return ""


def _remedy(entry: _Entry, others: Iterable[Row], settings: RowSettings) -> str:
    """The end of the message about a broken row: another column where no row at all has the one that was asked for."""
    absent = [column for column in settings.columns if entry.row is not None and column not in entry.row]
    if entry.problem or not absent or any(absent[0] in row for row in others):
        return "; data.bad_rows=skip leaves such rows out"
    other_name = f"; {settings.column_setting}=NAME takes another column" if settings.column_setting else ""
    return f", nor has any other row{other_name}"


def _held_out(rows: list[Row], settings: RowSettings) -> tuple[list[Row], list[Row]]:
    """(train, test), in their order: the test rows are those whose content has the lowest SHA-256.

    Rows with the same prompt stay together: those that would not all fit into the test split are trained on.
    """
    if len(rows) < 2:
        raise ValueError(f"cannot hold out test rows of {len(rows)} row; give a test split")
    num_test = min(len(rows) - 1, max(1, round(settings.test_fraction * len(rows))))
    digests = [hashlib.sha256(_as_json(row)).digest() for row in rows]
    of_prompts: dict[bytes, list[int]] = {}
    for index in sorted(range(len(rows)), key=lambda index: (digests[index], index)):
        of_prompts.setdefault(_prompt_key(rows[index], settings.prompt_columns), []).append(index)
    if len(of_prompts) < 2:
        raise ValueError(f"cannot hold out test rows of {len(rows)} rows with the same prompt; give a test split")
    test: set[int] = set()
    for indices in of_prompts.values():
        if len(test) + len(indices) <= num_test:
            test.update(indices)
    fewest = min(len(indices) for indices in of_prompts.values())
    test = test or set(next(indices for indices in of_prompts.values() if len(indices) == fewest))
    return [row for i, row in enumerate(rows) if i not in test], [row for i, row in enumerate(rows) if i in test]


def _prompt_key(row: Row, columns: Iterable[str]) -> bytes:
    """What rows with the same prompt have in common."""
    return _as_json({column: row[column] for column in columns if column in row} or row)


def _as_json(row: Row) -> bytes:
    return json.dumps(row, sort_keys=True, default=repr).encode()


def _directory(folder: Path, settings: RowSettings) -> dict[Split, Iterator[_Entry]]:
    found: dict[Split, Iterator[_Entry]] = {}
    names: tuple[tuple[Split, str], ...] = (("train", settings.train_split), ("test", settings.test_split))
    for split, name in names:
        files = [folder / f"{name}{suffix}" for suffix in READERS if (folder / f"{name}{suffix}").is_file()]
        if len(files) > 1:
            raise ValueError(f"{folder} has several files for split {name}: {', '.join(file.name for file in files)}")
        if files and not (split == "test" and name == settings.train_split):
            found[split] = _read_file(files[0])
    if "train" not in found:
        raise ValueError(f"{folder} has no {settings.train_split}.jsonl, .json or .parquet")
    return found


def _read_file(path: Path) -> Iterator[_Entry]:
    if path.suffix not in READERS:
        raise ValueError(f"{path} must end in {', '.join(READERS)}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty")
    return READERS[path.suffix](path)


def _read_json_lines(path: Path) -> Iterator[_Entry]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parsed(line, f"{path} line {number}")


def _parsed(line: bytes, place: str) -> _Entry:
    if len(line) > MAX_ROW_BYTES:
        return _Entry(place, None, f"has {len(line) / 1e6:.1f} MB, more than {MAX_ROW_BYTES / 1e6:.1f} MB")
    try:
        row = json.loads(line.decode("utf-8-sig"))
        if HALF_PAIR in line.lower():
            json.dumps(row, ensure_ascii=False).encode()
        return _checked(row, place)
    except UnicodeDecodeError as error:
        return _Entry(place, None, f"is not UTF-8 (byte {error.start})")
    except UnicodeEncodeError:
        return _Entry(place, None, r"has half of a surrogate pair (\ud800 to \udfff), which is no character")
    except (json.JSONDecodeError, RecursionError) as error:
        return _Entry(place, None, f"is not JSON ({error})")


def _checked(row: Any, place: str) -> _Entry:
    if not isinstance(row, Mapping):
        return _Entry(place, None, f"is not an object with columns but {type(row).__name__}")
    return _Entry(place, row)


def _read_json(path: Path) -> Iterator[_Entry]:
    """One list of objects. Some .json files are JSON lines; those are read as such."""
    try:
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except json.JSONDecodeError:
        return _read_json_lines(path)
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not readable JSON ({error})") from error
    rows = content if isinstance(content, list) else [content]
    return (_checked(row, f"{path} entry {number}") for number, row in enumerate(rows, start=1))


def _read_parquet(path: Path) -> Iterator[_Entry]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a Parquet file: {_first_line(error)}") from error
    return (_checked(row, f"{path} row {number}") for number, row in enumerate(rows, start=1))


def _in_memory(data: Iterable[Row], name: str) -> Iterator[_Entry]:
    return (_checked(row, f"{name} row {number}") for number, row in enumerate(data, start=1))


def _named_splits(data: Mapping[str, Iterable[Row]], settings: RowSettings, name: str) -> dict[Split, Iterator[_Entry]]:
    if settings.train_split not in data:
        raise ValueError(f"{name} has no split {settings.train_split!r} (has: {', '.join(data)})")
    sources: dict[Split, Iterator[_Entry]] = {}
    sources["train"] = _in_memory(data[settings.train_split], f"{name} split {settings.train_split}")
    if settings.test_split in data and settings.test_split != settings.train_split:
        sources["test"] = _in_memory(data[settings.test_split], f"{name} split {settings.test_split}")
    return sources


def _returned(path: str) -> Mapping[str, Iterable[Row]]:
    """What the function returns: rows, or rows of each split by its name."""
    found = resolve(path, {})()
    if isinstance(found, Mapping):
        return found
    if isinstance(found, str | bytes) or not isinstance(found, Iterable):
        raise ValueError(f"{path} must return rows, or splits of rows by name, got {type(found).__name__}")
    return {"train": found}


def _hub(name: str, settings: RowSettings) -> dict[Split, Iterator[_Entry]]:
    import datasets

    try:
        found = datasets.load_dataset(name, settings.subset)
    except Exception as error:  # whatever the hub, the network or the cache came up with
        raise ValueError(f"cannot load data set {name!r} from the hub: {_first_line(error)}") from error
    return _named_splits(found, settings, f"data set {name}")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


READERS: dict[str, Callable[[Path], Iterator[_Entry]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
