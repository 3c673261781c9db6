"""Modules of a user whose file was written anew since it was imported: a notebook trains on what the file says now."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass
class Met:
    """A module, as covey knows it."""

    text: str
    """Of its file, when covey first met it or imported it anew. Python keeps none."""
    is_anew: bool = False


MET: dict[str, Met] = {}


def meet(module: ModuleType) -> None:
    """Remember what the file of a module says."""
    if module.__name__ not in MET and (text := _text_of(module)) is not None:
        MET[module.__name__] = Met(text)


def changed() -> Iterator[tuple[ModuleType, Met]]:
    """Yield modules whose files say something else now, with that text."""
    for name, met in list(MET.items()):
        module = sys.modules.get(name)
        now = None if module is None else _text_of(module)
        if module is not None and now is not None and now != met.text:
            yield module, Met(now, is_anew=True)


def is_anew(name: str) -> bool:
    """Tell whether objects of a module may be those of an older text."""
    return name in MET and MET[name].is_anew


def _text_of(module: ModuleType) -> str | None:
    file = vars(module).get("__file__")
    try:
        return Path(str(file)).read_text(encoding="utf-8") if str(file).endswith(".py") else None
    except (OSError, UnicodeDecodeError):
        return None
