"""Run folders that are named for a verb."""

from collections.abc import Collection, Sequence
from pathlib import Path

from covey.run.folder import CONFIG, begun_at


def refuse_flags(others: Sequence[str], known: Collection[str]) -> None:
    """Refuse unknown flags. Raises ValueError with the known ones."""
    for word in others:
        if word.startswith("-"):
            raise ValueError(f'no flag "{word.partition("=")[0]}"; flags: {", ".join(known)}')


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
    runs = [] if (folder / CONFIG).is_file() else [path.parent for path in folder.glob(f"*/{CONFIG}")]
    return sorted(runs, key=lambda run: (begun_at(run), run)) or [folder]


def run_folder_of(verb: str, words: Sequence[str]) -> Path:
    """Return the single named run folder. ValueError for other words."""
    folder = one_run_folder(verb, words)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is no run folder: it has no {CONFIG}")
    return folder
