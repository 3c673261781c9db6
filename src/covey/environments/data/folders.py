"""Find the splits of a folder or pattern: names, shards, hub clones."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from glob import glob, iglob
from pathlib import Path

from covey.environments.data.entries import Entry, Row, check_entry, first_line
from covey.environments.data.files import OPENERS, READERS, TEXT_READERS, read_files

_log = logging.getLogger(__name__)

FILE_SUFFIXES = (*READERS, *OPENERS, ".txt", ".zip", ".yaml", ".py")
"""No data set of a hub is called so: a name that ends in one of them is a file, also of a kind that cannot be read."""

Source = Callable[[], Iterator[Entry]]
"""Yields the entries of a split from the first on, each time it is called."""


def check_place(path: str) -> None:
    """Refuse a path that leads nowhere, or an empty pattern. ValueError."""
    local = Path(path).expanduser()
    if local.is_file() or local.is_dir():
        return
    if any(mark in path for mark in "*?["):
        if not any(Path(found).is_file() for found in iglob(str(local), recursive=True)):
            raise ValueError(f"no file matches {local}")
        return
    if local.suffix in FILE_SUFFIXES or path.startswith(("/", ".", "~")) or path.endswith("/") or path.count("/") > 1:
        raise ValueError(f"no file or directory {path}{_on_the_hub(path)}")


def _on_the_hub(path: str) -> str:
    """Return a hint for a path that is an address or name of the hub."""
    found = re.fullmatch(r"(?:https://huggingface\.co/datasets/|hf://datasets/)?([\w-]+/[\w.-]+)(?:/([\w-]+))?/?", path)
    is_address = "://" in path
    if found is None or not (is_address or found[2]) or Path(path.partition("/")[0]).exists():
        return ""
    subset = f" data.subset={found[2]}" if found[2] and not is_address else ""
    return f"; a data set of the hub is data.path={found[1]}{subset}"


def rows_in_memory(data: Iterable[Row], name: str) -> Source:
    """Return a source of rows in memory; an iterator is read now."""
    kept = list(data) if isinstance(data, Iterator) else data
    return partial(_entries, kept, name)


def _entries(data: Iterable[Row], name: str) -> Iterator[Entry]:
    return (check_entry(row, f"{name} row {number}") for number, row in enumerate(data, start=1))


def folder_splits(folder: Path, wanted: tuple[str, str], subset: str | None) -> dict[str, Source]:
    """Return a source per split of a folder, by name.

    A folder holds what `save_to_disk` wrote, files named like the `wanted` splits, or a hub's layout (shards, folders,
    a data card), which `datasets` resolves. ValueError otherwise.
    """
    if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return _saved_to_disk(folder)
    named = {name: files for name in wanted if (files := _files_named(folder, name))}
    for name, files in named.items():
        if len(files) > 1:
            raise ValueError(f"{folder} has several files for split {name}: {', '.join(file.name for file in files)}")
    if subset is None and wanted[0] in named:
        return {name: partial(read_files, files) for name, files in named.items()}
    found = _hub_layout(folder, subset)
    if subset is None:
        _warn_of_unread(folder, [file for files in found.values() for file in files])
    return {name: partial(read_files, files) for name, files in found.items()}


def _warn_of_unread(folder: Path, read: Iterable[Path]) -> None:
    """Warn of files of rows that are not read, but for JSON.

    A file of JSON may tell of the others.
    """
    known = {path.resolve() for path in read}
    others = [path for path in sorted(folder.iterdir()) if path.suffix in {*READERS} - {".json"}]
    if left := ", ".join(path.name for path in others if path.resolve() not in known):
        told = "%s: %s not read, as files of a folder have one format; data.path='%s/*' reads all"
        _log.warning(told, folder, left, folder)


def pattern_splits(pattern: str, wanted: tuple[str, str]) -> dict[str, Source]:
    """Return a pattern's files by split, the first by default. ValueError."""
    files = sorted(path for found in glob(pattern, recursive=True) if (path := Path(found)).is_file())
    if not files:
        raise ValueError(f"no file matches {pattern}")
    tests = [path for path in files if re.search(rf"(?<![a-z]){re.escape(wanted[1])}(?![a-z])", path.name)]
    others = [path for path in files if path not in tests]
    if not tests or not others:
        return {wanted[0]: partial(read_files, files)}
    return {wanted[0]: partial(read_files, others), wanted[1]: partial(read_files, tests)}


def _files_named(folder: Path, split: str) -> list[Path]:
    suffixes = [*READERS, *(f"{suffix}{compressed}" for suffix in TEXT_READERS for compressed in OPENERS)]
    return [path for suffix in suffixes if (path := folder / f"{split}{suffix}").is_file()]


def _saved_to_disk(folder: Path) -> dict[str, Source]:
    """Return a `DatasetDict`'s splits, or a `Dataset` as training rows."""
    import datasets

    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever its files came up with
        raise ValueError(f"{folder} cannot be read as what save_to_disk wrote: {first_line(error)}") from error
    splits: Mapping[str, Iterable[Row]] = found if isinstance(found, datasets.DatasetDict) else {"train": found}
    return {name: rows_in_memory(data, f"{folder} split {name}") for name, data in splits.items()}


def _hub_layout(folder: Path, subset: str | None) -> dict[str, list[Path]]:
    """Return each split's files as `datasets` resolves them, unread."""
    import datasets
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import DataFilesNotFoundError

    logging.getLogger("huggingface_hub.repocard").setLevel(logging.ERROR)  # warns three times of a README without YAML
    named = str(folder.resolve())  # datasets takes the last part of a path for a name, which "." lacks
    try:
        names = datasets.get_dataset_config_names(named)
        chosen = subset or datasets.get_dataset_default_config_name(named)
        builder = datasets.load_dataset_builder(named, subset) if chosen in names else None
    except (EmptyDatasetError, DataFilesNotFoundError) as error:
        raise ValueError(f"{folder} holds no files that end in {', '.join(READERS)}") from error
    except Exception as error:  # such as a data card that is no YAML
        raise ValueError(f"{folder} is no data set: {first_line(error)}") from error
    if builder is None:
        raise ValueError(f"{folder} needs data.subset=NAME with one of {', '.join(names)}, got {subset or 'none'}")
    return {str(split): [Path(file) for file in files] for split, files in builder.config.data_files.items()}
