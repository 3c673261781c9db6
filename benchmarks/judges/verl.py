"""How verl reads and spells answers, to the letter, so that its verdicts can be counted beside covey's.

Oddities (a unit without a blank before it counts, an error in the spelling falls back to the raw text) are kept: every
one of them changes somebody's reward. Pure functions on text.
"""

import re

DAPO_CHARACTERS = 300
MAX_DAPO_GOLD = 1_000
"""Characters; a longer gold equals no answer, for the normalisation takes cubic time."""
NO_ANSWER = "[INVALID]"


# ------------------------------------------------------------------------------------------------ verl, MATH


def equals_as_verl(completion: str, gold: str) -> bool:
    """Compare the last box with the gold as normalised text (volcengine/verl b178a3cd, math_reward)."""
    answer = _last_box(completion)
    return answer is not None and _same_text(answer, gold)


def _last_box(text: str) -> str | None:
    """Return what the last box holds. One `\\boxed 5` beats all boxes with braces. `\\fbox` is found, not read."""
    _, blank, after = text.rpartition("\\boxed ")
    if blank:
        return after.split("$")[0]
    begin = text.rfind("\\boxed")
    closed = _balanced(text, begin) if begin >= 0 else None
    if closed is None or not text.startswith("{", begin + len("\\boxed")):
        return None
    return closed.removeprefix("\\boxed{")[:-1]


def _balanced(text: str, begin: int) -> str | None:
    """Return the text from `begin` to the brace that closes the first one after it. Escaped braces count too."""
    depth = 0
    for brace in re.compile("[{}]").finditer(text, begin):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[begin : brace.end()]
    return None


def _same_text(answer: str, gold: str) -> bool:
    try:
        return verl_normalised(answer) == verl_normalised(gold)
    except ValueError:  # text that the rules below cannot take apart is compared as it stands
        return answer == gold


def verl_normalised(text: str) -> str:
    """Return verl's spelling of an answer (the normalisation of Hendrycks et al., arXiv 2103.03874).

    Raises ValueError for two `\\text{ ` and for a root or fraction at the very end.
    """
    # Replace spellings, in the order of verl
    for written, short in VERL_SPELLINGS:
        text = text.replace(written, short)
    if text.count("\\text{ ") > 1:
        raise ValueError("two units")
    # Drop units and percent signs
    text = text.split("\\text{ ")[0].replace("\\\\%", "").replace("\\%", "")
    # Complete decimals
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = f"0{text}"
    # Keep what "k =" says
    left, equals, right = text.partition("=")
    if equals and len(left) <= 2 and "=" not in right:
        text = right
    # Complete roots and fractions
    text = _with_fractions(_with_roots(text).replace(" ", ""))
    return _slash_as_fraction("\\frac{1}{2}" if text == "0.5" else text)


def _with_roots(text: str) -> str:
    """Write `\\sqrt3` as `\\sqrt{3}`."""
    first, *rest = text.split("\\sqrt")
    if "" in rest:
        raise ValueError("a root of nothing")
    return first + "".join(f"\\sqrt{part}" if part[0] == "{" else f"\\sqrt{{{part[0]}}}{part[1:]}" for part in rest)


def _with_fractions(text: str) -> str:
    """Write `\\frac12` and `\\frac1{2}` as `\\frac{1}{2}`: all of them, or none where one cannot be read."""
    # \frac12 is \frac{1}{2}
    first, *rest = text.split("\\frac")
    made = [first]
    for part in rest:
        if part == "":
            raise ValueError("a fraction of nothing")
        if part[0] == "{":
            made.append(part)
        elif len(part) < 2:
            return text
        else:
            bottom = part[1] if part[1] == "{" else f"{{{part[1]}}}"
            made.append(f"{{{part[0]}}}{bottom}{part[2:]}")
    return "\\frac".join(made)


def _slash_as_fraction(text: str) -> str:
    top, slash, bottom = text.partition("/")
    is_fraction = slash and _WHOLE.fullmatch(top) and _WHOLE.fullmatch(bottom)
    return f"\\frac{{{top}}}{{{bottom}}}" if is_fraction else text


_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,4299}")
VERL_SPELLINGS = (
    *(("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", "")),
    *(("^{\\circ}", ""), ("^\\circ", ""), ("\\$", "")),
)
"""What is replaced by what, in this order."""


# ------------------------------------------------------------------------------------------------ verl, DAPO


def equals_as_dapo(completion: str, gold: str) -> bool:
    """Compare what the last line that says `Answer:` gives with the gold (verl, math_dapo)."""
    found = _DAPO_ANSWER.findall(completion[-DAPO_CHARACTERS:])
    is_short = len(gold) <= MAX_DAPO_GOLD
    return is_short and dapo_normalised(found[-1] if found else NO_ANSWER) == dapo_normalised(gold)


def dapo_normalised(text: str) -> str:
    """Return DAPO's spelling of an answer (the normalisation of Lewkowycz et al., arXiv 2206.14858)."""
    # Keep what the last "=" says
    text = text.split("=")[-1]
    # Replace spellings, then words, then patterns, in the order of DAPO
    for written, short in DAPO_SPELLINGS:
        text = text.replace(written, short)
    for word in DAPO_WORDS:
        text = text.replace(word, "")
    for pattern, replacement in _DAPO_PATTERNS:
        text = pattern.sub(replacement, text)
    # Drop dollars, and commas of numbers
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


_DAPO_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
DAPO_SPELLINGS = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
DAPO_WORDS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
"""What is deleted, in this order, wherever it stands: `sue` in "issue" too."""
_DAPO_PATTERNS = (
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)
