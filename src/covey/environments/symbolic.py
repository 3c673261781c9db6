"""Answers that are mathematics but not plain numbers, compared by math-verify.

Its time is not bounded and its own time limits work in a main thread only, so they are off here: call these functions
in a worker process with a deadline (`workers`). For that this module imports nothing heavy until it is called.
"""

import logging
import re
from fractions import Fraction

from covey.environments.numerals import read_values

MAX_SYMBOLIC = 300
"""Longest expression that is given to math-verify, in characters."""

_SPELLING = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}|\\(?:left|right|!|,|;| )|\\([$%])|[\s$.]+")
_TOWER = re.compile(r"\^\s*\{?[^{}^]{0,40}\^|\d{5,}\s*!|\^\s*\{?\s*-?\d{5,}|!\s*!")


def same_spelling(answer: str, gold: str) -> bool:
    """Equal as text, blanks, dollar signs, text commands and case aside."""
    spellings = [
        _SPELLING.sub(lambda m: (m[1] or m[2] or "").replace(" ", ""), text).lower() for text in (answer, gold)
    ]
    return spellings[0] == spellings[1] != ""


def symbolic_equal(answer: str, gold: str) -> bool:
    """Exactly equal as mathematics. Long texts and towers of powers are refused (False)."""
    if same_spelling(answer, gold):
        return True
    if max(len(answer), len(gold)) > MAX_SYMBOLIC or _TOWER.search(answer):
        return False
    import sympy
    from math_verify import parse, verify

    _silence()
    expected = parse(f"${gold}$", parsing_timeout=None)
    number = read_values(answer, strict=True)
    if expected and len(number) == 1 and isinstance(expected[0], sympy.Expr) and not expected[0].free_symbols:
        return any(_exactly(expected[0], value) for value in number[0])
    found = parse(f"${answer}$", parsing_timeout=None)
    return bool(verify(expected, found, float_rounding=12, timeout_seconds=None))


def _exactly(expression: object, value: Fraction) -> bool:
    """No rounding: 3.464 is not 2 sqrt 3, whatever the precision of a comparison."""
    import sympy

    difference = sympy.nsimplify(expression, rational=True) - sympy.Rational(value.numerator, value.denominator)
    return bool(sympy.simplify(difference) == 0)


def trl_accuracy(completion: str, gold: str) -> float | None:
    """TRL's accuracy_reward for one completion (huggingface/trl f2cd5771): None where the gold does not parse.

    The gold is read by math-verify's defaults. Of the completion only LaTeX counts, a box first, and only one with an
    anchor (a box, or an environment after the word answer); the first match decides.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    _silence()
    expected = parse(f"${gold}$", parsing_timeout=None)
    if not expected:
        return None
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    found = parse(completion, extraction_config=[latex], extraction_mode="first_match", parsing_timeout=None)
    return float(verify(expected, found, timeout_seconds=None))


def _silence() -> None:
    """math-verify warns that its time limits are off; here they are off on purpose."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
