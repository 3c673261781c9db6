"""A formula's tree without algebra: canonical spelling, value, size."""

from collections.abc import Iterable
from fractions import Fraction
from itertools import pairwise

from covey_graders.math.formulas.nodes import (
    CONSTANTS,
    FunctionCall,
    Grouping,
    Node,
    Number,
    Power,
    Product,
    Quotient,
    Root,
    Sum,
    Symbol,
    negative,
    walk,
)
from covey_graders.math.formulas.values import NUM_POINTS, equal_at

Monomial = tuple[Fraction, dict[str, Fraction]]
"""A rational coefficient, and the exponent of each base by its canonical spelling."""


def canonical(node: Node) -> str:
    """Spell a formula independent of order, brackets and signs."""
    coefficient, powers = monomial(node)
    return f"{coefficient}" + "".join(f"·{base}^{exponent}" for base, exponent in sorted(powers.items()) if exponent)


def monomial(node: Node) -> Monomial:
    """Split a product, quotient or power; sums and functions are bases."""
    match node:
        case Number(value):
            return value, {}
        case Product(factors):
            return _joined([(monomial(factor), 1) for factor in factors])
        case Quotient(top, bottom):
            below = monomial(bottom)
            return _joined([(monomial(top), 1), (below, -1)]) if below[0] else (Fraction(1), {_spelling(node): _ONE})
        case Power(base, Number(exponent)):
            return _raised(monomial(base), exponent)
        case Root(radicand, index) if not isinstance(radicand, Number):
            return _raised(monomial(radicand), Fraction(1, index))
    return Fraction(1), {_spelling(node): _ONE}


def _joined(parts: Iterable[tuple[Monomial, int]]) -> Monomial:
    coefficient, powers = Fraction(1), dict[str, Fraction]()
    for (number, bases), sign in parts:
        coefficient *= number if sign > 0 else 1 / number
        for base, exponent in bases.items():
            powers[base] = powers.get(base, Fraction(0)) + sign * exponent
    return coefficient, powers


def _raised(inside: Monomial, exponent: Fraction) -> Monomial:
    """Raise a monomial to a power, keeping its coefficient as a base."""
    coefficient, powers = inside
    raised = {base: own * exponent for base, own in powers.items()}
    return Fraction(1), raised if coefficient == 1 else {f"({coefficient})": exponent, **raised}


def _spelling(node: Node) -> str:
    match node:
        case Symbol(name):
            return name
        case Sum(terms):
            return f"({' + '.join(sorted(map(canonical, terms)))})"
        case FunctionCall(name, members) | Grouping(name, members):
            spelled = [canonical(member) for member in members]
            return f"{name}[{'; '.join(sorted(spelled) if name == SET else spelled)}]"
        case Root(radicand, index):
            return f"root{index}({canonical(radicand)})"
        case Power(base, exponent):
            return f"({canonical(base)})^({canonical(exponent)})"
    return repr(node)


def letters_of(node: Node) -> set[str]:
    """Return the names of all letters but constants."""
    names = {part.name for part in walk(node) if isinstance(part, Symbol)}
    return {name for name in names if name not in CONSTANTS and not name.startswith("text:")}


def equal_equations(answer: Node, gold: Node) -> bool:
    """Compare equations up to a factor of their sides' difference."""
    given, wanted = _gap(answer), _gap(gold)
    if given is None or wanted is None:
        return False
    ratio = Quotient(given, wanted)
    return all(equal_at((ratio, 0), (ratio, point)) for point in range(1, NUM_POINTS))


def _gap(node: Node) -> Node | None:
    """Return left minus right side of an equation, else None."""
    match node:
        case Grouping("relation =", (left, right)):
            return Sum((left, negative(right)))
    return None


def has_words(node: Node) -> bool:
    """Check for words or units in text commands."""
    return any(isinstance(part, Symbol) and part.name.startswith("text:") for part in walk(node))


def is_compound(node: Node) -> bool:
    """Return True for numbers with units between: 3 hours 20 minutes."""
    factors = node.factors if isinstance(node, Product) else ()
    return any(has_words(before) and isinstance(after, Number) for before, after in pairwise(factors))


def without_words(node: Node) -> Node:
    """Return a product without units."""
    kept = [factor for factor in node.factors if not has_words(factor)] if isinstance(node, Product) else []
    return Product(tuple(kept)) if len(kept) > 1 else (kept or [node])[0]


SET = "\\{\\}"
_ONE = Fraction(1)
