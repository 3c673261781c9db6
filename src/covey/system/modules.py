"""Find modules whose files changed after their import."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

MET: dict[str, str] = {}
"""Source of each user module at its last import, which Python does not keep."""
ANEW: set[str] = set()
"""Reloaded modules: objects of theirs may come from an older source."""


def meet(module: ModuleType) -> None:
    """Remember what the file of a module says."""
    if module.__name__ not in MET and (text := _text_of(module)) is not None:
        MET[module.__name__] = text


def find_changed() -> Iterator[tuple[ModuleType, str]]:
    """Yield modules whose files say something else now, with that text."""
    for name, text in list(MET.items()):
        module = sys.modules.get(name)
        now = None if module is None else _text_of(module)
        if module is not None and now is not None and now != text:
            yield module, now


def _text_of(module: ModuleType) -> str | None:
    file = vars(module).get("__file__")
    try:
        return Path(str(file)).read_text(encoding="utf-8") if str(file).endswith(".py") else None
    except (OSError, UnicodeDecodeError):
        return None
