"""Units of measurement behind a number: 5 m is not 5 cm, though the number is the same."""

import re

from covey.environments.math.normalize import plain

_NAMES = (
    ("length", r"mm|millimet(?:er|re)s?", r"cm|centimet(?:er|re)s?", r"m|met(?:er|re)s?", r"km|kilomet(?:er|re)s?"),
    ("length", r"inch(?:es)?", r"ft|feet|foot", r"yd|yards?", r"mi|miles?"),
    ("mass", r"mg|milligrams?", r"g|grams?", r"kg|kilograms?", r"lbs?|pounds?", r"oz|ounces?", r"tons?"),
    ("time", r"s|secs?|seconds?", r"mins?|minutes?", r"h|hrs?|hours?", r"days?", r"weeks?", r"months?", r"years?"),
    ("volume", r"ml|millilit(?:er|re)s?", r"l|lit(?:er|re)s?", r"cups?", r"pints?", r"quarts?", r"gallons?"),
    ("money", r"cents?", r"dollars?"),
    ("angle", r"degrees?", r"rad|radians?"),
)
_UNITS = [(quantity, re.compile(name, re.IGNORECASE)) for quantity, *names in _NAMES for name in names]
_STATED = re.compile(
    r"[^A-Za-z\\]*\d[^A-Za-z\\]*(?:(?:square|cubic|sq|cu)\b[. ]*)?([A-Za-z]+)(?:\s*\^[ (]*\d[ )]*)?[^A-Za-z\d\\]*"
)
"""A number, its unit and nothing else."""


def differ_in_unit(answer: str, gold: str) -> bool:
    """Check whether both are a number with a unit, and the units are two of the same quantity."""
    given, wanted = _unit(answer), _unit(gold)
    return given is not None and wanted is not None and given[0] == wanted[0] and given[1] != wanted[1]


def _unit(text: str) -> tuple[str, re.Pattern[str]] | None:
    stated = _STATED.fullmatch(plain(text[:MAX_LENGTH]))
    return None if stated is None else next((unit for unit in _UNITS if unit[1].fullmatch(stated[1])), None)


MAX_LENGTH = 100
"""Characters of a number with its unit."""
