"""Read numbers exactly: 1,230 is 1230, 3\\times 10^8 is 300000000.

Pure functions on short strings: exact rational arithmetic, text is never evaluated as code, exponents, digits and
nesting are bounded, and every pattern has one way to match, so that time is linear in the length of the text.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, product

from covey_graders.math.reading.arithmetic import NUMBER_PROSE, NUMBER_STRICT, NUMERAL, ArithmeticReader, to_fraction
from covey_graders.math.reading.hedges import HEDGES, PIECES
from covey_graders.math.reading.normalize import CURRENCY, plain
from covey_graders.math.reading.spelled import in_digits, with_parts
from covey_graders.math.reading.units import is_date, named
from covey_graders.tables import patterns_beside


@dataclass(frozen=True, slots=True)
class Reading:
    """A number with the multiplier word behind it: `25%`, `2.5 million`.

    The word may be left out on one side, as if it were a unit; where both have one, what they come to decides.
    """

    bare: Fraction | None
    """None where nothing can be read, or something is left to compute."""
    scale: Fraction = Fraction(1)
    slack: Fraction = Fraction(0)
    """Relative error allowed to a float."""

    def meanings(self, is_scaled: bool = False) -> set[Fraction]:
        if self.bare is None:
            return set()
        return {self.bare * self.scale} if is_scaled else {self.bare, self.bare * self.scale}

    def agrees(self, gold: "Reading", factor: Fraction = Fraction(1)) -> bool:
        """Return True for the gold's value, with its unit converted by `factor`."""
        are_scaled = 1 not in (self.scale, gold.scale)
        pairs = product(self.meanings(are_scaled), gold.meanings(are_scaled))
        return any(abs(one * factor - other) <= gold.slack * abs(other) for one, other in pairs)


_RE = patterns_beside(__file__, PIECES)
MAX_CONTENT = 400
"""Longest text that is read as one value, in characters."""
MAX_ENDING = 2000
"""Characters at a text's end that are searched for its last number."""
MAX_WORDS_AFTER_LIST = 2

NOTHING = Reading(None)


@dataclass(frozen=True, slots=True)
class _Value:
    reading: Reading
    begin: int
    end: int
    is_numeral: bool
    """Whether it is written with nothing left to compute."""


def _is_variable(text: str, end: int, is_numeral: bool) -> bool:
    """Return True for letters behind a number that are no unit: `19xyz`."""
    glued = _RE["glued"].match(text, end)
    return glued is not None and not (
        is_numeral and (glued[glued.lastindex or 0] in _NO_VARIABLE or named(glued[glued.lastindex or 0]))
    )


def _is_numeral(written: str) -> bool:
    """Return True for digits, a reduced fraction, or a power of ten."""
    found = _RE["written"].fullmatch(written)
    if found is None or _RE["signed"].search(written):
        return False
    if found["bottom"] or found["whole"]:
        top, bottom = (int((found[a] or found[b]).replace(",", "")) for a, b in (("top", "part"), ("bottom", "whole")))
        return math.gcd(top, bottom) == 1 and (found["top"] is not None or top < bottom)
    return True


_SCALES = {
    "ten": Fraction(10), "dozen": Fraction(12), "hundred": Fraction(100), "thousand": Fraction(10**3),
    "k": Fraction(10**3), "million": Fraction(10**6), "billion": Fraction(10**9), "trillion": Fraction(10**12),
    "tenth": Fraction(1, 10), "hundredth": Fraction(1, 100), "thousandth": Fraction(1, 1000),
}  # fmt: skip
_SCALE = re.compile(rf" {{0,3}}({'|'.join(_SCALES)}|(?-i:M))s?\b", re.IGNORECASE)
_NO_VARIABLE = frozenset(
    ["am", "pm", "th", "st", "nd", "rd", "k", "K", "M", "of", "or", "sq", "cu", "mL", "yr", "wk", "C", "F"]
)
_REMARKS = (_RE["conceded"], _RE["in_brackets"], _RE["next_member"])
"""Patterns that join a further value, unless it begins a remark."""


def _value_at(text: str, begin: int, number: re.Pattern[str]) -> _Value | None:
    """Return the value written at `begin`, the last of equalities."""
    arithmetic = ArithmeticReader(text, begin, number)
    value = arithmetic.sum()
    if value is None:
        return None
    # After "=" the later value counts, as long as there is one
    equals = _RE["equals"].match(text, arithmetic.position)
    if equals is not None and not _RE["reason"].search(equals[0]):
        later = _value_at(text, equals.end(), number)
        if later is not None:
            return _Value(later.reading, begin, later.end, later.is_numeral)
    return _with_suffix(text, value, begin, arithmetic.position)


def _with_suffix(text: str, value: Fraction, begin: int, end: int) -> _Value:
    is_numeral = _is_numeral(text[begin:end])
    percent = _RE["percent"].match(text, end)
    if percent is not None:
        return _Value(Reading(value, Fraction(1, 100)), begin, percent.end(), is_numeral)
    factor = Fraction(1)
    while (scale := _SCALE.match(text, end)) is not None and (is_numeral or len(scale[1]) > 1):
        factor, end = factor * _SCALES.get(scale[1].lower(), _SCALES["million"]), scale.end()
    return _Value(Reading(value, factor), begin, end, is_numeral)


def _first_value(text: str, number: re.Pattern[str]) -> _Value | None:
    """Return the first numeral's value with its signs and parentheses."""
    for start in _RE["start"].finditer(text):
        opened = start.end() - len(start[0].lstrip("( "))
        value = _value_at(text, start.start(), number) or _value_at(text, opened, number)
        if value is not None or NUMERAL.match(text, start.end()):
            return value
    return None


def _alternatives(text: str, end: int, number: re.Pattern[str]) -> list[_Value]:
    """Return values listed after the first: `40 or 41`, `42, 43`."""
    found: list[tuple[_Value, bool]] = []
    while len(found) < 50:
        either = _RE["alternative"].match(text, end)
        blanks = _RE["blanks"].match(text, end) if _RE["more_numbers"].fullmatch(text, end) else None
        remark = next(filter(None, (pattern.match(text, end) for pattern in _REMARKS)), None)
        separator = either or remark or blanks
        value = _value_at(text, separator.end(), number) if separator is not None else None
        if value is None:
            break
        found.append((value, either is not None or blanks is not None))
        end = value.end
    # Words behind a number say that it was the beginning of a remark
    while found and not found[-1][1] and len(text[found[-1][0].end :].split()) > MAX_WORDS_AFTER_LIST:
        found.pop()
    return [value for value, _ in found]


def range_of(text: str) -> tuple[Fraction, Fraction] | None:
    """Return the ends of a range such as `3 to 4`, else None."""
    found = _RE["range"].fullmatch(plain(text[:MAX_CONTENT]))
    low, high = map(to_fraction, found.groups()) if found is not None else (None, None)
    return (low, high) if low is not None and high is not None and low < high else None


def read_values(content: str, strict: bool = False, computed: bool = False) -> list[Reading]:
    """Return the value or list that `content` states.

    Args:
        strict: the text must be one value (or list) and nothing else but a name before it (`x =`) and a unit after it,
            and a comma is never a decimal comma. For boxes and reference answers.
        computed: a value that is no numeral, such as `12+7` and `84/2`, has no reading.
    """
    text = in_digits(plain(content[:MAX_CONTENT]).strip(" \n*_`\"'"))
    number = NUMBER_STRICT if strict else NUMBER_PROSE
    first = None if is_date(text) else _first_value(text, number)
    if first is None or HEDGES["no_value_before"].search(text, 0, first.begin):
        return []
    values = [first, *_alternatives(text, first.end, number)]
    end = values[-1].end
    if HEDGES["no_value_after"].match(text, end):
        return []
    if (strict or "\\" in content) and not _RE["strict_before"].fullmatch(text, 0, first.begin):
        return []
    if strict and (not _RE["strict_after"].fullmatch(text, end) or _is_variable(text, end, values[-1].is_numeral)):
        return []
    return [value.reading if value.is_numeral or not computed else NOTHING for value in values]


_JOINERS = frozenset({"", ",", ";", "/", "or", "and", "&", ", or", ", and"})


def read_last(text: str, computed: bool = False) -> list[Reading]:
    """Return a text's last number, or its final list.

    Args:
        computed: as for `read_values`.
    """
    text = with_parts(plain(text[-MAX_ENDING:]))
    numerals = list(NUMERAL.finditer(text))
    numbers = list(NUMBER_PROSE.finditer(text))
    if not numbers or numerals[-1].start() >= numbers[-1].end():
        return []
    first = _first_operand(text, numbers)
    begin = numbers[first].start()
    sign = -1 if _RE["sign_before"].search(text[max(0, begin - 8) : begin]) else 1
    opening = begin - len(text[:begin]) + len(text[:begin].rstrip("("))
    arithmetic = ArithmeticReader(text, opening, NUMBER_PROSE)
    value = arithmetic.sum()
    if value is None:
        arithmetic.position = begin
        value = arithmetic.sum()
    before = text[max(0, begin - 30) : begin].rstrip()
    if (
        value is None
        or before.endswith(("±", "\\pm"))
        or HEDGES["denied"].search(before)
        or HEDGES["denied_after"].match(text, arithmetic.position)
    ):
        return []
    last = _with_suffix(text, sign * value, begin, arithmetic.position)
    reading = last.reading if last.is_numeral or not computed else NOTHING
    return [*_listed_before(text, numbers[: first + 1]), reading]


def _first_operand(text: str, numbers: list[re.Match[str]]) -> int:
    """Return the index of the number that the last one belongs to."""
    gaps = [text[a.end() : b.start()] for a, b in pairwise(numbers)]
    last = len(numbers) - 1
    if not gaps:
        return last
    is_power_of_ten = numbers[-1][0] == "10" and text.startswith("^", numbers[-1].end())
    if gaps[-1] in {"/", ")/("}:
        is_mixed = len(gaps) > 1 and gaps[-2] == " " and numbers[-3][0].isdigit()
        return last - 2 if is_mixed else last - 1
    return last - 1 if is_power_of_ten and gaps[-1].strip() in {"x", "*"} else last


def _listed_before(text: str, numbers: list[re.Match[str]]) -> list[Reading]:
    """Return the values listed right before the last number."""
    listed: list[Reading] = []
    says_or = False
    for earlier, later in zip(numbers[-2::-1], numbers[:0:-1], strict=True):
        gap = text[earlier.end() : later.start()].rstrip(f"{CURRENCY}*_ ").split()
        is_or = len(gap) <= 3 and gap[-1:] != [] and re.fullmatch(PIECES["or"], gap[-1]) is not None
        if not is_or and " ".join(gap) not in _JOINERS:
            break
        says_or = says_or or is_or
        listed.append(Reading(to_fraction(earlier[0])))
    return listed if says_or or len(listed) >= 2 else []
