"""Table of every field of GRPOConfig, for the mapping and the docs."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from covey.system.lookup import read_table

_TABLE = {
    kind: {name: said for names, said in rows.items() for name in names.split()}
    for kind, rows in read_table(Path(__file__).with_name("fields.yaml")).items()
}
MAPPED: dict[str, str] = _TABLE["mapped"]
"""Field -> its translation."""
REFUSED: dict[str, str] = _TABLE["refused"]
"""Field -> why it is refused, by name, when it is set to another value than its default."""
GONE: dict[str, str] = _TABLE["gone"]
"""Field, or argument of the trainer, that older versions or the documents have -> its remedy."""
OWN = tuple(name for name, meaning in MAPPED.items() if meaning.startswith("not of TRL"))
"""Fields that TRL does not have."""


@contextmanager
def named_in_errors() -> Iterator[None]:
    """Add fields of GRPOConfig to ValueErrors that name covey's settings."""
    try:
        yield
    except ValueError as error:
        named = set(re.findall(r"[a-z_]+\.[a-z_0-9]+", str(error)))
        of_fields = {name: re.findall(r"`([a-z_]+\.[a-z_0-9]+)", meaning) for name, meaning in MAPPED.items()}
        found = [f"{name} for {one}" for name, settings in of_fields.items() for one in settings if one in named]
        if not found or type(error) is not ValueError:
            raise
        raise ValueError(f"{error} (in GRPOConfig: {', '.join(found)})") from error


def table() -> str:
    """Lay out the table of the docs, in alphabetical order."""
    rows = {**{name: MAPPED[name] for name in MAPPED}, **{name: f"refused: {REFUSED[name]}" for name in REFUSED}}
    return "\n".join(["| field | |", "|---|---|", *(f"| `{name}` | {rows[name]} |" for name in sorted(rows))])
