"""What stands around a number and says that it is not the value: `5 ft 3 in` is not 5, nor is `more than 5`.

And units of measurement: 5 m is not 5 cm, though the number is the same.
"""

import re

from covey.environments.math.normalize import plain

_ONES = "one|two|three|four|five|six|seven|eight|nine"
NO_VALUE_BEFORE = re.compile(
    r"[<>≤≥≠√±\\|]|\bnot\s*$|\b(?:more|less|fewer|greater|larger|smaller) than\s*$"
    rf"|\b(?:{_ONES}|ten|hundred|thousand) and\s*$",
    re.IGNORECASE,
)
NO_VALUE_AFTER = re.compile(
    r"\s*[\\π√^]|[eE][-+]?\d|\s*(?:[,;&]\s*)?(?:(?:and|or)\s+)?(?<=[\s,;&])[A-Za-z]\w?\s*=(?!=)"
    r"|\s*(?:plus|minus|times|(?:divided|multiplied) by|(?:more|less|fewer) than|(?<=[%t]) ?of)\s+[$(]*\.?\d"
    r"|\s?(?:feet|foot|ft|pounds?|lbs?|dollars?|years?|weeks?|days?|hours?|hrs?|h|minutes?|min|kg|km|m)"
    r"\s*\d[\d.]*\s?(?!times)[A-Za-z]"
    rf"|\s?h\s?\d|['\u2019\u2032]\s?\d|\s+and (?:a|{_ONES})[ -](?:half|third|quarter|fourth)"
    r"|(?:\.{2,3}|\u2026|\u2014|\s?(?:[~±≠]|\+/-)\s?)\d"  # a range
    r"|\s?[xyzinabe](?![A-Za-z]|\.[a-z]|\s+[A-Za-z])"  # a variable, not a word or unit
    r"|\s+(?:is|was)(?: (?:wrong|incorrect)| ?n[o'\u2019]t (?:right|correct))\b"
    r"|\s*[-+*]\s*\(*[a-z](?![A-Za-z])|\s*/\s*[a-fijkn-rt-z](?![A-Za-z])|\s*\)+\s*/\s*\("
)

_NAMES = (
    ("length", r"mm|millimet(?:er|re)s?", r"cm|centimet(?:er|re)s?", r"m|met(?:er|re)s?", r"km|kilomet(?:er|re)s?"),
    ("length", r"inch(?:es)?", r"ft|feet|foot", r"yd|yards?", r"mi|miles?"),
    ("mass", r"mg|milligrams?", r"g|grams?", r"kg|kilograms?", r"lbs?|pounds?", r"oz|ounces?", r"tons?"),
    ("time", r"s|secs?|seconds?", r"mins?|minutes?", r"h|hrs?|hours?", r"days?", r"weeks?", r"months?", r"years?"),
    ("volume", r"ml|millilit(?:er|re)s?", r"l|lit(?:er|re)s?", r"cups?", r"pints?", r"quarts?", r"gallons?"),
    ("money", r"cents?", r"dollars?"),
    ("angle", r"degrees?", r"rad|radians?"),
    ("half of the day", r"a\.?m", r"p\.?m"),
)
_UNITS = [(quantity, re.compile(name, re.IGNORECASE)) for quantity, *names in _NAMES for name in names]
_STATED = re.compile(
    r"[^A-Za-z\\]*\d[^A-Za-z\\]*(?:(?:square|cubic|sq|cu)\b[. ]*)?([A-Za-z]+(?:\.m\b)?)(?:\s*\^[ (]*\d[ )]*)?"
    r"(?:\s*(?:/|per\b)\s*[A-Za-z]+)?[^A-Za-z\d\\]*"
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
