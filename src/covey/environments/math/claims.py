"""What an answer says beside its value, and where two answers contradict each other in it.

Opposite words (profit and loss, north and south), names (`x = 5`, `y = 5`) and units that measure different things. What
only one side says is no contradiction: the question may have said it.
"""

import re
from collections.abc import Iterator

from covey.environments.math.formulas.forms import canonical
from covey.environments.math.formulas.nodes import Group, Node, Product, Symbol, is_name, is_numeric
from covey.environments.math.formulas.trees import read_tree
from covey.environments.math.formulas.words import GREEK
from covey.environments.math.normalize import plain


def contradict(answer: str, gold: str) -> bool:
    """Check whether both say something of the value that cannot hold of one value."""
    given, wanted = _sides(answer), _sides(gold)
    if any(given[group] != wanted[group] for group in given.keys() & wanted.keys()):
        return True
    ours, theirs = dict(_names(answer)), dict(_names(gold))
    return any(ours[kind] != theirs[kind] for kind in ours.keys() & theirs.keys())


def _sides(text: str) -> dict[int, frozenset[int]]:
    """Return which of the opposites of each group a text names."""
    words = _DIRECTION.sub(r"degrees side\1", plain(text[:MAX_LENGTH])).lower()
    found: dict[int, frozenset[int]] = {}
    for group, patterns in enumerate(_PATTERNS):
        named = frozenset(side for side, pattern in enumerate(patterns) if pattern.search(words))
        words = _BOUNDS.sub(" ", words) if group == 0 else words
        if named:
            found[group] = named
    return found


def _names(text: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and the spelling of each name that a text gives its value, but none that it gives two values."""
    tree = read_tree(text[:MAX_LENGTH]) if "=" in text else None
    if isinstance(tree, Group) and tree.kind == "relation =":
        names = [member for member in tree.members if is_name(member) and not is_numeric(member)]
        if len(names) == 1 and _kind(names[0]) != WORD:
            yield _kind(names[0]), _spelled(names[0])


def _kind(name: Node) -> str:
    """Return what kind of thing is named: only names of one kind contradict each other, and words never do."""
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
    """Spell a name without the marks of an angle, in whichever direction its letters go."""
    factors = name.factors if isinstance(name, Product) else (name,)
    kept = tuple(factor for factor in factors if factor not in _MARKS)
    return canonical(Product(kept) if len(kept) > 1 else (kept or (name,))[0])


WORD = "text:"
_MARKS = (Symbol("\\angle"), Symbol("\\triangle"), Symbol("m"))
_DIRECTION = re.compile(r"degrees? *([NSEW])(?![A-Za-z])")
_BOUNDS = re.compile(
    r"\b(?:at (?:most|least)|(?:more|less|fewer|greater) than|no (?:more|less|fewer)(?: than)?|up to|or (?:more|less|fewer))\b"
)
OPPOSITES = (
    (r"at most|no (?:more|greater) than|up to|or (?:less|fewer)", r"at least|no (?:less|fewer) than|or more",
     r"(?<!no )(?:more|greater|larger) than", r"(?<!no )(?:less|fewer|smaller) than", r"exactly"),
    (r"a\.?m|morning", r"p\.?m|afternoon|evening"),
    (r"increas\w+|gain\w*|rise|rises|rose|grow\w*|growth|up|upwards?|more|higher|above|older"
     r"|longer|taller|larger|heavier|faster|surplus|profits?",
     r"decreas\w+|loss|losses|lost|lose|falls?|fell|drop\w*|declin\w+|reduc\w+|down|downwards?|less|fewer|lower|below|younger"
     r"|shorter|smaller|lighter|slower|deficit"),
    (r"north\w*|siden", r"south\w*|sides"), (r"(?:north|south)?east\w*|sidee", r"(?:north|south)?west\w*|sidew"),
    (r"left|leftwards?", r"right|rightwards?"), (r"clockwise", r"counter-?\s?clockwise|anti-?\s?clockwise"),
    (r"upstream", r"downstream"), (r"inside|interior|internal\w*", r"outside|exterior|external\w*"),
    (r"odd", r"even"), (r"early", r"late"), (r"largest|greatest|biggest", r"smallest"), (r"positive", r"negative"), (r"max|maxim\w+", r"minim\w+"),
    (r"before|earlier|ago", r"after|later|from now"), (r"convergent|converges?", r"divergent|diverges?"),
    (r"parallel", r"perpendicular|orthogonal"), (r"rational", r"irrational"), (r"prime", r"composite"),
    (r"acute", r"obtuse"), (r"wins?|won", r"loses?|lost", r"draws?|ties?"), (r"heads?", r"tails?"),
    (r"b\.?c(?:\.?e)?", r"a\.?d|c\.?e"), (r"yes", r"no(?! solutions?| real)"), (r"true", r"false"),
    (r"always", r"never", r"sometimes"), (r"deposit\w*|credit\w*", r"withdr\w+|debit\w*"), (r"boys?|males?|men|man", r"girls?|females?|women|woman"),
    (r"mon(?:day)?s?", r"tue(?:sday)?s?", r"wed(?:nesday)?s?", r"thu(?:rsday)?s?", r"fri(?:day)?s?", r"sat(?:urday)?s?", r"sundays?"),
    (r"january", r"february", r"march", r"april", r"may", r"june", r"july", r"august", r"september", r"october", r"november", r"december"),
    (r"area", r"perimeter", r"volume", r"circumference", r"radius", r"diameter"), (r"mean|average", r"median", r"mode", r"range"),
    (r"red", r"blue", r"green", r"yellow", r"black", r"white", r"orange", r"purple", r"pink", r"brown"),
    (r"local|relative", r"global|absolute"), (r"horizontal\w*", r"vertical\w*"), (r"concave up\w*|convex", r"concave down\w*"),
    (r"integers?|\\mathbb *\{? *z\b", r"natural\w*|\\mathbb *\{? *n\b", r"reals?|\\mathbb *\{? *r\b", r"\\mathbb *\{? *c\b"),
)  # fmt: skip
"""Groups of words of which one value has one: patterns of the sides, the bounds first."""
_PATTERNS = [[re.compile(rf"(?<![a-z])(?:{side})(?![a-z])") for side in group] for group in OPPOSITES]
MAX_LENGTH = 200
"""Characters that are looked at."""
