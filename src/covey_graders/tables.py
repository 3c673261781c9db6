"""Tables beside the modules that use them, and ordered replacements."""

import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

Steps = tuple[tuple[re.Pattern[str], str], ...]
"""Patterns and their replacements, in order."""


@cache
def table_beside(module: str) -> Mapping[str, Any]:
    """Read the TOML file named like the module of this `__file__`, once."""
    return tomllib.loads(Path(module).with_suffix(".toml").read_text(encoding="utf-8"))


def pieces_beside(module: str, pieces: Mapping[str, str] | None = None) -> dict[str, str]:
    """Read parts of patterns, after the given ones; `<<name>>` is an earlier part."""
    found = dict(pieces or {})
    for name, lines in table_beside(module).get("pieces", {}).items():
        found[name] = _fill("".join(lines), found)
    return found


def patterns_beside(module: str, pieces: Mapping[str, str] | None = None) -> dict[str, re.Pattern[str]]:
    """Compile the patterns of a table; `<<name>>` is a part."""
    parts = pieces_beside(module, pieces)
    return {name: re.compile(_fill("".join(lines), parts)) for name, lines in table_beside(module)["patterns"].items()}


def _fill(text: str, pieces: Mapping[str, str]) -> str:
    return re.sub("<<([a-z_]+)>>", lambda name: pieces[name[1]], text)


def steps(rows: Iterable[tuple[str, str]]) -> Steps:
    """Compile the patterns of a table."""
    return tuple((re.compile(pattern), replacement) for pattern, replacement in rows)


def substitute(text: str, replaced: Steps) -> str:
    """Replace every match of every pattern, in order."""
    for pattern, replacement in replaced:
        text = pattern.sub(replacement, text)
    return text
