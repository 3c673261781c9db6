"""Tables beside the modules that use them, and ordered replacements."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Steps = tuple[tuple[re.Pattern[str], str], ...]
"""Patterns and what is written in their place, in order."""


def table_beside(module: str) -> dict[str, Any]:
    """Read the TOML file named like the module of this `__file__`."""
    return tomllib.loads(Path(module).with_suffix(".toml").read_text(encoding="utf-8"))


def steps(rows: Iterable[tuple[str, str]]) -> Steps:
    """Compile the patterns of a table."""
    return tuple((re.compile(pattern), replacement) for pattern, replacement in rows)


def substitute(text: str, replaced: Steps) -> str:
    """Replace every match of every pattern, in order."""
    for pattern, replacement in replaced:
        text = pattern.sub(replacement, text)
    return text
