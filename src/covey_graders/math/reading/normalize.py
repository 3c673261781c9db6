"""Normalise Unicode signs, currency codes and LaTeX arithmetic to ASCII.

Pure functions, linear in the length of the text but for nesting, which is bounded.
"""

import re

from covey_graders.tables import patterns_beside, steps, substitute, table_beside

_RE = patterns_beside(__file__)

CURRENCY = "$€£¥₹₩₽₺₫฿"
MAX_FRACTIONS = 20

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")

TEXT_COMMAND = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|up)?|math(?:rm|bf|sf|it|tt)|[hm]box|boldsymbol|bm|pmb|emph|ensuremath|operatorname)"
    r"\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_INFIX = {"\\over": "\\frac", "\\choose": "\\binom"}
_TABLE = table_beside(__file__)
_CHARACTERS = str.maketrans(
    {sign: short for signs, short in _TABLE["characters"] for sign in signs}
    | {chr(0xFF10 + digit): str(digit) for digit in range(10)}
)
_LATEX = str.maketrans(dict(_TABLE["latex"]))
_SPELLINGS, _BEFORE_FRACTIONS, _AFTER_FRACTIONS = (
    steps(_TABLE[name]) for name in ("spellings", "before_fractions", "after_fractions")
)


def single_blanks(text: str) -> str:
    """Collapse runs of blanks and of line breaks."""
    return _RE["blank_lines"].sub("\n", _RE["blanks"].sub(" ", text))


def unified(text: str) -> str:
    """Return the text with one spelling of signs, digits and powers."""
    text = single_blanks(text.translate(_CHARACTERS))
    if "\\begin" not in text:
        text = _RE["doubled"].sub(r"\\", text)
    text = _RE["cases"].sub(r"\1", _RE["aligned"].sub(lambda lines: lines[2].replace("&", " "), text))
    text = substitute(_prefixed(text), _SPELLINGS)
    text = _RE["period"].sub(r"\1\\overline{\2}", text)
    text = _RE["repeated"].sub(lambda match: f"{match[1]}\\overline{{{match[2] or match[3] or match[4]}}}", text)
    return _RE["superscript"].sub(lambda match: "^" + match[0].translate(_SUPERSCRIPTS), text)


def _prefixed(text: str) -> str:
    """Write `{a \\over b}` as `{\\frac{a}{b}}`."""
    for _ in range(MAX_FRACTIONS):
        infix = _RE["infix_command"].search(text)
        if infix is None:
            break
        begin, depth = infix.start(), 0
        while begin > 0 and depth <= 0:
            begin -= 1
            depth += (text[begin] == "{") - (text[begin] == "}")
        begin += depth > 0
        end = closing_brace("{" + text[infix.end() :], 0)
        end = len(text) if end is None else infix.end() + end - 1
        parts = f"{{{text[begin : infix.start()]}}}{{{text[infix.end() : end]}}}"
        text = f"{text[:begin]}{_INFIX[infix[0]]}{parts}{text[end:]}"
    return text


def in_latex(text: str) -> str:
    """Return the text with LaTeX for Greek letters, infinity and roots.

    `\\tan^{-1}` is `\\arctan`, not one over the tangent. Fractions and matrices have one size, and one kind of bracket.
    """
    text = (
        _RE["slanted_fraction"].sub(r"\\frac", text).replace("smallmatrix}", "matrix}").replace("bmatrix}", "pmatrix}")
    )
    text = _RE["inverse"].sub(r"\\arc\1 ", text.translate(_LATEX))
    return _RE["radical"].sub(lambda match: f"\\sqrt{{{match[1] or match[2]}}}", text)


def plain(text: str) -> str:
    """Write LaTeX arithmetic plainly: `\\frac{3}{4}` is ((3)/(4)).

    Commands without a plain spelling stay, backslash included, so that callers see there is more than arithmetic.
    """
    text = _RE["double_star_power"].sub("^", _RE["sign_word"].sub("-", _RE["currency_code"].sub("$", unified(text))))
    if not _RE["latex_sign"].search(text):
        return text
    text = substitute(TEXT_COMMAND.sub(r" \1 ", text), _BEFORE_FRACTIONS)
    text = _RE["mixed_fraction"].sub(lambda m: f"({m[1]}+{m[2] or m[3]}/{m[4] or m[5]})", text)
    return substitute(_plain_fractions(text), _AFTER_FRACTIONS)


def _plain_fractions(text: str) -> str:
    for _ in range(MAX_FRACTIONS):
        match = _RE["fraction"].search(text)
        if match is None:
            break
        top, middle = _argument(text, match.end())
        bottom, end = _argument(text, middle)
        text = f"{text[: match.start()]}(({top})/({bottom})){text[end:]}"
    return text


def _argument(text: str, position: int) -> tuple[str, int]:
    """Return the LaTeX argument at `position` and its end."""
    while position < len(text) and text[position].isspace():
        position += 1
    if text[position : position + 1] != "{":
        return text[position : position + 1], position + 1
    end = closing_brace(text, position)
    return (text[position + 1 : end], end + 1) if end is not None else ("", len(text))


def closing_brace(text: str, opening: int, limit: int = 2000) -> int | None:
    """Return the position of the matching brace, None without one."""
    depth = 0
    position = opening
    while position < min(len(text), opening + limit):
        # An escaped brace does not count
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return position
        position += 1
    return None
