"""Check that an answer is computed, not left to the grader.

Values are compared exactly, so `12+7` equals 19, and the question itself equals its answer. If the task is to
compute, such an answer is wrong. An answer is computed where

1. a number is a numeral: digits, one fraction bar in lowest terms, a mixed number, a percentage, a power of ten
   behind a numeral; no sum, product, power, root, factorial, `\\binom`, `\\sum`, `\\int` or other function of numbers;
2. a root holds no factor that is a power of its index; no roots of numbers are multiplied, none is inside another;
3. no two terms are alike, no factor occurs twice, no fraction can be reduced or stands in another one, no power is
   raised to a power, no bracket with a number before it stands in a sum, no points or matrices are added;
4. where the question states what equals the answer, or says factor, expand or simplify, the answer has the form of the
   reference: as many brackets multiplied, as many fractions, and it is no formula of the question;
5. where the question asks for another spelling of a number, the answer is not the spelling that the question has; nor
   is it a power of ten that the question states, whatever is asked.

Operations that the reference leaves undone are allowed: `2^{99}` where the reference is `2^{100}-1`. Pure; the length
of the text is bounded.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction

from covey_graders.math.formulas.forms import canonical, monomial
from covey_graders.math.formulas.nodes import (
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
    coprime,
    is_equation,
    is_numeric,
    is_rational,
    is_scientific,
    last_side,
    numeral_value,
    walk,
)
from covey_graders.math.formulas.relations import is_ratio, is_reducible
from covey_graders.math.formulas.trees import read_tree
from covey_graders.math.formulas.values import equal_values, share_a_factor
from covey_graders.math.formulas.words import BINOMIALS, FAMILIES
from covey_graders.math.reading.normalize import plain
from covey_graders.tables import patterns_beside

_RE = patterns_beside(__file__)


def is_computed(answer: str, gold: str, question: str = "") -> bool:
    """Check that an answer leaves no more undone than the reference.

    Args:
        question: what was asked; without it no form is asked for.
    """
    tree, expected = read_tree(answer), read_tree(gold)
    if tree is None or expected is None:
        return not (leaves_sum(answer) and not leaves_sum(gold)) and (tree is None) == (expected is None)
    if is_numeral(last_side(expected)) and not is_equation(expected):
        return is_numeral(last_side(tree))
    given, wanted = (node if is_equation(expected) else last_side(node) for node in (tree, expected))
    has_more = set(_undone(given)) - set(_undone(wanted)) or _functions(given) - _functions(wanted)
    return not has_more and has_form(tree, expected, question)


def is_simplified(node: Node) -> bool:
    """Check that a formula leaves nothing undone but `\\pi`, `\\sqrt{2}` and the like."""
    return all(name.startswith("constant") for name in _undone(node))


def is_numeral(node: Node) -> bool:
    """Check for a number with nothing left to compute."""
    return numeral_value(node) is not None


def leaves_sum(text: str) -> bool:
    """Return True for unreadable text with an operator between digits."""
    return _RE["operation"].search(_RE["no_operator"].sub("", text)) is not None


def _undone(node: Node) -> Iterator[str]:
    """Yield a name for each computation left undone."""
    for part in walk(node):
        match part:
            case Sum(terms):
                yield from _undone_sum(list(_flat(terms)))
            case Product(factors):
                yield from _undone_product(factors)
            case Quotient(top, bottom):
                yield from _undone_quotient(top, bottom)
            case Power(base, exponent):
                yield from _undone_power(base, exponent)
            case Root(radicand, index):
                yield from _undone_root(radicand, index)
            case Grouping() if is_ratio(part) and is_reducible(part):
                yield "ratio not in lowest terms"
            case Symbol(name) if name in {"e", "i", "\\pi", "π"}:
                yield f"constant {name}"


def _functions(node: Node) -> Counter[str]:
    """Count functions, indexed sums, absolute values and the like."""
    found = [part.name for part in walk(node) if isinstance(part, FunctionCall)]
    return Counter(FAMILIES.get(name, name) for name in found for _ in range(3 if name in BINOMIALS else 1))


def _flat(terms: Iterable[Node]) -> Iterator[Node]:
    for term in terms:
        yield from _flat(term.terms) if isinstance(term, Sum) else (term,)


def _undone_sum(terms: list[Node]) -> Iterator[str]:
    parts = [monomial(term) for term in terms]
    names = Counter(
        "·".join(f"{base}^{exponent}" for base, exponent in sorted(p.items()) if exponent) for _, p in parts
    )
    if names[""] > 1 or Number(Fraction(0)) in terms:
        yield "sum of numbers"
    if names[""] and any(_is_double_sign_of_number(term) for term in terms):
        yield "sum of numbers"
    if any(number > 1 for name, number in names.items() if name):
        yield "like terms"
    if any(isinstance(term, Grouping) for term in terms):
        yield "sum of points"
    for term in terms:
        if isinstance(term, Product) and all(is_rational(f) or isinstance(f, Sum) for f in term.factors):
            yield "bracket in a sum"


def _is_double_sign_of_number(term: Node) -> bool:
    """Return True for `\\pm3`, which in a sum stands for two numbers."""
    match term:
        case Product((Symbol(name), factor)):
            return name == "\\pm" and is_rational(factor)
    return False


def _undone_product(factors: tuple[Node, ...]) -> Iterator[str]:
    numbers = [factor for factor in factors if is_rational(factor)]
    if len(numbers) > 1 or Number(Fraction(1)) in factors:
        yield "product of numbers"
    if any(isinstance(factor, Grouping) for factor in factors):
        yield "product of points"
    bases = Counter(base for factor in factors for base, exponent in monomial(factor)[1].items() if exponent)
    if any(number > 1 for base, number in bases.items() if not base.startswith("text:")):
        yield "repeated factor"
    powers = sum(isinstance(factor, Power) and is_numeric(factor) for factor in factors)
    if powers > 1 or (powers and numbers and not is_scientific(factors)):
        yield "product of powers"
    contents = [_content(factor) for factor in factors if isinstance(factor, Sum)]
    if any(content.denominator > 1 for content in contents) and (numbers or len(contents) > 1):
        yield "fraction in a bracket"
    roots = sum(isinstance(factor, Root) and is_numeric(factor) for factor in factors)
    sums = sum(isinstance(factor, Sum) and is_numeric(factor) for factor in factors)
    if roots > 1 or sums > 1 or (roots and sums):
        yield "product of roots"


def _undone_quotient(top: Node, bottom: Node) -> Iterator[str]:
    if any(isinstance(part, Quotient) for side in (top, bottom) for part in walk(side)):
        yield "fraction in a fraction"
    if bottom == Number(Fraction(1)):
        yield "fraction over 1"
    contents = _content(top), _content(bottom)
    if not coprime(*contents) and 0 not in contents:
        yield "fraction not in lowest terms"
    common = monomial(top)[1].keys() & monomial(bottom)[1].keys()
    if common or share_a_factor(top, bottom):
        yield "common factor"
    if isinstance(bottom, Root) and is_numeric(bottom):
        radicand = monomial(bottom.radicand)[0].numerator
        if isinstance(top, Root) or math.gcd(contents[0].numerator, radicand) > 1:
            yield "product of roots"


def _content(node: Node) -> Fraction:
    """Return the numeric factor that all terms, or factors, share."""
    if isinstance(node, Product):
        return math.prod(map(_content, node.factors), start=Fraction(1))
    terms = list(_flat(node.terms)) if isinstance(node, Sum) else [node]
    numbers = [monomial(term)[0] for term in terms]
    if len(numbers) == 1:
        return numbers[0]
    top = math.gcd(*(number.numerator for number in numbers))
    return Fraction(top, math.lcm(*(number.denominator for number in numbers)))


def _undone_power(base: Node, exponent: Node) -> Iterator[str]:
    if isinstance(exponent, Number) and exponent.value in (0, 1):
        yield "power of 0 or 1"
    elif is_rational(base) and is_rational(exponent):
        if isinstance(exponent, Number) and exponent.value.denominator == 1:
            yield from () if base == Number(Fraction(10)) else ("power of a number",)
        elif isinstance(base, Number):
            yield from _undone_root(base, monomial(exponent)[0].denominator)
    elif isinstance(base, Power | Product | Quotient | Root) or base == Symbol("i"):
        yield f"power of a {type(base).__name__.lower()}"
    elif isinstance(base, Sum) and is_numeric(base) and isinstance(exponent, Number):
        yield "power of a sum of numbers"


def _undone_root(radicand: Node, index: int) -> Iterator[str]:
    coefficient, powers = monomial(radicand)
    if any(isinstance(part, Root) for part in walk(radicand)):
        yield "root in a root"
    if radicand == Number(Fraction(1)):
        yield "root of a power"
    inside = [coefficient.numerator, coefficient.denominator] if not isinstance(radicand, Sum) else []
    if coefficient < 0 or any(_has_power(abs(number), index) for number in inside):
        yield "root of a power"
    if any(exponent >= index for exponent in powers.values()):
        yield "root of a power"


def _has_power(number: int, index: int) -> bool:
    """Return True for a factor that is a power of the index.

    For a large number only small factors are tried.
    """
    if number < 2:
        return number == 0
    largest = MAX_BASE if number > MAX_RADICAND else min(MAX_BASE, round(number ** (1 / index)) + 1)
    if any(number % base**index == 0 for base in range(2, largest + 1)):
        return True
    parts = [part for part in range(2, index) if index % part == 0]
    return any(round(number ** (1 / part)) ** part == number for part in parts if number <= MAX_RADICAND)


def has_form(tree: Node, expected: Node, question: str) -> bool:
    """Check the reference's form where the question asks for it.

    That is so where it says factor, expand or simplify, or states what equals the reference.
    """
    stated = [formula for formula in formulas(question) if not isinstance(formula, Number | Symbol)]
    same = [formula for formula in stated if equal_values(formula, last_side(expected))]
    if not same and not _RE["asks_for_form"].search(question):
        return True
    given, wanted = last_side(tree), last_side(expected)
    spelled = canonical(given)
    is_echo = spelled != canonical(wanted) and any(spelled == canonical(formula) for formula in same)
    brackets, asked = _num_brackets(given), _num_brackets(wanted)
    is_opened = brackets < asked or (asked == 0 and brackets > (not isinstance(given, Sum)))
    return not is_echo and not is_opened and _num_fractions(given) == _num_fractions(wanted)


def _num_brackets(node: Node) -> int:
    """Count multiplied or raised sums, with multiplicity."""
    count = 0
    for part in walk(node):
        if isinstance(part, Product):
            count += sum(isinstance(factor, Sum) for factor in part.factors)
        if isinstance(part, Power) and isinstance(part.base, Sum):
            count += int(part.exponent.value) if isinstance(part.exponent, Number) else 1
    return count


def _num_fractions(node: Node) -> int:
    """Count fractions with a letter below."""
    return sum(isinstance(part, Quotient) and not is_numeric(part.bottom) for part in walk(node))


def formulas(question: str) -> list[Node]:
    """Return a question's formulas, from dollar signs or between words."""
    marked = [next(filter(None, match.groups())) for match in _RE["formula"].finditer(question[:MAX_QUESTION])]
    texts = marked or _RE["words"].split(question[:MAX_QUESTION])
    trees = [tree for text in texts[:MAX_FORMULAS] if (tree := read_tree(text.strip(" ,.?:;"))) is not None]
    return [side for tree in trees for side in (tree.members if isinstance(tree, Grouping) else (tree,))]


def is_respelled(answer: str, gold: str, question: str) -> bool:
    """Check that a number is respelled where the question asks for it.

    A power of ten that the question states is what it asks to compute, in whatever words.
    """
    given, wanted, asked = map(_respelled, (answer, gold, question[:MAX_QUESTION]))
    if not _RE["asks_for_spelling"].search(question) and not _RE["power_of_ten"].search(given):
        return True
    is_stated = re.search(rf"(?<![\d.]){re.escape(given)}(?!\.?\d)", asked) is not None
    return not is_stated or _marks_of(given) == _marks_of(wanted)


def _respelled(text: str) -> str:
    return _RE["blank"].sub("", _RE["mixed"].sub("+", _RE["comma"].sub("", plain(text))))


def _marks_of(number: str) -> set[str]:
    """Return the notation of a number: fraction, decimal, percentage, power."""
    return {mark for mark in "./+%^e" if mark in number}


MAX_QUESTION = 4_000
"""Characters."""
MAX_FORMULAS = 30
MAX_RADICAND = 10**9
MAX_BASE = 1_000
