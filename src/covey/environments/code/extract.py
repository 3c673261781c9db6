"""Which program a completion hands in.

The rule, in this order:

1. What stands in a think block is no submission; neither is a think block that never ends.
2. Of the fenced blocks (``` or ~~~, whatever their language) the last one that defines the entry point at its top
   level is the program; where none does, the last block. A fence that is never closed ends at the first marks that end
   a line of code, or with the text. Before the first marks there may be other text where a language follows them, or an
   answer tag. Blocks may be quoted (`> `), and stand in a block of markdown.
3. Without a fence, the content of the last answer tag or [PYTHON] tag is the program; without one, the whole text.
4. Where a problem gives the beginning of the program and the text found does not define the entry point, it is taken
   as the rest of that program. Where it does, what the problem gives before the function, such as imports, stays.

So a corrected second version replaces the first, and an example of use after the solution does not.
"""

import re

from covey.environments.math.answers import without_thoughts

MAX_COMPLETION = 200_000
"""Characters; a longer text hands nothing in."""

_FENCE = re.compile(r"^([^\n`~]*+)(`{3,}+|~{3,}+)([^\n`]*+)$", re.MULTILINE)
"""What stands before the marks, the marks, and what follows."""
_DECORATORS = re.compile(r"(?:^@[^\n]*\n)+\Z", re.MULTILINE)
_QUOTED = " \t>"
"""What may stand before a fence on a line of its own."""
MARKDOWN = ("markdown", "md")
_TAGS = (
    re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE),
    re.compile(r"(?:^|:)[ \t]*+\[PYTHON\](.*?)(?:\[/PYTHON\]|\Z)", re.DOTALL | re.MULTILINE),  # a[PYTHON] is code
)


def extract_program(completion: str, entry_point: str, opening: str = "") -> str:
    """Return the program as text. Empty where the completion holds none.

    >>> extract_program("Sure!\\n```python\\ndef f(n): return n\\n```\\nHope that helps.", "f")
    'def f(n): return n\\n'
    """
    if len(completion) > MAX_COMPLETION:
        return ""
    text = without_thoughts(completion.replace("\r\n", "\n"))
    program = _submission(text, entry_point)
    if not program.strip():
        return ""
    if opening and not defines(program, entry_point):
        return _joined(opening, program)
    return _given_before(opening, entry_point) + program if "__future__" not in program else program


def defines(program: str, entry_point: str) -> bool:
    """Return whether the name is given a meaning at the top level of the text; of `Class.method`, the class."""
    return _definition(program, entry_point) is not None


def _definition(program: str, entry_point: str) -> re.Match[str] | None:
    name = re.escape(entry_point.partition(".")[0])
    pattern = rf"^(?:(?:async[ \t]+)?def[ \t]+{name}\b|class[ \t]+{name}\b|{name}[ \t]*(?::[^=\n]*)?=(?!=))"
    return re.search(pattern, program, re.MULTILINE)


def _given_before(opening: str, entry_point: str) -> str:
    """Return the lines of a problem's beginning that stand before the function and its decorators."""
    definition = _definition(opening, entry_point)
    return _DECORATORS.sub("", opening[: definition.start()]).lstrip("\n") if definition is not None else ""


def fenced_blocks(text: str) -> list[str]:
    """Return the contents of the fenced blocks, each less the indentation or quotation marks of its opening fence."""
    blocks: list[str] = []
    begin: re.Match[str] | None = None
    # Marks at the end of a line of code, which close the block where none on a line of their own do
    early: re.Match[str] | None = None
    # A fence of markdown, whose end opens nothing
    around: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        has_language = fence[3].strip().isidentifier()
        if begin is None and around is not None and _closes(fence, around):
            around = None
        elif begin is None:
            begin = fence if _opens(fence) else None
        elif _closes(fence, begin):
            blocks.append(_content(text, begin, fence.start()))
            begin = early = None
        elif has_language and early is not None:
            blocks.append(_content(text, begin, early.start(2)))
            begin, early = fence, None
        elif has_language and begin[3].strip().lower() in MARKDOWN:
            around, begin = begin, fence
        elif early is None and _ends(fence, begin):
            early = fence
    # A block without an end goes on to the end of the text
    if begin is not None:
        blocks.append(_content(text, begin, len(text) if early is None else early.start(2)))
    return blocks


def _opens(fence: re.Match[str]) -> bool:
    """Tell whether a block begins here: on its own line, in an answer tag, or behind words and with a language."""
    return fence[1].lstrip(_QUOTED).rstrip().lower() in ("", "<answer>") or fence[3].strip().isidentifier()


def _ends(fence: re.Match[str], begin: re.Match[str]) -> bool:
    """Tell whether a line ends in at least as many marks as the block began with."""
    return fence[2].startswith(begin[2]) and fence[3].strip()[:1] in ("", "<")


def _closes(fence: re.Match[str], begin: re.Match[str]) -> bool:
    return _ends(fence, begin) and not fence[1].strip(_QUOTED)


def _content(text: str, begin: re.Match[str], end: int) -> str:
    lines = text[begin.end() + 1 : end].split("\n")
    indentation = begin[1] if not begin[1].strip(_QUOTED) else ""
    # Of a quoted line without text editors leave the mark alone
    return "\n".join("" if line == indentation.rstrip() else line.removeprefix(indentation) for line in lines)


def _submission(text: str, entry_point: str) -> str:
    blocks = fenced_blocks(text)
    if blocks:
        return next((block for block in reversed(blocks) if defines(block, entry_point)), blocks[-1])
    for tag in _TAGS:
        found = tag.findall(text)
        text = found[-1] if found else text
    return text


def _joined(opening: str, rest: str) -> str:
    """Return the rest of a body that follows its opening. Models often leave the first indentation to the prompt."""
    first = next(line for line in rest.split("\n") if line.strip())
    indented = first.startswith((" ", "\t"))
    return opening + (rest if indented else "    " + rest.lstrip())
