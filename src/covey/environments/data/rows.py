"""Rows of a data set: files, folders, hub, functions, memory.

Errors in the data are one line with file and line number.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from covey.environments.base import SPLITS, Split
from covey.environments.data.columns import value_in
from covey.environments.data.entries import Entry, Row, first_line
from covey.environments.data.files import read_files
from covey.environments.data.folders import Source, check_place, folder_splits, pattern_splits, rows_in_memory
from covey.environments.data.pictures import picture_in
from covey.environments.data.settings import DataConfig
from covey.system.lookup import is_function_path, resolve
from covey.types import Prompt

USUAL_COLUMNS = ("question", "problem", "messages", "conversations", "instruction", "query", "input")
"""Usual names in data sets for the column of a prompt."""
TWO_FILES = "give a test split: data.path=FOLDER with train.* and test.* files"

Usable = tuple[Row, Any]
"""A row, and the environment's input from it."""

_log = logging.getLogger(__name__)


def as_it_is(row: Row) -> Row:
    return row


def make_prompts(
    rows: Mapping[Split, Sequence[Row | Prompt]], make: Callable[[Row], Prompt]
) -> dict[Split, list[Prompt]]:
    """Make prompts of rows, with ids. ValueError names the row."""

    def prompt(split: Split, index: int, row: Row | Prompt) -> Prompt:
        try:
            return replace(row if isinstance(row, Prompt) else make(row), id=f"{split}-{index}")
        except ValueError as error:
            raise ValueError(f"{split} row {index + 1} {error}") from error

    return {split: [prompt(split, *entry) for entry in enumerate(found)] for split, found in rows.items()}


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Settings of reading rows, from `DataConfig`."""

    columns: tuple[str, ...] = ()
    """Columns that every row must have."""
    column_setting: str | None = None
    """The setting that says how the column is called, where it is only one."""
    prompt_columns: tuple[str, ...] = ()
    """Columns that make the prompt: rows equal in them are held out together. Empty takes the whole row."""
    known: Callable[[Row], Row] = as_it_is
    """Gives rows of a form that others have the columns that are read."""
    make: Callable[[Row], Any] = as_it_is
    """Converts a row with all its columns to the environment's input; ValueError names its fault."""
    read: Callable[[Row], Row] = as_it_is
    """Makes of such a row the one that is compared with others, and taken: ValueError too."""
    subset: str | None = None
    train_split: str = "train"
    test_split: str = "test"
    test_fraction: float = 0.1
    max_rows: int | None = None
    shuffle_rows: bool = True
    bad_rows: str = "error"

    @property
    def is_measured_whole(self) -> bool:
        """Return True if nothing is trained on, and all rows are measured."""
        return self.test_fraction == 1


def row_settings(
    data: DataConfig,
    columns: tuple[str, ...],
    column_setting: str | None = None,
    prompt: tuple[str, ...] = (),
    make: Callable[[Row], Any] = as_it_is,
) -> RowSettings:
    """Return the settings of reading rows.

    `columns` must exist; `prompt` are those that make the prompt, by default all.
    """
    of_data = {name: value for name, value in vars(data).items() if name in RowSettings.__dataclass_fields__}
    return RowSettings(
        columns=columns, column_setting=column_setting, prompt_columns=prompt or columns, make=make, **of_data
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """Both splits' rows for the environment, and the skipped ones' number.

    >>> Rows(splits={"train": [{"prompt": "2+2="}], "test": []}, num_skipped=0)
    """

    splits: Mapping[Split, list[Any]]
    num_skipped: int


def load_rows(path: str | Mapping[str, Iterable[Row]] | None, settings: RowSettings | None = None) -> Rows:
    """Return the rows of a path, a function, or splits in memory.

    Without a test split, `test_fraction` of the rows is held out: those whose content hashes lowest, equal prompts
    together. Raises ValueError for any user error.
    """
    settings = settings or RowSettings()
    if path is None:
        raise ValueError("no data: set data.path to a file, a folder, a hub name or module:function")
    if not isinstance(path, str):
        sources = _named_splits(_in_memory(path, "data"), RowSettings(), "data")
        return _collect(sources, settings, "data")
    return _collect(_sources(path, settings), settings, path)


def _sources(path: str, settings: RowSettings) -> dict[Split, Source]:
    """Return sources of training rows, and of test rows if any."""
    local, wanted = Path(path).expanduser(), (settings.train_split, settings.test_split)
    if is_function_path(path):
        return _named_splits(_in_memory(_call_loader(path), path), settings, path)
    if local.is_file():
        return {"train": lambda: read_files([local])}
    if local.is_dir():
        return _named_splits(folder_splits(local, wanted, settings.subset), settings, path)
    if any(mark in path for mark in "*?["):
        return _named_splits(pattern_splits(str(local), wanted), settings, path)
    check_place(path)
    return _named_splits(_in_memory(_of_hub(path, settings), f"data set {path}"), settings, f"data set {path}")


def _named_splits(found: Mapping[str, Source], settings: RowSettings, name: str) -> dict[Split, Source]:
    if settings.is_measured_whole:
        chosen = next((split for split in (settings.test_split, settings.train_split) if split in found), None)
        if chosen is not None or len(found) == 1:
            return {"train": found[chosen or next(iter(found))]}
    if settings.train_split not in found:
        raise ValueError(f"{name} has no split {settings.train_split!r} (has: {', '.join(found)})")
    sources: dict[Split, Source] = {"train": found[settings.train_split]}
    if settings.test_split in found and settings.test_split != settings.train_split:
        sources["test"] = found[settings.test_split]
    others = [split for split in found if split not in (settings.train_split, settings.test_split)]
    if others and "test" not in sources:
        _log.info("%s: rows are held out of split %s, not taken from %s", name, settings.train_split, ", ".join(others))
    return sources


def _in_memory(data: Mapping[str, Iterable[Row]], name: str) -> dict[str, Source]:
    return {split: rows_in_memory(rows, f"{name} split {split}") for split, rows in data.items()}


def _call_loader(path: str) -> Mapping[str, Iterable[Row]]:
    """Return the function's rows, by split if it names them."""
    found = resolve(path, {})()
    if isinstance(found, Mapping):
        return found
    if isinstance(found, str | bytes) or not isinstance(found, Iterable):
        raise ValueError(f"{path} must return rows, or splits of rows by name, got {type(found).__name__}")
    return {"train": found}


def _of_hub(name: str, settings: RowSettings) -> Mapping[str, Iterable[Row]]:
    from covey.system.hub import silence

    problem = silence()
    import datasets

    try:
        found: Mapping[str, Iterable[Row]] = datasets.load_dataset(name, settings.subset)
    except Exception as error:  # whatever the hub, the network or the cache came up with
        neither = "" if "/" in name else "; there is no such file either"
        raise ValueError(
            f"cannot load data set {name!r} from the hub: {problem or first_line(error)}{neither}"
        ) from error
    return found


def _collect(sources: Mapping[Split, Source], settings: RowSettings, name: str) -> Rows:
    """Return both splits, holding out test rows if none are given."""
    _check_test_split("test" in sources, settings, name)
    skipped: Counter[Split] = Counter()
    splits = (_separate if "test" in sources else _divide)(sources, settings, skipped)
    if settings.is_measured_whole:
        splits["test"] = splits["train"]
    for split, rows in splits.items():
        if not rows:
            raise ValueError(f"{name} has no usable rows for split {split} ({skipped[split]} broken)")
    if skipped:
        _log.warning("%s: %d broken rows skipped", name, skipped.total())
    return Rows({split: [made for _, made in found] for split, found in splits.items()}, skipped.total())


def _check_test_split(is_there: bool, settings: RowSettings, name: str) -> None:
    """Refuse unread settings of the test split. ValueError."""
    usual = RowSettings()
    if is_there and settings.test_fraction != usual.test_fraction:
        raise ValueError(f"data.test_fraction={settings.test_fraction} needs data without a test split; {name} has one")
    if not is_there and settings.test_split not in (usual.test_split, settings.train_split):
        raise ValueError(f"data.test_split={settings.test_split} names no split of {name}")


def _separate(
    sources: Mapping[Split, Source], settings: RowSettings, skipped: Counter[Split]
) -> dict[Split, list[Usable]]:
    """Return both splits, training rows without test prompts."""
    given: Iterable[Usable] = _usable(sources["train"], settings, "train", skipped)
    if settings.max_rows is None:
        given = list(given)
    # Read the test rows first: their prompts are not trained on.
    test = _limit(_usable(sources["test"], settings, "test", skipped), settings)
    asked = {_prompt_key(row, settings) for row, _ in test}
    shared: Counter[str] = Counter()
    keys: list[bytes] = []

    def unseen() -> Iterator[Usable]:
        for row, made in given:
            keys.append(_prompt_key(row, settings))
            is_shared = keys[-1] in asked
            shared["rows"] += is_shared
            if not is_shared:
                yield row, made

    train = _limit(unseen(), settings)
    _tell_repeats(keys, settings)
    if shared["rows"] and not train:
        raise ValueError(
            f"every prompt of split {settings.train_split} is in split {settings.test_split} too, so that none is left "
            "to train on; without a test split, data.test_fraction of the rows is held out"
        )
    if shared["rows"]:
        text = "rows of split %s left out because split %s has their prompts too: %d"
        _log.warning(text, settings.train_split, settings.test_split, shared["rows"])
    return {"train": train, "test": test}


def _divide(
    sources: Mapping[Split, Source], settings: RowSettings, skipped: Counter[Split]
) -> dict[Split, list[Usable]]:
    read = _usable(sources["train"], settings, "train", skipped)
    kept = list(read) if settings.max_rows is None else None
    prints = [(_digest(row), _prompt_key(row, settings)) for row, _ in (read if kept is None else kept)]
    if not prints:
        return {"train": []}
    _tell_repeats([prompt for _, prompt in prints], settings)
    held_out = set[int]() if settings.is_measured_whole else _held_out(prints, settings.test_fraction)
    taken: dict[int, Split] = {}
    for split in SPLITS:
        indices = [index for index in range(len(prints)) if (index in held_out) == (split == "test")]
        taken |= dict.fromkeys(_chosen(indices, prints, settings), split)
    splits: dict[Split, list[Usable]] = {"train": [], "test": []}
    again = _usable(sources["train"], settings, "train", Counter()) if kept is None else kept
    for index, usable in enumerate(again):
        if index in taken:
            splits[taken[index]].append(usable)
    return splits


def _tell_repeats(keys: Sequence[bytes], settings: RowSettings) -> None:
    """Report the number of rows with repeated prompts."""
    if different := len(keys) - len(set(keys)):
        text = "split %s: %d of %d rows repeat the prompt of another one, %d prompts differ"
        _log.warning(text, settings.train_split, different, len(keys), len(keys) - different)


def _usable(source: Source, settings: RowSettings, split: Split, skipped: Counter[Split]) -> Iterator[Usable]:
    """Yield good rows and count broken ones; bad_rows=error raises."""
    seen: set[str] = set()
    entries = source()
    for entry in entries:
        usable, problem = _read(entry, settings)
        if usable is not None:
            seen.update(usable[0])
            yield usable
        elif settings.bad_rows == "error":
            names = chain(seen, (name for other in entries for name in other.row or {}))
            raise ValueError(f"{entry.place} {problem}{_remedy(entry, names, settings)}")
        else:
            skipped[split] += 1


def _read(entry: Entry, settings: RowSettings) -> tuple[Usable | None, str]:
    """Return a row with its environment form, or its error."""
    if entry.row is None:
        return None, entry.problem
    if picture := picture_in(entry.row):
        return None, f"has {picture}, and policies are trained on text: leave it out"
    given = settings.known(entry.row)
    for column in settings.columns:
        if value_in(given, column) is None:
            is_there = column in given
            return (
                None,
                f"column {column!r} is null"
                if is_there
                else f"has no column {column!r} (has: {', '.join(entry.row) or 'none'})",
            )
    try:
        row = settings.read(given)
        return (row, settings.make(row)), ""
    except (ValueError, RecursionError) as error:
        return None, str(error)
    except (TypeError, AttributeError) as error:  # values of types that the environment does not take
        return None, f"cannot be read ({first_line(error)})"


def _remedy(entry: Entry, names: Iterable[str], settings: RowSettings) -> str:
    """Return the remedy for a broken row: another column, if all lack it."""
    absent = [column for column in settings.columns if entry.row is not None and column not in entry.row]
    if not absent or absent[0] in names:
        return "; data.bad_rows=skip leaves such rows out"
    usual = (absent[0].lower(), *USUAL_COLUMNS)
    name = next((name for name in entry.row or () if name.lower() in usual), "NAME")
    other_name = f"; {settings.column_setting}={name} takes another column" if settings.column_setting else ""
    return f", nor has any other row{other_name}"


def _limit(rows: Iterator[Usable], settings: RowSettings) -> list[Usable]:
    if settings.max_rows is None:
        return list(rows)
    if not settings.shuffle_rows:
        return list(islice(rows, settings.max_rows))
    drawn = nsmallest(settings.max_rows, enumerate(rows), key=lambda item: (_lot(_digest(item[1][0])), item[0]))
    return [row for _, row in sorted(drawn, key=itemgetter(0))]


def _chosen(indices: Sequence[int], prints: Sequence[tuple[bytes, bytes]], settings: RowSettings) -> Sequence[int]:
    if settings.max_rows is None or not settings.shuffle_rows:
        return indices[: settings.max_rows]
    return nsmallest(settings.max_rows, indices, key=lambda index: (_lot(prints[index][0]), index))


def _held_out(prints: Sequence[tuple[bytes, bytes]], test_fraction: float) -> set[int]:
    """Return the test rows by lowest digest, equal prompts together."""
    count = len(prints)
    if count < 2:
        raise ValueError(f"cannot hold out test rows of {count} row; {TWO_FILES}")
    num_test = min(count - 1, max(1, round(test_fraction * count)))
    of_prompts: dict[bytes, list[int]] = {}
    for index in sorted(range(count), key=lambda index: (prints[index][0], index)):
        of_prompts.setdefault(prints[index][1], []).append(index)
    if len(of_prompts) < 2:
        raise ValueError(f"cannot hold out test rows of {count} rows with the same prompt; {TWO_FILES}")
    test: set[int] = set()
    for indices in of_prompts.values():
        if len(test) + len(indices) <= num_test:
            test.update(indices)
    fewest = min(len(indices) for indices in of_prompts.values())
    return test or set(next(indices for indices in of_prompts.values() if len(indices) == fewest))


def _prompt_key(row: Row, settings: RowSettings) -> bytes:
    asked = {column: value_in(row, column) for column in settings.prompt_columns}
    return _digest({column: value for column, value in asked.items() if value is not None} or row)


def _digest(row: Row) -> bytes:
    return hashlib.sha256(json.dumps(row, sort_keys=True, default=repr).encode()).digest()


def _lot(digest: bytes) -> bytes:
    """Return a second digest, independent of the held-out choice."""
    return hashlib.sha256(b"max_rows" + digest).digest()
