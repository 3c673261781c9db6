"""Compare formulas as text, trees, relations and values, in bounded time."""

from covey_graders.math.formulas.forms import canonical, has_words, is_compound, without_words
from covey_graders.math.formulas.nodes import Node, is_equation, last_side
from covey_graders.math.formulas.relations import has_dots, same_relation, same_with_dots
from covey_graders.math.formulas.trees import read_tree
from covey_graders.math.formulas.words import AND, FUNCTIONS, SETS, tokens_of
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
        for text in (
            _RE["quoted"].sub(r"\1", TEXT_COMMAND.sub(r"\1", text)).replace("\\neq", "\\ne") for text in (answer, gold)
        )
    ]
    return spellings[0] == spellings[1] != ""


def same_formula(answer: str, gold: str) -> bool:
    """Return True for exactly equal mathematics; unreadable text is compared."""
    if same_spelling(answer, gold) or same_spelling(answer, _RE["base"].sub("", gold)):
        return True
    if max(len(answer), len(gold)) > MAX_FORMULA or is_date(gold) or _are_other_words(answer, gold):
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


def _are_other_words(answer: str, gold: str) -> bool:
    """Return True for the same letters or words in another order.

    Words joined by "and" or in a set have no order, nor has `abc`, which may be a product.
    """
    if list(gold) == sorted({*gold}) and gold.isalpha() and gold.islower() and not _RE["wording"].search(gold):
        return False
    (said, _), (wanted, is_free) = _members_of(answer), _members_of(gold)
    if wanted and (said or any(map(_RE["digit"].search, wanted))):
        return said != wanted and not (is_free and sorted(said) == sorted(wanted))
    found = [_RE["wording"].findall(_RE["command"].sub(" ", text)) for text in (answer, gold)]
    ours, theirs = ([word for word in words if word not in FUNCTIONS] for words in found)
    return ours != theirs and sorted(ours) == sorted(theirs) and not is_free and "\\{" not in gold


def _members_of(text: str) -> tuple[list[str], bool]:
    """Return the words of a list, and whether "and" joins them.

    A digit right behind a letter is one, as in H2O; none where the text is mathematics.
    """
    text = TEXT_COMMAND.sub(r" \1 ", text)
    tokens = tokens_of(text)
    members = "".join("," if token in SETS["separators"] else token for token in tokens).split(",")
    is_spelled = all(map(_RE["spelled"].fullmatch, members)) and FUNCTIONS.isdisjoint(_RE["name"].findall(text))
    return [name.lower() if len(name) > 1 else name for name in members] if is_spelled else [], AND in tokens


def _same_tree(answer: Node, gold: Node) -> bool:
    """Compare up to the order of terms, then by relation and value."""
    stated = gold if is_equation(gold) else last_side(gold)
    if canonical(answer) in (canonical(gold), canonical(stated)):
        return True
    if has_dots(answer) or has_dots(gold):
        return same_with_dots(answer, gold)
    return same_relation(answer, gold)
