"""Sums, products and powers of written numbers, computed exactly."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from operator import add, mul, sub, truediv

from covey_graders.math.reading.normalize import CURRENCY

MAX_DIGITS = 100
MAX_POWER_BITS = 20_000
MAX_DEPTH = 20

_DIGITS = (
    r"\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d)(?:\.\d+)?"  # 1,230.50
    r"|\d{1,3}(?:\.\d{3})+,\d+"  # 1.230,50
    r"|\d{1,3}(?:[ '\u2019_]\d{3})+(?!\d)(?:\.\d+)?"  # 12 000
    r"|\d+\.\d+"
    r"|\d+,\d+"  # 42,5
    r"|\d+"
    r"|(?<![.\d])\.\d+"
)
_NUMBER = r"(?<![A-Za-z0-9_^])(?<!\d[.,:])(?:{})(?:[eE][+-]?\d{{1,3}}(?![A-Za-z0-9]))?(?![.,:]?\d)"
NUMBER_PROSE = re.compile(_NUMBER.format(_DIGITS))
NUMBER_STRICT = re.compile(_NUMBER.format(_DIGITS.replace(r"|\d+,\d+", "")))
NUMERAL = re.compile(r"(?<![A-Za-z0-9_^])(?<!\d[.,:])\.?\d(?:\d|[.,:](?=\d))*")
"""Looks like a number, readable or not: `10:30` and `1.2.3` are not."""
_MIXED = re.compile(r"[ -](\d{1,9})/(\d{1,9})(?![\d/])")
_FACTOR = re.compile(r" (?![-+ ])")
_EXPONENT = re.compile(r"\d{1,4}(?!\d)")


def to_fraction(written: str) -> Fraction | None:
    """Return a matched number's value, None if too long."""
    if len(written) > MAX_DIGITS:
        return None
    mantissa, _, exponent = written.lower().partition("e")
    if re.fullmatch(r"\d{1,3}(?:\.\d{3})+,\d+", mantissa):
        mantissa = mantissa.replace(".", "").replace(",", ".")
    elif re.fullmatch(r"\d+,\d+", mantissa) and not re.fullmatch(r"\d{1,3},\d{3}", mantissa):
        mantissa = mantissa.replace(",", ".")
    return Fraction(re.sub(r"[,\s'\u2019_]", "", mantissa)) * Fraction(10) ** int(exponent or 0)


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    """Compute base ** exponent where that is a fraction of bearable size."""
    if exponent.denominator != 1 or (base == 0 and exponent < 0):
        return None
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent.numerator) > MAX_POWER_BITS:
        return None
    return Fraction(base) ** exponent.numerator


_OPERATIONS: Mapping[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": add, "-": sub, "*": mul, "x": mul, "/": truediv
}  # fmt: skip


@dataclass
class ArithmeticReader:
    """Recursive descent over + - * / ^ and parentheses, longest prefix."""

    text: str
    position: int
    number: re.Pattern[str]
    depth: int = 0

    def take(self, characters: str) -> str:
        """Take the next of `characters`, skipping blanks and currency signs."""
        while self.position < len(self.text) and self.text[self.position] in " " + CURRENCY:
            self.position += 1
        found = self.text[self.position : self.position + 1]
        if not found or found not in characters:
            return ""
        self.position += 1
        return found

    def sum(self, least: int = 1) -> Fraction | None:
        """Read operands joined by operators of at least this precedence."""
        total = self.signed()
        while total is not None:
            before = self.position
            sign = self.take("+-*/x")
            strength = 1 if sign in "+-" else 2
            is_read = sign and strength >= least and (sign != "x" or _FACTOR.match(self.text, self.position))
            other = self.sum(strength + 1) if is_read else None
            if other is None or (sign == "/" and other == 0):
                self.position = before
                break
            total = _OPERATIONS[sign](total, other)
        return total

    def signed(self) -> Fraction | None:
        sign = self.take("+-")
        value = self.powered()
        return -value if value is not None and sign == "-" else value

    def powered(self) -> Fraction | None:
        base = self.atom()
        before = self.position
        if base is None or not self.take("^"):
            self.position = before
            return base
        exponent = self.exponent()
        return None if exponent is None else _power(base, exponent)

    def exponent(self) -> Fraction | None:
        sign = self.take("+-")
        digits = _EXPONENT.match(self.text, self.position)
        if digits is None:
            return self.atom() if not sign else None
        self.position = digits.end()
        return Fraction(int(f"{sign}{digits[0]}"))

    def atom(self) -> Fraction | None:
        """Read a bracket, or a number, which may be mixed."""
        before = self.position
        if self.take("("):
            self.depth += 1
            value = self.sum() if self.depth <= MAX_DEPTH else None
            self.depth -= 1
            if value is None or not self.take(")"):
                self.position = before
                return None
            return value
        number = self.number.match(self.text, self.position)
        value = to_fraction(number[0]) if number is not None else None
        if number is None or value is None:
            return None
        self.position = number.end()
        return self.mixed(value)

    def mixed(self, whole: Fraction) -> Fraction:
        """Read a mixed number: `3 1/2` is three and a half."""
        part = _MIXED.match(self.text, self.position)
        if part is None or whole.denominator != 1 or not 0 < int(part[1]) < int(part[2]):
            return whole
        self.position = part.end()
        return whole + Fraction(int(part[1]), int(part[2]))
