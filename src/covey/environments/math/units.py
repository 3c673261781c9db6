"""What stands around a number and says that it is not the value: `5 ft 3 in` is not 5, nor is `more than 5`.

And what joins it to another value, as in `5 or 6`; and units of measurement: 5 m is not 5 cm, though the number is the
same.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from covey.environments.math.normalize import plain

_ONES = "one|two|three|four|five|six|seven|eight|nine"
NO_VALUE_BEFORE = re.compile(
    r"[<>≤≥≠√±\\|]|\b(?:not|never)\s*$|\b(?:more|less|fewer|greater|larger|smaller) than\s*$"
    rf"|\b(?:{_ONES}|ten|hundred|thousand) (?:and|or)\s*$",
    re.IGNORECASE,
)
NO_VALUE_AFTER = re.compile(
    r"\s*[\\π√^]|\.\\overline|[eE][-+]?\d|\s*(?:[,;&]\s*)?(?:(?:and|or)\s+)?(?<=[\s,;&])[A-Za-z]\w?\s*=(?!=)"
    r"|\s*(?:plus|minus|times|(?:divided|multiplied) by|(?:more|less|fewer) than|(?<=[%t]) ?of)\s+[$(]*\.?\d"
    r"|\s?(?:feet|foot|ft|pounds?|lbs?|dollars?|years?|weeks?|days?|hours?|hrs?|h|minutes?|min|kg|km|m)"
    r"\s*\d[\d.]*\s?(?!times)[A-Za-z]"
    rf"|\s?h\s?\d|['\u2019\u2032]\s?\d|\s+and (?:a|{_ONES})[ -](?:half|third|quarter|fourth)"
    r"|(?:\.{2,3}|\u2026|\u2014|\s?(?:[~±≠]|\+/-)\s?)\d"  # a range
    r"|\s?[xyzinabe](?![A-Za-z]|\.[a-z]|\s+[A-Za-z])"  # a variable, not a word or unit
    r"|\s+(?:is|was)(?: (?:wrong|incorrect)| ?n[o'\u2019]t (?:right|correct))\b"
    r"|\s*[-+*]\s*\(*[a-z](?![A-Za-z])|\s*/\s*[a-fijkn-rt-z](?![A-Za-z])|\s*\)+\s*/\s*\("
)

_DATE = re.compile(r"(?<![\d/])\d{1,4}/\d{1,2}/\d{1,4}(?![\d/])")
OR = "or|oder|ou|o|eller|lub|albo|czy|nebo|sau|vagy|tai|veya|atau|hoặc|ya|या|или|або|ή|או|أو|或|或者|または|か|또는"
"""In other languages too, but for the Dutch "of"."""
DOUBT = "maybe|perhaps|possibly"
_BUT = "although|though|but|however|yet|and|or|unless|which|or else"
_IT = "it|this|that|(?:the )?(?:(?:right|correct|true|final) )?(?:answer|value|result|number|total)"
_MAY_BE = "(?:might|may|could)(?: (?:also|well|even|possibly|equally|instead|just|perhaps|as)){0,4} be"
CONCESSION = "|".join(
    (
        rf"(?i:(?:(?:{_BUT}),? )?(?:(?:{_IT}) )?{_MAY_BE}\b",  # although it might be
        r"(?:(?:but|or|perhaps|maybe|and) )?if not\b|(?:unless|although|though) (?:it is|it's)\b|or (?:is|was) it\b",
        r"(?:(?:no|oh|hmm),? )?(?:wait|sorry|scratch that|correction|i mean)\b[,.:!]?(?: (?:it|that)(?: is|'s)\b)?",
        rf"(?:{_BUT})\b(?= [$(\\]{{0,4}}-?[\d.,/]{{1,40}}[$)\\]{{0,4}} is "  # although 4 is
        r"(?:also |equally |just as )?(?:possible|likely|plausible)\b))",
    )
)
"""Before a second value: `3, although it might be 4`, `3, no wait, 4`."""

_SYSTEMS = (
    ("length", {r"mm|millimet(?:er|re)s?": 1, r"cm|centimet(?:er|re)s?": 10, r"m|met(?:er|re)s?": 1000,
                r"km|kilomet(?:er|re)s?": 1_000_000}),
    ("length", {r"inch(?:es)?": 1, r"ft|feet|foot": 12, r"yd|yards?": 36, r"mi|miles?": 63_360}),
    ("mass", {r"mg|milligrams?": 1, r"g|grams?": 1000, r"kg|kilograms?": 1_000_000}),
    ("mass", {r"oz|ounces?": 1, r"lbs?|pounds?": 16}),
    ("mass", {r"tons?": 1}),
    ("time", {r"s|secs?|seconds?": 1, r"mins?|minutes?": 60, r"h|hrs?|hours?": 3600, r"days?": 86_400,
              r"weeks?": 604_800}),
    ("time", {r"months?": 1, r"years?": 12}),
    ("volume", {r"ml|millilit(?:er|re)s?": 1, r"l|lit(?:er|re)s?": 1000}),
    ("volume", {r"cups?": 1, r"pints?": 2, r"quarts?": 4, r"gallons?": 16}),
    ("money", {r"cents?": 1, r"dollars?": 100}),
    ("angle", {r"degrees?": 1}),
    ("angle", {r"rad|radians?": 1}),
    ("half of the day", {r"a\.?m": 1}),
    ("half of the day", {r"p\.?m": 1}),
)  # fmt: skip
"""Quantity, and its units that are multiples of one another: name to size."""


@dataclass(frozen=True, slots=True)
class _Unit:
    quantity: str
    system: int
    name: re.Pattern[str]
    size: int


_UNITS = [
    _Unit(quantity, system, re.compile(name, re.IGNORECASE), size)
    for system, (quantity, units) in enumerate(_SYSTEMS)
    for name, size in units.items()
]
_STATED = re.compile(
    r"[^A-Za-z\\]*\d[^A-Za-z\\]*(?:(?:square|cubic|sq|cu)\b[. ]*)?([A-Za-z]+(?:\.m\b)?)(?:\s*\^[ (]*\d[ )]*)?"
    r"(?:\s*(?:/|per\b)\s*[A-Za-z]+)?[^A-Za-z\d\\]*"
)
"""A number, its unit and nothing else."""


def is_date(text: str) -> bool:
    """Check for 10/12/2020 and the like, which is no quotient."""
    return _DATE.search(text) is not None


def differ_in_unit(answer: str, gold: str) -> bool:
    """Check whether both are a number with a unit, and the units are two of the same quantity."""
    given, wanted = _unit(answer), _unit(gold)
    return given is not None and wanted is not None and given.quantity == wanted.quantity and given != wanted


def measures_of(text: str) -> set[tuple[Fraction, _Unit | str]]:
    """Return the numbers of `3 hours and 20 minutes` with their units. Empty where there is anything else."""
    stated = plain(text[:MAX_LENGTH]).lower()
    found = _MEASURE.findall(stated) if _MEASURES.fullmatch(stated) else []
    return {(Fraction(number.replace(",", "")), _named(word) or word.rstrip("s")) for number, word in found}


def conversions(text: str, other: str) -> set[Fraction]:
    """Return what the number of `other` may be multiplied by for that of `text`, which need not name its unit.

    Empty where `other` has no unit that is known.
    """
    given, restated = _unit(text), _unit(other)
    if restated is None:
        return set()
    units = [unit for unit in _UNITS if unit.system == restated.system and given in (None, unit)]
    return {Fraction(restated.size, unit.size) for unit in units}


def _unit(text: str) -> _Unit | None:
    stated = _STATED.fullmatch(plain(text[:MAX_LENGTH]))
    if stated is None:
        return _named("dollars") if text.startswith("\\$") else None
    return _named(stated[1])


def _named(word: str) -> _Unit | None:
    return next((unit for unit in _UNITS if unit.name.fullmatch(word)), None)


_MEASURE = re.compile(r"(\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?)\s*([a-z]{2,})\b[.,\s]*(?:and\b\s*)?")
_MEASURES = re.compile(rf"\s*(?:{_MEASURE.pattern})+")
MAX_LENGTH = 100
"""Characters of a number with its unit."""
