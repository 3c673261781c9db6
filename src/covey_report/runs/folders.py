"""Run folders that are named for a verb."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from covey.cli.flags import split_flags
from covey.run.folder import CONFIG, begun_at

Default = TypeVar("Default", int, None)


def read_flags(
    words: Sequence[str], with_value: Mapping[str, str], alone: Collection[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Split words as `split_flags`. ValueError for unknown flags, too."""
    others, given = split_flags(words, with_value, alone)
    for word in others:
        if word.startswith("-"):
            raise ValueError(f'no flag "{word.partition("=")[0]}"; flags: {", ".join((*with_value, *alone))}')
    return others, given


def whole_number(given: Mapping[str, str], flag: str, default: Default, least: int = 0) -> int | Default:
    """Return a flag's number. ValueError for another or a lower one."""
    if flag not in given:
        return default
    if not given[flag].isdecimal() or int(given[flag]) < least:
        raise ValueError(f"{flag} must be a whole number >= {least}, got {given[flag]}")
    return int(given[flag])


def run_folders(verb: str, words: Sequence[str]) -> list[Path]:
    """Return the named run folders, a sweep's expanded. ValueError without any."""
    if not words:
        raise ValueError(f"covey {verb} needs a run folder, such as covey {verb} outputs/DATE/TIME")
    return [run for word in words for run in _runs_of(Path(word))]


def one_run_folder(verb: str, words: Sequence[str]) -> Path:
    """Return the named folder. ValueError for none, several, or a flag."""
    folders = run_folders(verb, words)
    if len(folders) != 1 or words[0].startswith("-"):
        raise ValueError(f"covey {verb} takes one run folder, got {' '.join(map(str, folders))}")
    return folders[0]


def _runs_of(folder: Path) -> list[Path]:
    if not folder.exists() and not folder.name.startswith("-"):
        raise ValueError(f"there is no folder {folder}")
    runs = [] if (folder / CONFIG).is_file() else [path.parent for path in folder.glob(f"*/{CONFIG}")]
    return sorted(runs, key=lambda run: (begun_at(run), run)) or [folder]


def run_folder_of(verb: str, words: Sequence[str]) -> Path:
    """Return the single named run folder. ValueError for other words."""
    folder = one_run_folder(verb, words)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is no run folder: it has no {CONFIG}")
    return folder
