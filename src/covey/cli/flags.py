"""Flags of verbs without settings, or beside them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RUNS, SWEEPS = Path("outputs"), Path("multirun")
"""Folders searched for "latest"."""
LATEST = "latest"


@dataclass(frozen=True, slots=True)
class EvaluationAsked:
    """The options of an evaluation beside its settings."""

    against: str = ""
    """The policy to compare with."""
    is_whole: bool = False
    """Whether all rows of the data are looked at: they were named for it."""
    has_number: bool = False
    """Whether it was said how many prompts are looked at."""


def split_flags(
    words: Sequence[str], with_value: Mapping[str, str], alone: Collection[str]
) -> tuple[list[str], dict[str, str]]:
    """Split words into others, in order, and these flags with their values.

    `with_value` says of each flag what it needs, as in "a value"; flags that stand alone have an empty value.
    ValueError for a flag without its value.

    >>> split_flags(["run", "--out=page.html", "--text"], {"--out": "a value"}, ["--text"])
    (['run'], {'--out': 'page.html', '--text': ''})
    """
    rest, others, given = list(words), [], {}
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if flag in with_value:
            if not equals and not rest:
                raise ValueError(f"{flag} needs {with_value[flag]}")
            given[flag] = value if equals else rest.pop(0)
        elif word in alone:
            given[word] = ""
        else:
            others.append(word)
    return others, given


def with_latest_run(words: Sequence[str], roots: Sequence[Path] = (RUNS, SWEEPS)) -> list[str]:
    """Replace "latest" by the run below `roots` that began last.

    It stays where it names a file or folder. ValueError where there is no run.
    """
    if LATEST not in words or Path(LATEST).exists():
        return list(words)
    from covey.run.folder import CONFIG, begun_at

    runs = [path.parent for root in roots for path in root.glob(f"**/{CONFIG}")]
    if not runs:
        places = " or ".join(map(str, roots))
        raise ValueError(
            f"{LATEST} is the run below {places} that was begun last, and there is none; name a run folder"
        )
    newest = str(max(runs, key=begun_at))
    return [newest if word == LATEST else word for word in words]
