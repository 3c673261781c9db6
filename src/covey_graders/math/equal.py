"""Compare formulas as text, trees, relations and values, in bounded time."""

from covey_graders.math.formulas.forms import canonical, has_words, is_compound, without_words
from covey_graders.math.formulas.nodes import Node, is_equation, last_side
from covey_graders.math.formulas.relations import has_dots, same_relation, same_with_dots
from covey_graders.math.formulas.trees import read_tree
from covey_graders.math.formulas.words import FUNCTIONS, tokens_of
from covey_graders.math.reading.normalize import TEXT_COMMAND
from covey_graders.math.reading.units import is_date, measures_of, without_unit
from covey_graders.tables import patterns_beside

_RE = patterns_beside(__file__)

MAX_FORMULA = 300
"""Longest formula that is read, in characters."""


def same_spelling(answer: str, gold: str) -> bool:
    """Return True for equal text, ignoring blanks, signs, articles and case.

    Single letters are symbols, for which case matters.
    """
    spellings = [
        _RE["spelling"].sub(
            lambda m: _RE["stop"].sub("", m[1] or m[2] or "").replace(" ", ""),
            _RE["word"].sub(lambda m: m[1].lower().removesuffix("s"), " ".join(text.replace("\u2260", "\\ne").split())),
        )
        for text in (TEXT_COMMAND.sub(r"\1", text).replace("\\neq", "\\ne") for text in (answer, gold))
    ]
    return spellings[0] == spellings[1] != ""


def same_formula(answer: str, gold: str) -> bool:
    """Return True for exactly equal mathematics; unreadable text is compared."""
    if same_spelling(answer, gold) or same_spelling(answer, _RE["base"].sub("", gold)):
        return True
    if max(len(answer), len(gold)) > MAX_FORMULA or is_date(gold) or (_is_wording(answer) and _is_wording(gold)):
        return False
    tree, expected = read_tree(without_unit(answer)), read_tree(without_unit(gold))
    measures = measures_of(gold)
    if len(measures) > 1 or (expected is not None and is_compound(last_side(expected))):
        return measures_of(answer) == measures != set()
    if tree is None or expected is None:
        return False
    if _RE["denial"].search(answer):
        return same_relation(tree, expected)
    return _same_tree(tree, expected if has_words(tree) else without_words(expected))


def _is_wording(text: str) -> bool:
    """Return True for words: letters in another order are another one."""
    is_letters = all(token.isalpha() and len(token) == 1 for token in tokens_of(text))
    return is_letters and any(run not in FUNCTIONS for run in _RE["wording"].findall(text))


def _same_tree(answer: Node, gold: Node) -> bool:
    """Compare up to the order of terms, then by relation and value."""
    stated = gold if is_equation(gold) else last_side(gold)
    if canonical(answer) in (canonical(gold), canonical(stated)):
        return True
    if has_dots(answer) or has_dots(gold):
        return same_with_dots(answer, gold)
    return same_relation(answer, gold)
