"""An answer's claims beside its value, and contradictions between them.

Opposite words (profit and loss, north and south) and names (`x = 5`, `y = 5`). A claim of one side alone is no
contradiction: the question may have made it.
"""

import re
from collections.abc import Iterator

from covey_graders.math.formulas.forms import canonical, has_words, letters_of
from covey_graders.math.formulas.nodes import Grouping, Node, Product, Symbol, is_name, is_numeric
from covey_graders.math.formulas.trees import read_tree
from covey_graders.math.formulas.words import GREEK
from covey_graders.math.reading.normalize import plain
from covey_graders.tables import patterns_beside, table_beside

_RE = patterns_beside(__file__)


def contradict(answer: str, gold: str) -> bool:
    """Return True for claims that cannot hold of one value."""
    given, wanted = _sides(answer), _sides(gold)
    if any(given[group] != wanted[group] for group in given.keys() & wanted.keys()):
        return True
    ours, theirs = dict(_names(answer)), dict(_names(gold))
    if {UNSOLVED, "letter"} <= ours.keys() ^ theirs.keys():  # 2x = 5 is not x = 5
        return True
    return any(ours[kind] != theirs[kind] for kind in ours.keys() & theirs.keys())


def _sides(text: str) -> dict[int, frozenset[int]]:
    """Return which of the opposites of each group a text names."""
    words = _RE["direction"].sub(r"degrees side\1", plain(text[:MAX_LENGTH])).lower()
    found: dict[int, frozenset[int]] = {}
    for group, patterns in enumerate(_PATTERNS):
        named = frozenset(side for side, pattern in enumerate(patterns) if pattern.search(words))
        words = _RE["bounds"].sub(" ", words) if group == 0 else words
        if named:
            found[group] = named
    return found


def _names(text: str) -> Iterator[tuple[str, str]]:
    """Yield kind and spelling of names with one value."""
    tree = read_tree(text[:MAX_LENGTH]) if "=" in text else None
    if isinstance(tree, Grouping) and tree.kind == "relation =":
        names = [member for member in tree.members if is_name(member) and not is_numeric(member)]
        named = [side for side in tree.members[:-1] if not names and letters_of(side) and not has_words(side)]
        if len(names) == 1 and _kind(names[0]) != WORD:
            yield _kind(names[0]), _spelled(names[0])
        elif len(named) == 1 and is_numeric(tree.members[-1]):
            yield UNSOLVED, ""


def _kind(name: Node) -> str:
    """Return a name's kind; only names of one kind contradict."""
    match name:
        case Symbol(letter):
            return "index" if "_" in letter else "letter" if letter in GREEK or len(letter) == 1 else letter[:5]
        case Product((first, *_), is_applied) if is_applied or first in _MARKS:
            return "value" if is_applied else f"angle {len(_spelled(name))}"
        case Product(factors):
            is_figure = all(isinstance(factor, Symbol) and factor.name.isupper() for factor in factors)
            return f"figure {len(factors)}" if is_figure else WORD
    return type(name).__name__


def _spelled(name: Node) -> str:
    """Spell a name without angle marks, in either direction."""
    factors = name.factors if isinstance(name, Product) else (name,)
    letters = [factor.name for factor in factors if isinstance(factor, Symbol) and factor not in _MARKS]
    if len(letters) < 2 or not all(isinstance(factor, Symbol) for factor in factors):
        kept = tuple(factor for factor in factors if factor not in _MARKS)
        return canonical(Product(kept) if len(kept) > 1 else (kept or (name,))[0])
    return "".join(sorted(letters) if TRIANGLE in factors else min(letters, letters[::-1]))


TRIANGLE = Symbol("\\triangle")
UNSOLVED = "unsolved"
WORD = "text:"
_MARKS = (Symbol("\\angle"), TRIANGLE, Symbol("m"))
_PATTERNS = [
    [re.compile(rf"(?<![a-z])(?:{'|'.join(map(str.strip, side.split(',')))})(?![a-z])") for side in group.split(";")]
    for group in re.sub(r"\n +", " ", table_beside(__file__)["opposites"].strip()).split("\n")
]
MAX_LENGTH = 200
"""Characters that are looked at."""
