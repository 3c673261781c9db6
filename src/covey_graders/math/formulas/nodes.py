"""Nodes of formula trees, in which nothing is computed."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from covey_graders.math.formulas.words import CALLS, ORDER

RELATION = "relation"
"""Beginning of the kind of a group that is an equation or the like."""
BOTH = "both"
"""The kind of a group of inequalities that hold together."""
DOUBLE_SIGN = "double sign"


@dataclass(frozen=True, slots=True)
class Number:
    value: Fraction


@dataclass(frozen=True, slots=True)
class Symbol:
    """A letter, a constant such as `\\pi`, or a "text:" word."""

    name: str


@dataclass(frozen=True, slots=True)
class Sum:
    terms: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Product:
    factors: tuple["Node", ...]
    is_applied: bool = field(default=False, compare=False, repr=False)
    """Whether it is written as a function is: `p(q)`, not `pq`."""


@dataclass(frozen=True, slots=True)
class Quotient:
    top: "Node"
    bottom: "Node"


@dataclass(frozen=True, slots=True)
class Power:
    base: "Node"
    exponent: "Node"


@dataclass(frozen=True, slots=True)
class Root:
    radicand: "Node"
    index: int


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A named function or operation: `\\sin`, `\\sum`, factorial, double sign."""

    name: str
    arguments: tuple["Node", ...] = ()


@dataclass(frozen=True, slots=True)
class Grouping:
    """A set, point, interval, matrix, list, or a relation's sides."""

    kind: str
    members: tuple["Node", ...]


Node = Number | Symbol | Sum | Product | Quotient | Power | Root | FunctionCall | Grouping


def children(node: Node) -> tuple[Node, ...]:
    """Return the nodes directly below."""
    match node:
        case Number() | Symbol():
            return ()
        case Sum(nodes) | Product(nodes) | FunctionCall(_, nodes) | Grouping(_, nodes):
            return nodes
        case Quotient(first, second) | Power(first, second):
            return first, second
        case Root(radicand, _):
            return (radicand,)


def walk(node: Node) -> Iterator[Node]:
    """Yield the node and all below it."""
    yield node
    for child in children(node):
        yield from walk(child)


def last_side(node: Node) -> Node:
    """Return the last side of an equation or membership, else the node.

    `5 = x` gives the 5.
    """
    if not isinstance(node, Grouping) or not node.kind.startswith(RELATION):
        return node
    _, sign, *signs = node.kind.split()
    if sign in EQUALS and signs and not {*signs} & EQUALS:  # x \\in A \\cup B
        return Grouping(" ".join([RELATION, *signs]), node.members[1:])
    if not {sign, *signs} <= EQUALS:
        return node
    first, last = node.members[0], node.members[-1]
    return first if is_numeric(first) and is_name(last) and not is_numeric(last) else last


def is_equation(node: Node) -> bool:
    """Return True for an equation of expressions, such as `x+2y=3`."""
    if not isinstance(node, Grouping) or set(node.kind.split()) != {RELATION, "="}:
        return False
    *others, last = node.members
    return last_side(node) is last and not is_numeric(node) and not any(map(is_name, others))


def is_inequality(node: Node) -> bool:
    """Check for a relation with a sign of order."""
    return isinstance(node, Grouping) and node.kind.startswith(RELATION) and not ORDER.isdisjoint(node.kind.split())


def is_name(node: Node) -> bool:
    """Return True for one quantity's name: a letter, `f(x)`, `AB`, `a:b`."""
    match node:
        case Symbol():
            return True
        case FunctionCall(name, arguments):
            return name != DOUBLE_SIGN and not (name in DISTANCES and isinstance(arguments[0], Sum))
        case Grouping(_, members):
            return all(map(is_name, members))
        case Quotient(top, bottom):
            return is_name(top) and is_name(bottom)
        case Power(Symbol() as letter, _):
            return _is_proper(letter)
        case Power(base, _):
            return is_name(base)
        case Product((first, *others), is_applied):
            return _is_applied_name(first, others[0]) if is_applied else _is_joint_name(first, others)
    return False


def _is_applied_name(function: Node, argument: Node) -> bool:
    """Return True for a function before a bracket: `f(x)`, not `p(p+1)`."""
    letter = function.base if isinstance(function, Power) else function
    if not isinstance(letter, Symbol):
        return is_name(letter)
    is_argument = isinstance(argument, Number | Grouping) or (
        isinstance(argument, Symbol) and argument.name in ARGUMENTS
    )
    is_marked = is_argument or _is_proper(argument) or _is_proper(letter)
    return letter not in walk(argument) and (letter.name in FUNCTIONS_BY_LETTER or is_marked)


def _is_joint_name(first: Node, others: Sequence[Node]) -> bool:
    """Return True for a product that is a name: `\\angle ABC`, `dy`."""
    letter = first.base if isinstance(first, Power) else first
    if not isinstance(letter, Symbol):
        is_function = (
            isinstance(letter, FunctionCall) and letter.name in CALLS
        )  # what follows is its argument, as in \cos 2x
        is_derivative = isinstance(first, Quotient) and Symbol("d") in (first.top, first.bottom)  # d/dx, dy/dx
        is_open = is_function or is_derivative or all(isinstance(other, FunctionCall) for other in others)
        return is_name(first) and is_open
    if letter.name == "d" and len(others) == 1:
        return True
    is_word = 1 + len(others) >= LETTERS_OF_A_WORD and all(isinstance(other, Symbol) for other in others)
    is_marked = isinstance(others[0], Symbol) and not others[0].name.isupper() and _is_proper(others[0])
    return is_word or is_marked or _is_proper(letter)


def _is_proper(node: Node) -> bool:
    """Return True for a capital, word, arrow, bar or angle: no variable."""
    name = node.name if isinstance(node, Symbol) else ""
    return name.isupper() or name.startswith("text:") or name in FIGURES or (name[:1] == "\\" and " " in name)


def is_rational(node: Node) -> bool:
    """Check for a number or a fraction of two."""
    if isinstance(node, Quotient):
        return isinstance(node.top, Number) and isinstance(node.bottom, Number)
    return isinstance(node, Number)


def is_numeric(node: Node) -> bool:
    """Check that there is no letter in it but constants."""
    return all(not isinstance(part, Symbol) or part.name in CONSTANTS for part in walk(node))


def coprime(top: Fraction, bottom: Fraction) -> bool:
    """Return True for coprime integers, the second not 0."""
    return bottom != 0 and top.denominator == bottom.denominator == math.gcd(top.numerator, bottom.numerator) == 1


def negative(node: Node) -> Node:
    """Return the node with the other sign, which is no further factor."""
    match node:
        case Number(value):
            return Number(-value)
        case Product((Number(value), *others)):
            return Product((Number(-value), *others))
        case Quotient(top, bottom):
            return Quotient(negative(top), bottom)
    return Product((Number(Fraction(-1)), node))


def times(left: Node, right: Node) -> Product:
    """Return the product as one list of factors."""
    first = left.factors if isinstance(left, Product) else (left,)
    return Product((*first, *(right.factors if isinstance(right, Product) else (right,))))


def numeral_value(node: Node) -> Fraction | None:
    """Return a finished number's value, else None."""
    match node:
        case Number(value):
            return value
        case Quotient(Number(top), Number(bottom)) if coprime(top, bottom):
            return top / bottom
        case Grouping("\\{", (member,)):
            return numeral_value(member)
        case Product(factors):
            numbers = [factor for factor in factors if not _is_unit(factor)]
            if len(numbers) == 1 < len(factors):
                return numeral_value(numbers[0])
            return _scientific_value(numbers) if is_scientific(numbers) else None
    return None


def _scientific_value(factors: list[Node]) -> Fraction | None:
    match factors:
        case [Number(value), Power(_, Number(exponent))] if exponent.denominator == 1 and abs(exponent) <= MAX_EXPONENT:
            return value * Fraction(10) ** int(exponent)
    return None


def _is_unit(node: Node) -> bool:
    if isinstance(node, Power):
        return _is_unit(node.base) and isinstance(node.exponent, Number)
    if isinstance(node, Quotient):
        return _is_unit(node.top) and _is_unit(node.bottom)
    return isinstance(node, Symbol) and (node.name.startswith("text:") or node.name in PERCENT)


def is_scientific(factors: Sequence[Node]) -> bool:
    """Check for a number and a power of ten behind it."""
    return len(factors) == 2 and isinstance(factors[0], Number) and _is_power_of_ten(factors[1])


def _is_power_of_ten(node: Node) -> bool:
    return isinstance(node, Power) and node.base == Number(Fraction(10)) and isinstance(node.exponent, Number)


MAX_EXPONENT = 300
LETTERS_OF_A_WORD = 4
FIGURES = frozenset({"\\angle", "\\triangle", "\\Delta"})
DISTANCES = frozenset({"|", "\\lvert"})
FUNCTIONS_BY_LETTER = frozenset("dfghkpqsuvw")
ARGUMENTS = frozenset("tnx")
PERCENT = frozenset({"%", "\\%"})
EQUALS = frozenset({"=", "\\in", "∈", "\\approx", "≈"})
CONSTANTS = frozenset({"\\pi", "π", "e", "i", "\\imath"})
