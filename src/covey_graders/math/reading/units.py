"""Units of measurement: 5 m is 500 cm, and neither 5 cm nor 5 s."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from covey_graders.math.reading.hedges import PIECES
from covey_graders.math.reading.normalize import plain
from covey_graders.tables import patterns_beside, steps, substitute, table_beside

_RE = patterns_beside(__file__, PIECES)
_DEGREES, _FEET = (steps(table_beside(__file__)[name]) for name in ("degrees", "feet"))


@dataclass(frozen=True, slots=True)
class Unit:
    """A quantity as exponents of base quantities, with its size.

    >>> unit_of("5 km/h")
    Unit(quantity=(('length', 1), ('time', -1)), size=Fraction(5, 18))
    """

    quantity: tuple[tuple[str, int], ...]
    size: Fraction


def is_date(text: str) -> bool:
    """Check for 10/12/2020 and the like, which is no quotient."""
    return _RE["date"].search(text) is not None


def unit_of(text: str, shortest: int = 1) -> Unit | None:
    """Return the single unit or currency of a number, else None.

    Args:
        shortest: symbols of fewer letters are letters of a formula.
    """
    stated = substitute(plain(text[:MAX_LENGTH]).rpartition("=")[2], _DEGREES)
    found = [
        unit
        for place in _RE["behind"].finditer(stated)
        if (unit := _unit_at(stated, place.end(), shortest)) is not None
    ]
    sign = _RE["currency_sign"].search(stated)
    if len(found) > 1 or not (found or sign):
        return None
    quantity = found[0].quantity if found else ()
    size = found[0].size if found else Fraction(1)
    is_new = sign is not None and MONEY.isdisjoint(dict(quantity))
    return Unit(((sign[1], 1), *quantity), size) if sign is not None and is_new else Unit(quantity, size)


def without_unit(text: str) -> str:
    """Return a formula less a unit in a text command."""
    return _RE["text_unit"].sub("", text) if "\\" in text and unit_of(text) is not None else text


def differ_in_unit(answer: Unit | None, gold: Unit | None) -> bool:
    """Return True for different quantities; money may be per hour."""
    if answer is None or gold is None or answer.quantity == gold.quantity:
        return False
    ones, others = dict(answer.quantity), dict(gold.quantity)
    if "deg" in ones.keys() | others.keys() and not TEMPERATURES.isdisjoint(ones.keys() | others.keys()):
        return False
    shared = ones.keys() & others.keys() & MONEY
    return not (shared and min(len(ones), len(others)) == 1)


def conversion(answer: Unit | None, gold: Unit | None) -> Fraction:
    """Return the factor from the answer's unit to the gold's."""
    known = answer is not None and gold is not None
    return answer.size / gold.size if answer is not None and gold is not None and known else Fraction(1)


def measures_of(text: str) -> set[tuple[Fraction, Unit | str]]:
    """Return the numbers of `3 hours and 20 minutes` with units."""
    stated = plain(substitute(text[:MAX_LENGTH], _FEET)).lower()
    found = _MEASURE.findall(stated) if _MEASURES.fullmatch(stated) else []
    if any(len(word) == 1 and named(word) is None for _, word in found):
        return set()
    return {(Fraction(number.replace(",", "")), named(word) or word.rstrip("s")) for number, word in found}


def total_of(measures: set[tuple[Fraction, Unit | str]]) -> tuple[object, Fraction] | None:
    """Return the total of measures: 3 hours and 20 minutes are 200 minutes."""
    units = [unit for _, unit in measures if isinstance(unit, Unit)]
    if len(units) < len(measures) or len({unit.quantity for unit in units}) != 1:
        return None
    return units[0].quantity, sum((n * u.size for n, u in measures if isinstance(u, Unit)), Fraction(0))


def same_time(text: str, other: str) -> bool:
    """Return True for one time of day: 2:30 PM is 14:30."""
    (ours, is_named), (theirs, is_other_named) = _clock(text), _clock(other)
    return not ours.isdisjoint(theirs) if is_named or is_other_named else ours == theirs != set()


def _clock(text: str) -> tuple[set[int], bool]:
    """Return minutes after midnight, and whether "am" or "pm" is named."""
    found = _RE["clock"].fullmatch(" ".join(plain(text[:MAX_LENGTH]).lower().split()).strip("$ ."))
    if found is None or not (found["minute"] or found["half"] or found["word"]):
        return set(), False
    if found["word"]:
        return {720 * (found["word"] == "noon")}, True
    hour, half = int(found["hour"]), found["half"]
    minutes = 60 * (hour % 12) + int(found["minute"] or 0)
    halves = {half == "p"} if half else {False, True} if 0 < hour <= 12 else {12 <= hour < 24}
    return {minutes + 720 * is_late for is_late in halves} if hour <= 24 else set(), half is not None


def conversions(text: str, other: str) -> set[Fraction]:
    """Return possible factors from `other`'s unit to that of `text`.

    Empty where `other` has no unit that is known.
    """
    given, restated = unit_of(text), unit_of(other)
    if restated is None:
        return set()
    units = [unit for unit in _table().values() if unit.quantity == restated.quantity and given in (None, unit)]
    return {restated.size / unit.size for unit in units}


def _unit_at(text: str, position: int, shortest: int) -> Unit | None:
    """Return the product of the units at a place."""
    exponents, size = dict[str, int](), Fraction(1)
    for term in _terms(text, position):
        unit = named(term["name"])
        is_inch = term["name"] == "in" and _RE["word_next"].match(text, term.end()) is not None  # 5 in total
        if unit is None or len(term["name"]) < shortest or is_inch:
            break
        power = int(term["power"] or term["digit"] or _POWERS.get(term["before"] or term["after"] or "", 1))
        power = -power if term["per"] in {"/", "per"} else power
        size *= unit.size**power
        for quantity, exponent in unit.quantity:
            exponents[quantity] = exponents.get(quantity, 0) + power * exponent
    return Unit(tuple(sorted(exponents.items())), size) if exponents else None


def _terms(text: str, position: int) -> Iterator[re.Match[str]]:
    while (term := _RE["term"].match(text, position)) is not None:
        yield term
        position = term.end()


def named(word: str) -> Unit | None:
    """Return the unit of a name or symbol, in the plural too."""
    lower = word.lower()
    names = (word, *(name for name in (lower, lower.removesuffix("s")) if len(name) > 1))
    return next((unit for name in names if (unit := _table().get(name)) is not None), None)


@cache
def _table() -> dict[str, Unit]:
    """Return all units by names and symbols, with prefixes."""
    found: dict[str, Unit] = {}
    table = table_beside(__file__)
    for line in table["units"].strip().split("\n"):
        quantity, _, units = line.partition(": ")
        for names, size, *prefixes in map(str.split, units.split(", ")):
            kinds = names.rpartition("|")[2] if quantity == "itself" else quantity
            exponents = tuple((kind, int(power or 1)) for kind, power in _RE["exponents"].findall(kinds))
            for name in names.split("|"):
                for prefix, factor in _prefixes(name, table["prefixes"] if prefixes else ""):
                    found[f"{prefix}{name}"] = Unit(exponents, Fraction(size) * factor)
    return found


def _prefixes(name: str, prefixes: str) -> Iterator[tuple[str, Fraction]]:
    """Yield a name's prefixes: nothing, or `k` and `kilo`."""
    yield "", Fraction(1)
    for prefix, factor in map(str.split, filter(None, prefixes.split(", "))):
        short, long = prefix.split("|")
        yield short if len(name) < LONG else long, Fraction(factor)


LONG = 3
"""Letters of a name that takes `kilo`, where a symbol takes `k`."""
TEMPERATURES = frozenset({"celsius", "fahrenheit", "kelvin"})
MONEY = frozenset("$€£¥₹₩₽₺₫฿")
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_MEASURE = re.compile(r"(\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?)\s*([a-z]+)\b[.,\s]*(?:and\b\s*)?")
_MEASURES = re.compile(rf"\s*(?:{_MEASURE.pattern})+")
MAX_LENGTH = 100
"""Characters of a number with its unit."""
