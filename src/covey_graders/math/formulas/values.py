"""The value of a formula, exact if rational, else to any precision.

Two values are equal unless they are seen to differ: computed to 60 and to 120 digits, a difference that is there stays
the same, and one that comes of rounding shrinks. So nothing counts that is smaller than 10^-60 of the largest term.
"""

import math
import random
from collections.abc import Callable, Mapping
from decimal import Context, Decimal, DivisionByZero, InvalidOperation, Overflow, getcontext, localcontext
from fractions import Fraction
from functools import lru_cache, partial, reduce
from operator import add, mul, truediv
from typing import Any

from covey_graders.math.formulas.nodes import (
    FunctionCall,
    Node,
    Number,
    Power,
    Product,
    Quotient,
    Root,
    Sum,
    Symbol,
    is_numeric,
    walk,
)
from covey_graders.math.formulas.words import BINOMIALS, GREEK

Value = Fraction | Decimal
Parts = tuple[Value, Value]
"""Real and imaginary part of a complex number."""
IMAGINARY = Symbol("i")
DEGREE = Symbol("text:degree")

DIGITS = 60
NUM_POINTS = 5
"""Places at which formulas of letters are compared: two of positive numbers, one of negative ones, two of both."""
LARGE = -1
"""A place with whole numbers of 31 digits."""
WHOLE = range(NUM_POINTS, 2 * NUM_POINTS)
"""Places with whole numbers, for factorials and signs such as `(-1)^n`."""
MAX_BITS = 8_000
"""Maximum bits of a numerator or denominator kept exactly; larger ones are rounded."""
MAX_FACTORIAL = 3_000
MAX_INDEX = 100
"""Largest index of a root, and largest power of a complex number."""
MAX_WHOLE = 10**30


def equal_values(first: Node, second: Node) -> bool:
    """Compare two formulas at points drawn from their letters."""
    is_number = is_numeric(first) and is_numeric(second)
    for points in (range(1),) if is_number else (range(NUM_POINTS), WHOLE):
        verdicts = [equal_at((first, point), (second, point)) for point in points]
        if False in verdicts or None not in verdicts:
            return False not in verdicts
    return False


def equal_at(first: tuple[Node, int], second: tuple[Node, int]) -> bool | None:
    """Compare two formulas' values at their points, None without values."""
    gaps: list[list[Decimal]] = []
    for digits in (DIGITS, 2 * DIGITS):
        ones, others = _parts_at(*first, digits), _parts_at(*second, digits)
        if ones is None or others is None:
            return None
        if all(isinstance(part, Fraction) for part in (*ones, *others)):
            return ones == others
        with localcontext(_context(digits)):
            gaps.append([_decimal(one) - _decimal(other) for one, other in zip(ones, others, strict=True)])
    with localcontext(_context(DIGITS)):
        return all(abs(late - early) >= abs(late) / 2 for early, late in zip(*gaps, strict=True))


def value_at(node: Node, point: int = 0, digits: int = DIGITS) -> Value | None:
    """Return the value at a point, None if not real or too large."""
    parts = _parts_at(node, point, digits)
    return parts[0] if parts is not None and parts[1] == 0 else None


def _parts_at(node: Node, point: int, digits: int) -> Parts | None:
    with localcontext(_context(digits)):
        try:
            parts = _parts(node, point)
        except (ArithmeticError, ValueError):
            return None
    return parts if all(isinstance(part, Fraction) or part.is_finite() for part in parts) else None


def share_a_factor(first: Node, second: Node) -> bool:
    """Return True if two polynomials share a factor with a letter.

    At large whole numbers such a factor is a large common divisor, and others are small.
    """
    values = [value_at(node, LARGE) for node in (first, second)]
    common = math.gcd(*(value.numerator if isinstance(value, Fraction) else 1 for value in values))
    return None not in values and not is_numeric(first) and not is_numeric(second) and common > MAX_WHOLE // 2


def _context(digits: int) -> Context:
    traps = [InvalidOperation, DivisionByZero, Overflow]
    return Context(prec=digits + 5, Emax=999_999, Emin=-999_999, traps=traps)


def _value(node: Node, point: int) -> Value:
    match node:
        case Number(value):
            return value
        case Symbol(name):
            return _letter(name, point)
        case Sum(terms):
            return reduce(_add, (_value(term, point) for term in terms))
        case Product(factors):
            return reduce(_times, (_value(factor, point) for factor in factors))
        case Quotient(top, bottom):
            return _over(_value(top, point), _value(bottom, point))
        case Power(base, exponent):
            return _power(_value(base, point), _value(exponent, point))
        case Root(radicand, index):
            return _root(_value(radicand, point), index)
        case FunctionCall("\\log", (base, argument)):
            return _decimal(_value(argument, point)).ln() / _decimal(_value(base, point)).ln()
        case FunctionCall(name, (above, below)) if name in BINOMIALS:
            return Fraction(math.comb(_whole(_value(above, point)), _whole(_value(below, point))))
        case FunctionCall(name, (argument,)) if name in FUNCTIONS_OF_NUMBERS:
            inside = _value(argument, point)
            return FUNCTIONS_OF_NUMBERS[name](_decimal(inside) * pi() / 180 if DEGREE in walk(argument) else inside)
    raise ValueError("no number")


def _combined(operation: Callable[[Any, Any], Any], one: Value, other: Value) -> Value:
    """Combine two values, exactly where both are exact and small."""
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        exact: Fraction = operation(one, other)
        bits = max(exact.numerator.bit_length(), exact.denominator.bit_length())
        return _decimal(exact) if bits > MAX_BITS else exact
    return operation(_decimal(one), _decimal(other))


_add, _times, _over = (partial(_combined, operation) for operation in (add, mul, truediv))


def _parts(node: Node, point: int) -> Parts:
    """Return the real and the imaginary part."""
    if IMAGINARY not in walk(node):
        return _value(node, point), Fraction(0)
    match node:
        case Symbol():
            return Fraction(0), Fraction(1)
        case Sum(terms):
            reals, imaginaries = zip(*(_parts(term, point) for term in terms), strict=True)
            return reduce(_add, reals), reduce(_add, imaginaries)
        case Product(factors):
            return reduce(_complex_product, [_parts(factor, point) for factor in factors])
        case Quotient(top, bottom):
            return _complex_product(_parts(top, point), _inverse(_parts(bottom, point)))
        case Power(base, Number(exponent)) if exponent.denominator == 1 and 0 < abs(exponent) <= MAX_INDEX:
            power = reduce(_complex_product, [_parts(base, point)] * abs(int(exponent)))
            return power if exponent > 0 else _inverse(power)
        case Power(Symbol("e"), exponent):
            real, angle = _parts(exponent, point)
            size = _decimal(real).exp()
            return size * _cosine(angle), size * _sine(angle)
        case FunctionCall("|" | "\\lvert", (inside,)):
            return _root(reduce(_add, (_times(part, part) for part in _parts(inside, point))), 2), Fraction(0)
    raise ValueError("no number")


def _complex_product(one: Parts, other: Parts) -> Parts:
    crossed = _times(one[1], other[1])
    return _add(_times(one[0], other[0]), -crossed), _add(_times(one[0], other[1]), _times(one[1], other[0]))


def _inverse(number: Parts) -> Parts:
    size = _add(_times(number[0], number[0]), _times(number[1], number[1]))
    return _over(number[0], size), _over(-number[1], size)


def _decimal(value: Value) -> Decimal:
    return value if isinstance(value, Decimal) else Decimal(value.numerator) / value.denominator


def _letter(name: str, point: int) -> Value:
    if name in CONSTANTS_BY_NAME:
        return CONSTANTS_BY_NAME[name]()
    if not (name.isalpha() or name in GREEK):
        raise ValueError("no number")
    draw = random.Random(f"{name} {point}")
    if point == LARGE:
        return Fraction(MAX_WHOLE + draw.randrange(MAX_WHOLE))
    if point in WHOLE:
        return Fraction(draw.randrange(2, 40))
    is_negative = point == 2 or (point > 2 and ord(name[-1]) >> (point - 3) & 1)
    return Fraction((-1 if is_negative else 1) * draw.randrange(1_000, 2_000), 1_000)


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(exponent, Fraction) and exponent.denominator == 1 and isinstance(base, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if (bits - 1) * abs(exponent) <= MAX_BITS:
            return base ** int(exponent)
    elif isinstance(exponent, Fraction) and exponent.denominator < MAX_INDEX and base >= 0:
        root = _root(base, exponent.denominator)
        if isinstance(root, Fraction):
            return _power(root, Fraction(exponent.numerator))
    if base < 0 and exponent % 1:
        raise ValueError("not real")
    return _decimal(base) ** _decimal(exponent)


def _root(radicand: Value, index: int) -> Value:
    if radicand < 0:
        if index % 2 == 0:
            raise ValueError("not real")
        return -_root(-radicand, index)
    if isinstance(radicand, Fraction):
        top, bottom = (_whole_root(number, index) for number in (radicand.numerator, radicand.denominator))
        if top is not None and bottom is not None:
            return Fraction(top, bottom)
    return _decimal(radicand) ** (1 / Decimal(index)) if radicand else Fraction(0)


def _whole_root(number: int, index: int) -> int | None:
    root = round(Decimal(number) ** (1 / Decimal(index))) if number > 1 else number
    return root if root**index == number else None


def _whole(value: Value) -> int:
    if not 0 <= value <= MAX_FACTORIAL or value % 1:
        raise ValueError("no number of things")
    return int(value)


@lru_cache(maxsize=256)
def _factorial(number: int, digits: int) -> Value:
    return _over(Fraction(math.factorial(number)), Fraction(1))


def _sine(argument: Value) -> Decimal:
    turn = 2 * pi()
    x = _decimal(argument) % turn
    term, total, place = x, x, 1
    while abs(term) > Decimal(10) ** -(getcontext().prec + 2):
        place += 2
        term = -term * x * x / (place * (place - 1))
        total += term
    return total


def _arctangent(argument: Value) -> Decimal:
    """Halve the angle until a few terms are enough."""
    x, halvings = _decimal(argument), 0
    while abs(x) > Decimal("0.01"):
        x, halvings = x / (1 + (1 + x * x).sqrt()), halvings + 1
    term, total, place = x, x, 1
    while abs(term) > Decimal(10) ** -(getcontext().prec + 2):
        place += 2
        term *= -x * x
        total += term / place
    return total * 2**halvings


def pi() -> Decimal:
    """Return pi to as many digits as are computed with."""
    return _pi(getcontext().prec)


@lru_cache(maxsize=8)
def _pi(digits: int) -> Decimal:
    with localcontext(_context(digits + 5)):
        return 16 * _arctangent(Fraction(1, 5)) - 4 * _arctangent(Fraction(1, 239))


def _cosine(argument: Value) -> Decimal:
    return _sine(_decimal(argument) + pi() / 2)


def _arcsine(argument: Value) -> Decimal:
    x = _decimal(argument)
    return pi() / 2 * x if abs(x) == 1 else _arctangent(x / (1 - x * x).sqrt())


def _floor(argument: Value) -> Value:
    if not -MAX_WHOLE < argument < MAX_WHOLE:
        raise ValueError("too large")
    return Fraction(math.floor(argument))


CONSTANTS_BY_NAME: Mapping[str, Callable[[], Value]] = {
    "\\pi": pi,
    "π": pi,
    "e": lambda: Decimal(1).exp(),
    "text:degree": lambda: Fraction(1),
}
FUNCTIONS_OF_NUMBERS: Mapping[str, Callable[[Value], Value]] = {
    "factorial": lambda x: _factorial(_whole(x), getcontext().prec),
    "\\log": lambda x: _decimal(x).ln() / _decimal(_letter("log", 0)).ln(),  # of a base that is not written
    "\\ln": lambda x: _decimal(x).ln(),
    "\\lg": lambda x: _decimal(x).log10(),
    "\\sin": _sine,
    "\\cos": _cosine,
    "\\tan": lambda x: _sine(x) / _cosine(x),
    "\\cot": lambda x: _cosine(x) / _sine(x),
    "\\sec": lambda x: 1 / _cosine(x),
    "\\csc": lambda x: 1 / _sine(x),
    "\\arctan": _arctangent,
    "\\arcsin": _arcsine,
    "\\arccos": lambda x: pi() / 2 - _arcsine(x),
    **dict.fromkeys(("|", "\\lvert"), lambda x: _times(x, Fraction(-1 if x < 0 else 1))),
    "\\lfloor": _floor,
    "\\lceil": lambda x: -_floor(-x),
}
