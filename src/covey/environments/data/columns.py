"""Read columns of rows: nested, or as JSON text."""

import json
from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]

VERLS = "reward_model.ground_truth"
"""Column of the right answer in rows of verl."""


def value_in(row: Row, column: str) -> Any:
    """Return a column's value, by a path of dots, else None.

    >>> value_in({"reward_model": {"ground_truth": "9"}}, "reward_model.ground_truth")
    '9'
    """
    if column in row:
        return row[column]
    found: Any = row
    for name in column.split("."):
        found = from_json(found)
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def from_json(value: Any) -> Any:
    """Return the list or object of a JSON text, other values unchanged.

    >>> from_json("[{}]"), from_json("a list")
    ([{}], 'a list')
    """
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
