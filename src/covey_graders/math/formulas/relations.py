"""Compare assignments, inequalities, intervals and ratios in different notations."""

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from covey_graders.math.formulas.forms import SET, canonical, equal_equations
from covey_graders.math.formulas.nodes import (
    BOTH,
    RELATION,
    FunctionCall,
    Grouping,
    Node,
    Number,
    Product,
    Quotient,
    Sum,
    Symbol,
    children,
    is_equation,
    is_numeric,
    last_side,
    negative,
    numeral_value,
    walk,
)
from covey_graders.math.formulas.values import equal_values, value_at
from covey_graders.math.formulas.words import DOTS, LESS, MORE

INFINITY = Symbol("\\infty")
PLUS_MINUS = Symbol("\\pm")
MINUS_INFINITY = Product((Number(Fraction(-1)), INFINITY))
UNIONS = frozenset({"\\cup", "∪"})
LINE = Grouping("()", (MINUS_INFINITY, INFINITY))
COORDINATES = (Symbol("x"), Symbol("y"), Symbol("z"))
"""Order of a point's values, for answers that state them in any order."""
VECTORS = frozenset({"pmatrix", "bmatrix"})


@dataclass(frozen=True, slots=True)
class Interval:
    """Two ends, their inclusion, and the letter, if any.

    >>> interval_of(read_tree("x \\\\ge 3"))
    Interval(low=Number(value=Fraction(3, 1)), high=Symbol(name='\\\\infty'), ends=(True, False), letter='x')
    """

    low: Node
    high: Node
    ends: tuple[bool, bool]
    letter: str = ""


def same_relation(answer: Node, gold: Node) -> bool:
    """Compare ordered names, ratios, inequalities and intervals.

    A pair not in lowest terms, such as 10:30, is a time and no ratio: its numbers are compared.
    """
    named, by_name = _values_by_name(gold), _values_by_name(answer)
    if len(named) > 1:
        given = by_name or _in_order(answer)
        return _all_same(given, named if given.keys() == named.keys() else dict(enumerate(named.values())))
    kinds = [side.kind for node in (answer, gold) if isinstance(side := last_side(node), Grouping)]
    if kinds[1:] == ["()"] and by_name:
        order = COORDINATES if by_name.keys() <= set(COORDINATES) else by_name
        return _all_same(dict(enumerate(by_name[name] for name in order if name in by_name)), _in_order(gold))
    if kinds == ["()", "list"] or (kinds[:1] == ["()"] and _is_column(gold)):
        return _all_same(_in_order(answer), _in_order(gold))
    if _same_pair(_pair(answer), _pair(gold)):
        return True
    if is_ratio(gold):
        given_parts, wanted_parts = (_parts(node, is_relative=not is_reducible(gold)) for node in (answer, gold))
        return given_parts == wanted_parts is not None
    given_ones, wanted_ones = _intervals(last_side(answer)), _intervals(last_side(gold), may_be_empty=False)
    if given_ones is None or wanted_ones is None:
        return same_value(answer, gold)
    letters = [{one.letter for one in ones} for ones in (given_ones, wanted_ones)]
    is_one = len(given_ones) == len(wanted_ones) and len(letters[0]) <= max(1, len(letters[1]))
    return is_one and all(_same(one, other) for one, other in zip(given_ones, wanted_ones, strict=True))


def _in_order(node: Node) -> dict[object, Node]:
    """Return the members of a point or list by place."""
    side = last_side(node)
    is_ordered = isinstance(side, Grouping) and (side.kind in {"()", "list"} or _is_column(side))
    return dict(enumerate(side.members)) if is_ordered and isinstance(side, Grouping) else {}


def _is_column(node: Node) -> bool:
    """Return True for a vector written as a one-column matrix."""
    side = last_side(node)
    name, _, num_rows = side.kind.partition(" ") if isinstance(side, Grouping) else ("", "", "")
    return name in VECTORS and isinstance(side, Grouping) and num_rows == str(len(side.members)) != "1"


def _same_pair(given: list[Node], wanted: list[Node]) -> bool:
    """Compare two values with two others in any order."""
    orders = (wanted, wanted[::-1]) if len(given) == len(wanted) == 2 else ()
    return any(all(_same_end(one, other) for one, other in zip(given, order, strict=True)) for order in orders)


def _pair(node: Node) -> list[Node]:
    """Return the two values of a list or one `\\pm`, else none."""
    side = last_side(node)
    if is_equation(node) or len(_values_by_name(node)) > 1:
        return []
    if not isinstance(side, Grouping):
        return [_signed(side, is_negative) for is_negative in (False, True)] if PLUS_MINUS in walk(side) else []
    is_pair = side.kind in {"list", SET} and len(side.members) == 2 and not any(map(is_equation, side.members))
    return [last_side(member) for member in side.members] if is_pair else []


def _signed(node: Node, is_negative: bool) -> Node:
    """Return a formula with one sign for each `\\pm`."""
    match node:
        case Product((Symbol("\\pm"), value)):
            return negative(value) if is_negative else value
        case Sum(nodes):
            return Sum(tuple(_signed(part, is_negative) for part in nodes))
        case Product(nodes):
            return Product(tuple(_signed(part, is_negative) for part in nodes))
        case Quotient(top, bottom):
            return Quotient(_signed(top, is_negative), _signed(bottom, is_negative))
    return node


def _values_by_name(node: Node) -> dict[object, Node]:
    """Return the values of `x=1, y=2` or `(x,y)=(1,2)` by letter.

    Nothing where a letter is named twice, or for `x_1=2, x_2=3`, roots in any order.
    """
    match node:
        case Grouping("relation =", (Grouping("()", names), Grouping("()", values))) if len(names) == len(values):
            pairs = list(zip(names, values, strict=True))
        case Grouping("list", members):
            sides = [side.members for side in members if isinstance(side, Grouping) and side.kind == "relation ="]
            letters = {name.name.rpartition("_")[0] or name for name, *_ in sides if isinstance(name, Symbol)}
            is_named = len(sides) == len(members) and len(letters) > 1
            pairs = [(name, value) for name, value in sides] if is_named else []
        case _:
            return {}
    found: dict[object, Node] = {name: value for name, value in pairs if isinstance(name, Symbol)}
    return found if len(found) == len(pairs) else {}


def _all_same(given: dict[object, Node], wanted: dict[object, Node]) -> bool:
    return given.keys() == wanted.keys() and all(_same_end(given[name], value) for name, value in wanted.items())


def _signs(node: Node) -> set[str]:
    is_relation = isinstance(node, Grouping) and node.kind.startswith(RELATION)
    return set(node.kind.split()[1:]) if is_relation and isinstance(node, Grouping) else set()


def is_ratio(node: Node) -> bool:
    """Check for numbers with colons between."""
    return _signs(node) == {":"}


def is_reducible(node: Node) -> bool:
    """Check for a ratio of whole numbers with a common factor."""
    members = node.members if isinstance(node, Grouping) else ()
    values = [member.value for member in members if isinstance(member, Number)]
    return math.gcd(*(value.numerator for value in values if value.denominator == 1)) > 1


def _parts(node: Node, is_relative: bool) -> tuple[Fraction, ...] | None:
    """Return a ratio's numbers, or their share of the last."""
    members = node.members if isinstance(node, Grouping) and is_ratio(node) else (node, Number(Fraction(1)))
    values = [value for member in members if (value := numeral_value(member))]
    if len(values) < len(members):
        return None
    return tuple(value / values[-1] if is_relative else value for value in values)


def _intervals(node: Node, may_be_empty: bool = True) -> list[Interval] | None:
    """Return the intervals of a union or of joined inequalities, in order.

    Args:
        may_be_empty: `x<1 and x>3` holds nowhere; else it is a careless `or`.
    """
    excluded = _excluded(node)
    if excluded is not None:
        return _line_without(*excluded)
    is_union = isinstance(node, Grouping) and (node.kind in {"list", BOTH} or (_signs(node) and _signs(node) <= UNIONS))
    members = node.members if is_union and isinstance(node, Grouping) else (node,)
    found = [one for member in members if (one := interval_of(member)) is not None]
    if len(found) < len(members):
        return None
    if isinstance(node, Grouping) and node.kind == BOTH:
        found = _joint(found) if may_be_empty else _joint(found) or found
    return sorted(found, key=_place)


def _excluded(node: Node) -> tuple[str, list[Node]] | None:
    """Return the points and letter that `x \\ne 1, 3` or `\\setminus` exclude."""
    match node:
        case Grouping("relation \\ne", (Symbol(letter), *values)):
            return letter, values
        case Grouping("relation \\setminus", (line, Grouping(kind, values))) if line == LINE and kind in UNORDERED:
            return "", list(values)
        case Grouping("list" | "both", (first, *others)) if (found := _excluded(first)) is not None:
            values = [last_side(other) for other in others]
            return found[0], [*found[1], *(v.members[-1] if isinstance(v, Grouping) else v for v in values)]
    return None


def _line_without(letter: str, points: list[Node]) -> list[Interval] | None:
    """Return the intervals between numbers."""
    values = [value_at(point) if is_numeric(point) else None for point in points]
    if None in values:
        return None
    ends = [point for _, point in sorted(zip(values, points, strict=True), key=lambda pair: float(pair[0] or 0))]
    pairs = pairwise((MINUS_INFINITY, *ends, INFINITY))
    return sorted((Interval(low, high, (False, False), letter) for low, high in pairs), key=_place)


def _place(one: Interval) -> tuple[str, str]:
    return one.letter, canonical(one.low)


def _joint(ones: list[Interval]) -> list[Interval]:
    """Intersect the lower and upper bounds of a letter."""
    match sorted(ones, key=lambda one: one.low == MINUS_INFINITY):
        case [Interval(low, high, (at_low, _), letter), Interval(no_low, end, (_, at_end), other)] if (
            high == INFINITY and no_low == MINUS_INFINITY and letter == other
        ):
            first, last = value_at(low, 0), value_at(end, 0)
            is_empty = first is not None and last is not None and first >= last and is_numeric(low) and is_numeric(end)
            return [] if is_empty else [Interval(low, end, (at_low, at_end), letter)]
    return ones


def interval_of(node: Node) -> Interval | None:
    """Return the interval of `[a,b)`, `a \\\\le x < b` or `x > a`."""
    if not isinstance(node, Grouping):
        return None
    if node.kind in {"()", "[]", "(]", "[)"} and len(node.members) == 2:
        return Interval(*node.members, ends=(node.kind[0] == "[", node.kind[1] == "]"))
    signs = node.kind.split()[1:] if node.kind.startswith(RELATION) else []
    members = node.members
    if signs and all(sign in MORE for sign in signs):
        signs, members = [_FLIPPED[sign] for sign in reversed(signs)], members[::-1]
    if not signs or any(sign not in LESS for sign in signs):
        return None
    match members:
        case (Symbol(name), high) if name.isalpha():
            return Interval(MINUS_INFINITY, high, (False, LESS[signs[0]]), name)
        case (FunctionCall("|" | "\\lvert", (Symbol(name),)), high) if name.isalpha():
            return Interval(negative(high), high, (LESS[signs[0]], LESS[signs[0]]), name)
        case (low, Symbol(name)) if name.isalpha():
            return Interval(low, INFINITY, (LESS[signs[0]], False), name)
        case (low, Symbol(name), high) if name.isalpha():
            return Interval(low, high, (LESS[signs[0]], LESS[signs[1]]), name)
    return None


def _same(one: Interval, other: Interval) -> bool:
    is_apart = one.letter and other.letter and one.letter != other.letter
    return not is_apart and one.ends == other.ends and _same_end(one.low, other.low) and _same_end(one.high, other.high)


def _same_end(one: Node, other: Node) -> bool:
    return canonical(one) == canonical(other) or equal_values(one, other)


def same_value(answer: Node, gold: Node) -> bool:
    """Compare values: sets and lists without repeats in any order."""
    if is_equation(gold):
        return equal_equations(answer, gold)
    given, wanted = last_side(answer), last_side(gold)
    if not isinstance(given, Grouping) or not isinstance(wanted, Grouping):
        return canonical(given) == canonical(wanted) or equal_values(given, wanted)
    if {given.kind, wanted.kind} <= UNORDERED and len(set(map(canonical, wanted.members))) == len(wanted.members):
        table = [[same_value(one, other) for one in given.members] for other in wanted.members]
        return all(map(any, (*table, *zip(*table, strict=True))))
    if given.kind != wanted.kind or len(given.members) != len(wanted.members):
        return False
    return all(same_value(one, other) for one, other in zip(given.members, wanted.members, strict=True))


def same_with_dots(answer: Node, gold: Node) -> bool:
    """Compare lists and sums with dots by their common ends."""
    given, wanted = last_side(answer), last_side(gold)
    first, second = (next((i for i, part in enumerate(_members(n)) if has_dots(part)), None) for n in (given, wanted))
    if first is None or second is None or _frame(given) != _frame(wanted):
        return canonical(given) == canonical(wanted)
    ones, others = ([canonical(part) for part in _members(node)] for node in (given, wanted))
    begins = zip(ones[:first], others[:second], strict=False)
    ends = zip(ones[:first:-1], others[:second:-1], strict=False)
    is_open = len(ones) == first + 1, len(others) == second + 1
    pairs = (*begins, *ends, (ones[first], others[second]), is_open)
    is_begun = min(first, second) >= min(2, max(first, second, 1))
    return is_begun and all(one == other for one, other in pairs)


def has_dots(node: Node) -> bool:
    return any(part == Symbol(DOTS) for part in walk(node))


def _members(node: Node) -> tuple[Node, ...]:
    return children(node) if isinstance(node, Sum | Product | Grouping) else ()


def _frame(node: Node) -> str:
    return node.kind.split()[0].replace("\\{\\}", "list") if isinstance(node, Grouping) else type(node).__name__


UNORDERED = frozenset({"list", SET, "\\{"})
_FLIPPED = dict(zip(MORE, LESS, strict=True))
