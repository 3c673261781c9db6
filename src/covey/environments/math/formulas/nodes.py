"""What formulas are made of, as trees in which nothing is computed."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

RELATION = "relation"
"""How the kind of a group begins that is an equation or the like."""
DOUBLE_SIGN = "double sign"


@dataclass(frozen=True, slots=True)
class Number:
    value: Fraction


@dataclass(frozen=True, slots=True)
class Symbol:
    """A letter, a constant such as `\\pi`, or a word or unit, whose name begins with "text:"."""

    name: str


@dataclass(frozen=True, slots=True)
class Sum:
    terms: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Product:
    factors: tuple["Node", ...]


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
class Call:
    """A function or an operation with a name: `\\sin`, `\\sum`, an absolute value, a factorial, a double sign."""

    name: str
    arguments: tuple["Node", ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """A set, a point, an interval, a matrix, a list, or what stands on the sides of a relation."""

    kind: str
    members: tuple["Node", ...]


Node = Number | Symbol | Sum | Product | Quotient | Power | Root | Call | Group


def children(node: Node) -> tuple[Node, ...]:
    """Return the nodes directly below."""
    match node:
        case Number() | Symbol():
            return ()
        case Sum(nodes) | Product(nodes) | Call(_, nodes) | Group(_, nodes):
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
    """Return what stands behind the last sign of an equation, or of a membership. Else the node itself."""
    is_equation = isinstance(node, Group) and node.kind.startswith(RELATION) and {*node.kind.split()[1:]} <= EQUALS
    return node.members[-1] if is_equation and isinstance(node, Group) else node


def is_equation(node: Node) -> bool:
    """Check for an equation between expressions, such as `x+2y=3`, which says of no name what it is."""
    if not isinstance(node, Group) or set(node.kind.split()) != {RELATION, "="}:
        return False
    return not is_numeric(node) and not any(map(_is_name, node.members[:-1]))


def _is_name(node: Node) -> bool:
    """Check for a letter, a word, a side such as `AB`, an angle, a function such as `f(x)`, or a list of such."""
    match node:
        case Symbol() | Call("derivative", (Symbol(),)):
            return True
        case Group(_, members):
            return all(map(_is_name, members))
        case Call("|", (Product() as side,)):
            return _is_word(side.factors)
        case Product((Power(function, Number()) | function, _)) if function in FUNCTIONS_BY_LETTER:
            return True
        case Product(factors):
            return _is_word(factors)
    return False


def _is_word(factors: Sequence[Node]) -> bool:
    """Check for capital letters, as those of a triangle, for what has an angle in it, and for four letters and more."""
    names = [factor.name for factor in factors if isinstance(factor, Symbol)]
    if len(names) < len(factors):
        return False
    return "".join(names).isupper() or len(names) >= LETTERS_OF_A_WORD or not FIGURES.isdisjoint(names)


def is_expression(node: Node) -> bool:
    """Check for an expression, or an equation with one on its last side: no set, point, list or inequality."""
    return not isinstance(last_side(node), Group)


def is_rational(node: Node) -> bool:
    """Check for a number or a fraction of two."""
    if isinstance(node, Quotient):
        return isinstance(node.top, Number) and isinstance(node.bottom, Number)
    return isinstance(node, Number)


def is_numeric(node: Node) -> bool:
    """Check that there is no letter in it but constants."""
    return all(not isinstance(part, Symbol) or part.name in CONSTANTS for part in walk(node))


def coprime(top: Fraction, bottom: Fraction) -> bool:
    """Check for two whole numbers without a common factor, the second not 0."""
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


def times(left: Node, right: Node) -> Node:
    """Return the product as one list of factors."""
    first = left.factors if isinstance(left, Product) else (left,)
    return Product((*first, *(right.factors if isinstance(right, Product) else (right,))))


def numeral_value(node: Node) -> Fraction | None:
    """Return the number a formula is, None where something is left to compute or it is none."""
    match node:
        case Number(value):
            return value
        case Quotient(Number(top), Number(bottom)) if coprime(top, bottom):
            return top / bottom
        case Group("\\{", (member,)):
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
FIGURES = frozenset({"\\angle", "\\triangle"})
FUNCTIONS_BY_LETTER = frozenset(
    function for name in "fghpqEFGPQTV" for function in (Symbol(name), Call("derivative", (Symbol(name),)))
)
PERCENT = frozenset({"%", "\\%"})
EQUALS = frozenset({"=", "\\in", "∈", "\\approx", "≈"})
CONSTANTS = frozenset({"\\pi", "π", "e", "i", "\\imath"})
