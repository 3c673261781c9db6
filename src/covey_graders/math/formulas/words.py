"""The words of mathematical notation, from `words.toml`."""

import re

from covey_graders.math.reading.normalize import in_latex, unified
from covey_graders.tables import steps, substitute, table_beside

MAX_TOKENS = 400

_TOKEN = re.compile(
    r"\d*\.\d*\\overline\{\d+\}"  # 0.1\overline{6}
    r"|\d+(?:\.\d+)?|\.\d+"
    r"|\\[A-Za-z]+|\\."
    r"|\S",
    re.DOTALL,
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_BRACKET = re.compile(r"[(\[|]|\\\{")
_JOINT = re.compile(r"(?:,[\s~]*)?(?:\\text *\{ *(?:, *)?(and|or) *\}|(?:\\?[ ~]|(?<=,))(and|or)(?:\\?[ ~]))")
"""Separator of the last two members of a list, with a comma before it or not."""
_DOTS = re.compile(r"(?:(?<=[,;:+*-])|(?<=[,;:+*-] ))(?:\.{2,3}|\u2026)|\\[lc]?dots[bcmio]?(?![A-Za-z])")
_SIZES = re.compile(r"\\(?:left|right|middle)(?![A-Za-z])|\\,")
_BEGIN, _END = r"^[\s$]*(?:\\(?:text|mathrm|mbox) *\{ *)?(?i:", r")[ .}$]*$"
_GAP = r"(?:[ ~]|\\[,;: ])*"
_OUTWARD = re.compile(r"\]([^][(),;]*[,;][^][(),;]*)([][])|\[([^][(),;]*[,;][^][(),;]*)\[")
"""An interval without one of its ends or both, such as `]2,5[`."""
_RATIO = re.compile(rf"(?<=\d)(?:{_GAP}\\(?:text|mathrm|mbox) ?\{{{_GAP}to{_GAP}\}}{_GAP}| to )(?=\d)")


def tokens_of(text: str) -> list[str]:
    """Split a formula into numbers, commands and characters."""
    text = in_latex(unified(text[: 4 * MAX_TOKENS]))
    for written, short in _TABLE["spellings"]:
        text = text.replace(written, short)
    text = substitute(_SIZES.sub("", text), _PHRASES)
    text = _JOINT.sub(lambda match: f"{AND} " if "and" in match.groups() else ";", text)
    text = _DOTS.sub(lambda _: f"{DOTS} ", _OUTWARD.sub(_inward, text))
    text = _RATIO.sub(":", text)
    if not _BRACKET.search(text):  # in (1,234) the comma may stand between two members
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    return [token for token in _TOKEN.findall(text.strip(" .")) if token not in _SKIPPED]


def _inward(interval: re.Match[str]) -> str:
    """Write `]2,5[` as `(2,5)`."""
    open_low, end, closed_low = interval.groups()
    return f"[{closed_low})" if open_low is None else f"({open_low}{')' if end == '[' else ']'}"


_TABLE = table_beside(__file__)
_PHRASES = steps(
    (pattern.replace("^[[", _BEGIN).replace("]]$", _END), formula) for pattern, formula in _TABLE["phrases"]
)
SETS = {name: frozenset(words.split()) for name, words in _TABLE["sets"].items()}
"""Commands and signs by kind."""
_SKIPPED = SETS["skipped"] | {"\\ "}
AND, DOTS = "\\and", "\\ldots"
LESS: dict[str, bool] = _TABLE["less"]
MORE: dict[str, bool] = _TABLE["more"]
"""Signs to whether the end belongs to the interval."""
ORDER = frozenset(LESS | MORE)
BARS: dict[str, str] = _TABLE["bars"]
"""Opening to closing bar."""
RELATIONS = ORDER | SETS["relations"]
GREEK, BINOMIALS, FUNCTIONS = SETS["greek"], SETS["binomials"], SETS["functions"]
SYMBOLS = GREEK | SETS["symbols"]
CALLS = frozenset(f"\\{name}" for name in FUNCTIONS) | BINOMIALS | SETS["calls"]
FAMILIES = {name: family for family, names in _TABLE["families"].items() for name in names.split()}
"""Functions -> their meaning with others."""
WORD = re.compile(r"[^\d+*/^=<>\\{}]*")
"""Characters of a text command that are no mathematics."""
