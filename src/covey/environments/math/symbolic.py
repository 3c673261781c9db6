"""Answers that are mathematics but not plain numbers, compared by math-verify.

Neither its time nor its memory is bounded, and its own time limits are alarms that work in a main thread only, so they
are off here: `math_verification` calls these functions in worker processes that can be killed. For that this module
imports nothing heavy until it is called.
"""

import logging
import re
from fractions import Fraction

from covey.environments.math.formulas.forms import (
    canonical,
    has_words,
    is_compound,
    num_terms,
    without_units,
)
from covey.environments.math.formulas.nodes import Node, is_equation, last_side
from covey.environments.math.formulas.relations import has_dots, same_relation, same_value, same_with_dots
from covey.environments.math.formulas.trees import read_tree
from covey.environments.math.normalize import TEXT_COMMAND, in_latex
from covey.environments.math.numerals import read_values
from covey.environments.math.units import is_date, measures_of, without_unit

MAX_SYMBOLIC = 300
"""Longest expression that is given to math-verify, in characters."""
MAX_TERMS_OF_ANSWER = 500
"""Most terms that an answer may have once it is multiplied out."""

_SPELLING = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}|\\(?:left|right|!|,|;| )|\\([$%])"
    r"|\$|(?<!\d) | (?!\d)|\.(?!\d|\\over)"
)
"""What does not tell texts with single blanks apart. Between digits a blank does, before them a point."""
_STOP = re.compile(r"\.(?!\d)")
_WORD = re.compile(r"(?<![\\A-Za-z])(?:(?:[Aa]n?|[Tt]he) (?=[A-Za-z]{3}))?([A-Za-z]{2,})(?![A-Za-z])")
"""With its article."""
_BRACKETS = re.compile(r"\{[^(){}\[\]^]*\}|[(\[][^(){}\[\]^]*[)\]]")
"""Without a power inside, nor other brackets."""
_TOWER = re.compile(
    r"\^[\s-]*(?:\\[A-Za-z]+\s*)*(?:[({\[|]|\\l?[vV]ert)"
    r"|\^[\s-]*(?:[\d.]+|[A-Za-z]|#|\\[A-Za-z]+\s*#{0,2})[\s{]*\^"
)
_LARGE = re.compile(r"\d{5,}\s*!|\^(?:[\s({\[-]|\\[A-Za-z]+)*\d{5,}|!\s*!")
_BASE = re.compile(r"(?<=\d)_(?:\d|\{\d{1,2}\})\s*$")
"""Which of digits need not be said: `1011_2`."""
_DENIAL = re.compile(
    r"\\(?:neg|lnot|not|neq?)(?![A-Za-z])|[\u00ac\u2260]|^\s*(?:[<>\u2264\u2265]|\\[lg](?:eq?|t|eqslant)(?![A-Za-z]))"
)
"""Also what a value is only less or more than."""


def same_spelling(answer: str, gold: str) -> bool:
    """Return whether both are equal as text: blanks, dollar signs, stops, text commands, articles, the plural and the
    case of words aside. Single letters are symbols, which a capital makes others."""
    spellings = [
        _SPELLING.sub(
            lambda m: _STOP.sub("", m[1] or m[2] or "").replace(" ", ""),
            _WORD.sub(lambda m: m[1].lower().removesuffix("s"), " ".join(text.replace("\u2260", "\\ne").split())),
        )
        for text in (TEXT_COMMAND.sub(r"\1", text).replace("\\neq", "\\ne") for text in (answer, gold))
    ]
    return spellings[0] == spellings[1] != ""


def equal_at_sight(answer: str, gold: str) -> bool | None:
    """Return the verdict that needs no algebra, None where there is none.

    Equal as text, or but for the order of terms, is right. Long texts, towers of powers, what denies (`\\neg`),
    formulas whose values differ and those that multiplying out would make too long are wrong without algebra.
    """
    # The same text, or one that cannot be read safely
    if same_spelling(answer, gold) or same_spelling(answer, _BASE.sub("", gold)):
        return True
    if max(len(answer), len(gold)) > MAX_SYMBOLIC or is_date(gold):
        return False
    # The same tree, or relation
    tree, expected = read_tree(without_unit(answer)), read_tree(without_unit(gold))
    if _DENIAL.search(answer):
        return tree is not None and expected is not None and same_relation(tree, expected) is True
    measures = measures_of(gold)
    if len(measures) > 1 or (expected is not None and is_compound(last_side(expected))):
        return measures_of(answer) == measures != set()
    if tree is not None and expected is not None and not has_words(tree):
        expected = without_units(expected)
    is_same = tree is not None and expected is not None and _is_same(tree, expected)
    if is_same or has_tower(answer):
        return is_same
    if tree is None or expected is None:
        return None
    if has_dots(tree) or has_dots(expected):
        return same_with_dots(tree, expected)
    related = same_relation(tree, expected)
    if related is not None:
        return related
    # Numbers at random points tell most others apart
    if num_terms(tree) > MAX_TERMS_OF_ANSWER:
        return False
    return same_value(tree, expected)


def _is_same(answer: Node, gold: Node) -> bool:
    """Compare but for the order of terms, what is said of a name without the name too."""
    stated = gold if is_equation(gold) else last_side(gold)
    return canonical(answer) in (canonical(gold), canonical(stated))


def has_tower(text: str) -> bool:
    """Check for a power in an exponent, and the factorial or power of a large number. In `x^2+y^2` there is none."""
    before, text = "", text.replace("**", "^")
    if _LARGE.search(text):
        return True
    # Each bracket without a power inside becomes one sign: an exponent that opens one still has a power inside
    while before != text:
        before, text = text, _BRACKETS.sub("#", text)
    return _TOWER.search(text) is not None


def symbolic_equal(answer: str, gold: str) -> bool:
    """Return whether both are exactly equal as mathematics. Long texts and towers of powers are refused (False)."""
    # Without sympy, where that is enough
    at_sight = equal_at_sight(answer, gold)
    if at_sight is not None:
        return at_sight
    import sympy
    from math_verify import parse, verify

    _silence()
    # A number is compared exactly
    expected = parse(f"${in_latex(gold)}$", parsing_timeout=None)
    number = read_values(answer, strict=True)
    if expected and len(number) == 1 and isinstance(expected[0], sympy.Expr) and not expected[0].free_symbols:
        return any(_exactly(expected[0], value) for value in number[0].meanings())
    # Else math_verify decides
    found = parse(f"${in_latex(answer)}$", parsing_timeout=None)
    return bool(verify(expected, found, float_rounding=12, timeout_seconds=None))


def _exactly(expression: object, value: Fraction) -> bool:
    """Compare without rounding: 3.464 is not 2 sqrt 3, whatever the precision of a comparison."""
    import sympy

    difference = sympy.nsimplify(expression, rational=True) - sympy.Rational(value.numerator, value.denominator)
    return bool(sympy.simplify(difference) == 0)


def trl_accuracy(completion: str, gold: str) -> float | None:
    """Compute TRL's accuracy_reward of a completion where the gold answer is bare LaTeX."""
    return trl_verdict(completion, f"${gold}$")


def trl_verdict(
    completion: str, solution: str, *, parse_seconds: int | None = None, verify_seconds: int | None = None
) -> float | None:
    """Compute TRL's accuracy_reward for one completion (huggingface/trl f2cd5771): None where the solution does not
    parse.

    The solution is read by math-verify's defaults. Of the completion only LaTeX counts, a box first, and only one with
    an anchor (a box, or an environment after the word answer); the first match decides. The limits are alarms, for
    which this must be the main thread.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    _silence()
    # Parse and verify as TRL's accuracy_reward does
    expected = parse(solution, parsing_timeout=parse_seconds)
    if not expected:
        return None
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    found = parse(completion, extraction_config=[latex], extraction_mode="first_match", parsing_timeout=parse_seconds)
    return float(verify(expected, found, timeout_seconds=verify_seconds))


def math_verify_accuracy(completion: str, gold: str) -> float:
    """Return what math-verify says with its own settings: 1 or 0."""
    from math_verify import parse, verify

    _silence()
    expected = parse(f"${gold}$", parsing_timeout=None)
    return float(verify(expected, parse(completion, parsing_timeout=None), timeout_seconds=None))


def torchrl_equal(answer: str, gold: str) -> bool:
    """Compare an answer tag with the content of a box as TorchRL does (pytorch/rl ae9719f1).

    The answer is math-verify's reference there and the gold its candidate, and neither is marked as mathematics; so
    LaTeX is read only where it brings its own dollar signs, and else the last number of each side decides.
    """
    from math_verify import parse, verify

    _silence()
    return bool(verify(parse(answer, parsing_timeout=None), parse(gold, parsing_timeout=None), timeout_seconds=None))


def _silence() -> None:
    """Silence math-verify, which warns that its time limits are off: here they are off on purpose."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
