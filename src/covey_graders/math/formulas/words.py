"""The words of mathematical notation: what a formula is cut into, and what each command stands for.

A command that is in no table here is no notation: a formula that has it cannot be read.
"""

import re

from covey_graders.math.reading.normalize import in_latex, unified

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
_SPELLINGS = (
    ("\\left.", ""),
    ("\\right.", ""),
    ("**", "^"),
    ("\\varnothing", "\\emptyset"),
    ("\\neq", "\\ne"),
    ("\u2260", "\\ne "),
    ("\\langle", "("),
    ("\\rangle", ")"),
    ("\\lbrace", "\\{"),
    ("\\rbrace", "\\}"),
    ("\\lbrack", "["),
    ("\\rbrack", "]"),
)
_JOINT = re.compile(r"(?:,[\s~]*)?(?:\\text *\{ *(?:, *)?(and|or) *\}|(?:\\?[ ~]|(?<=,))(and|or)(?:\\?[ ~]))")
"""Between the last two members of a list, with a comma before it or not."""
_DOTS = re.compile(r"(?:(?<=[,;:+*-])|(?<=[,;:+*-] ))(?:\.{2,3}|\u2026)|\\[lc]?dots[bcmio]?(?![A-Za-z])")
_SIZES = re.compile(r"\\(?:left|right|middle)(?![A-Za-z])|\\,")
_BEGIN, _END = r"^[\s$]*(?:\\(?:text|mathrm|mbox) *\{ *)?(?i:", r")[ .}$]*$"
PHRASES = (
    (re.compile(  # of which x it holds, behind the formula
        r"(?<=\S)(?:[\s,(]|\\[ ,;]|\\q?quad)*(?:(?:\\text ?\{[\s,(]*)?(?:for (?:all|every|each|any|some)|where)\b"
        r"|\\forall(?![A-Za-z])|(?<=[\s,(])[a-z] ?\\in ?\\mathbb ?\{? ?[ZN]).*$", re.DOTALL), ""),
    (re.compile(r"(?<=\S)( ?\+ ?)c(?=[\s$.}]*$)"), r"\1C"),  # the constant of an integral
    (re.compile(  # the x with a property
        r"\\\{ ?[A-Za-z] ?(?:\\in ?(?:\\mathbb ?\{ ?R ?\}|\u211d|\\R) ?)?(?:\\mid(?![A-Za-z])|\\vert|\||:|\\colon)"
        r"(.*)\\\}"), r"\1"),
    (re.compile(_BEGIN + r"all real numbers? (?:except|other than|but)(?: for)? *\}? *(?:[a-z] ?= ?)?(.*?)" + _END),
     r"x \\ne \1"),
    (re.compile(_BEGIN + r"(?:the set of )?(?:all|every|any) (?:real numbers?|reals?)(?: *\}? *x)?" + _END),
     r"(-\\infty,\\infty)"),
    (re.compile(_BEGIN + r"(?:there (?:is|are) )?no (?:real |such |integer )?(?:solution|answer|value|root)s?"
                r"(?: exists?)?|none|(?:the )?(?:empty|null) set" + _END), r"\\emptyset"),
    (re.compile(_BEGIN + r"(?:it )?does not exist|dne" + _END), r"\\text{dne}"),
    (re.compile(_BEGIN + r"infinitely many(?: solutions)?" + _END), r"\\text{infinitely many}"),
    (re.compile(_BEGIN + r"infinity" + _END), r"\\infty"),
    (re.compile(r"(?:\\mathbb ?(?:\{ ?R ?\}|R)|\\R(?![A-Za-z])|\u211d)(?! ?\^)"), r"(-\\infty,\\infty)"),
    (re.compile(r"(?<=infty\)) ?(?:-|\\backslash) ?(?=\\\{)"), r"\\setminus "),
    (re.compile(r"(?<=\d) ?(?:\\text ?\{ ?)?(?:(?i:[ap]\. ?m)\.|(?:[ap]m|[AP]M)\b)\}?"), ""),
)  # fmt: skip
"""What words and signs of sets say as a formula."""
_GAP = r"(?:[ ~]|\\[,;: ])*"
_OUTWARD = re.compile(r"\]([^][(),;]*[,;][^][(),;]*)([][])|\[([^][(),;]*[,;][^][(),;]*)\[")
"""An interval without one of its ends or both, such as `]2,5[`."""
_RATIO = re.compile(rf"(?<=\d)(?:{_GAP}\\(?:text|mathrm|mbox) ?\{{{_GAP}to{_GAP}\}}{_GAP}| to )(?=\d)")


def tokens_of(text: str) -> list[str]:
    """Cut a formula into numbers, commands and single characters, without blanks, sizes and dollar signs."""
    text = in_latex(unified(text[: 4 * MAX_TOKENS]))
    for written, short in _SPELLINGS:
        text = text.replace(written, short)
    text = _SIZES.sub("", text)
    for pattern, formula in PHRASES:
        text = pattern.sub(formula, text)
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


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SKIPPED = _words(
    r"\left \right \middle \big \Big \bigg \Bigg \bigl \bigr \Bigl \Bigr \biggl \biggr \displaystyle \textstyle"
    r" \limits \nolimits \, \; \: \> \! \quad \qquad \( \) \[ \] \$ $ ~"
) | {"\\ "}
LESS = {"<": False, "\\lt": False, "≤": True, "\\le": True, "\\leq": True, "\\leqslant": True}
"""Signs to whether the end belongs to the interval."""
MORE = {">": False, "\\gt": False, "≥": True, "\\ge": True, "\\geq": True, "\\geqslant": True}
ORDER = frozenset(LESS | MORE)
RELATIONS = ORDER | _words(
    r"= ≈ : \in ∈ \approx \equiv \to \rightarrow \implies \Rightarrow \mid \ne \subset \subseteq"
    r" \cup ∪ \cap ∩ \setminus"
)
AND = "\\and"
DOTS = "\\ldots"
SEPARATORS = _words(r", ; & \\ \and")
SIGNS = _words(r"+ - \pm \mp ±")
BINARY = _words(r"* / \cdot \times \div \ast")
DIVISIONS = _words(r"/ \div")
FRACTIONS = _words(r"\frac \dfrac \tfrac \cfrac")
ROOTS = _words(r"\sqrt")
GROUPS = _words("{")
MATRICES = _words(r"\begin")
BINOMIALS = _words(r"\binom \dbinom \tbinom")
OPENING = _words(r"( [ \{")
SETS = _words(r"\{")
CLOSING = _words(r") ] \}")
BARS = {"|": "|", "\\|": "\\|", "\\lvert": "\\rvert", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
"""Opening to closing bar."""
TEXTS = _words(
    r"\text \textbf \textit \textrm \textnormal \mathrm \mathbf \mathit \mathsf \mathcal \mathbb \mbox \boldsymbol"
    r" \operatorname \boxed"
)
WORD = re.compile(r"[^\d+*/^=<>\\{}]*")
"""What is no mathematics in a text command."""
DECORATIONS = _words(r"\overline \bar \hat \vec \tilde \dot \widehat \overrightarrow \underline")
GREEK = _words(
    r"\alpha \beta \gamma \delta \epsilon \varepsilon \zeta \eta \theta \vartheta \iota \kappa \lambda \mu \nu \xi"
    r" \rho \sigma \tau \upsilon \phi \varphi \chi \psi \omega"
    r" \Gamma \Delta \Theta \Lambda \Xi \Pi \Sigma \Phi \Psi \Omega"
)
SYMBOLS = GREEK | _words(
    r"\pi π \infty ∞ \emptyset \varnothing ∅ \degree \circ ° \% % \ldots \triangle \angle \ell \imath"
    r" \hbar \star \clubsuit \diamondsuit \heartsuit \spadesuit"
)
FUNCTIONS = _words(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp max min gcd lcm det deg dim arg lim sup"
    " inf mod abs floor ceil round choose sum prod int rank tr"
)
"""Written with a backslash or without one."""
CALLS = (
    frozenset(f"\\{name}" for name in FUNCTIONS)
    | BINOMIALS
    | _words(r"\iint \oint \bmod \pmod \Pr \partial \nabla \Re \Im \ker \liminf \limsup \bigcup \bigcap")
)
FAMILIES = {
    **dict.fromkeys(("\\log", "\\ln", "\\lg", "\\exp"), "logarithm"),
    **dict.fromkeys(("\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc"), "angle function"),
    **dict.fromkeys(("\\arcsin", "\\arccos", "\\arctan"), "inverse angle function"),
    **dict.fromkeys((*BINOMIALS, "factorial"), "factorial"),
}
"""Functions that stand for one another."""
