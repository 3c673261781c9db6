"""Extraction of the program that a completion submits.

The rule, in its order, stands in docs/tasks/code.md ("Which text is the program"): a corrected second version
replaces the first, and an example of use after the solution does not.
"""

import re

from covey_graders.tables import patterns_beside
from covey_graders.tags import without_thoughts

_RE = patterns_beside(__file__)

MAX_COMPLETION = 200_000
"""Characters; a longer text hands nothing in."""

_QUOTED = " \t>"
"""Characters allowed before a fence on a line of its own."""
MARKDOWN = ("markdown", "md")
_TAGS = [pattern for name, pattern in _RE.items() if name.startswith("tag_")]
_NO_STATEMENT = tuple(" \t#@)]}'\"")
"""Beginnings of lines that belong to a statement of other lines, or to none."""


def extract_program(completion: str, entry_point: str, opening: str = "") -> str:
    """Return the program as text. Empty where the completion holds none.

    >>> extract_program("Sure!\\n```python\\ndef f(n): return n\\n```\\nHope that helps.", "f")
    'def f(n): return n\\n'
    """
    if len(completion) > MAX_COMPLETION:
        return ""
    text = without_thoughts(completion.replace("\r\n", "\n").replace("\ufeff", ""))
    program = _submission(text, entry_point)
    if not program.strip():
        return ""
    if opening and not defines(program, entry_point):
        return _joined(opening, program)
    return _given_before(opening, entry_point) + program if "__future__" not in program else program


def defines(program: str, entry_point: str) -> bool:
    """Return True if the text defines the name at its top level.

    For `Class.method`, the class. A script without an entry point prints.
    """
    return (_definition(program, entry_point) if entry_point else _RE["prints"].search(program)) is not None


def _definition(program: str, entry_point: str) -> re.Match[str] | None:
    name = re.escape(entry_point.partition(".")[0])
    pattern = rf"^(?:(?:async[ \t]+)?def[ \t]+{name}\b|class[ \t]+{name}\b|{name}[ \t]*(?::[^=\n]*)?=(?!=))"
    return re.search(pattern, program, re.MULTILINE)


def _given_before(opening: str, entry_point: str) -> str:
    """Return the beginning's lines before the function and its decorators."""
    definition = _definition(opening, entry_point)
    return _RE["decorators"].sub("", opening[: definition.start()]).lstrip("\n") if definition is not None else ""


def fenced_blocks(text: str) -> list[str]:
    """Return the contents of fenced blocks, without the fence's indentation."""
    blocks: list[str] = []
    begin: re.Match[str] | None = None
    # Marks at the end of a line of code, which close the block where none on a line of their own do
    early: re.Match[str] | None = None
    # A fence of markdown, whose end opens nothing
    around: re.Match[str] | None = None
    quotes = _Quotes(text)
    for fence in _RE["fence"].finditer(text):
        has_language = fence[3].strip().isidentifier()
        if begin is not None and quotes.are_open(begin.end(), fence.start()):
            continue
        if begin is None and around is not None and _closes(fence, around) and not has_language:
            around = None
        elif begin is None:
            begin = fence if _opens(fence) else None
        elif has_language and early is not None:
            blocks.append(_content(text, begin, early.start(2)))
            begin, early = fence, None
        elif has_language and begin[3].strip().lower() in MARKDOWN:
            around, begin = begin, fence
        elif _closes(fence, begin):
            blocks.append(_content(text, begin, fence.start()))
            begin, early = fence if has_language else None, None
        elif early is None and _ends(fence, begin):
            early = fence
    # A block without an end goes on to the end of the text
    if begin is not None:
        blocks.append(_content(text, begin, len(text) if early is None else early.start(2)))
    return blocks


class _Quotes:
    """Finds whether places, asked in order, are between triple quotes."""

    def __init__(self, text: str) -> None:
        self._found = list(_RE["quotes"].finditer(text))
        self._next, self._begin, self._open = 0, -1, ""
        self._last = {mark[0]: mark.start() for mark in self._found}

    def are_open(self, begin: int, place: int) -> bool:
        """Look from the beginning of a block on."""
        if begin != self._begin:
            self._begin, self._open = begin, ""
        while self._next < len(self._found) and self._found[self._next].start() < place:
            mark = self._found[self._next]
            self._next += 1
            if mark.start() >= begin and self._open in ("", mark[0]):
                self._open = "" if self._open else mark[0]
        return bool(self._open) and self._last[self._open] > place


def _opens(fence: re.Match[str]) -> bool:
    """Return True where a block begins: alone, in a tag, or with a language."""
    return fence[1].lstrip(_QUOTED).rstrip().lower() in ("", "<answer>") or fence[3].strip().isidentifier()


def _ends(fence: re.Match[str], begin: re.Match[str]) -> bool:
    """Return True if a line ends in as many marks as the block began with."""
    return fence[2].startswith(begin[2]) and fence[3].strip()[:1] in ("", "<")


def _closes(fence: re.Match[str], begin: re.Match[str]) -> bool:
    """Return True if a line begins with the marks: no code does."""
    return fence[2].startswith(begin[2]) and not fence[1].strip(_QUOTED)


def _content(text: str, begin: re.Match[str], end: int) -> str:
    lines = text[begin.end() + 1 : end].split("\n")
    indentation = begin[1] if not begin[1].strip(_QUOTED) else ""
    # Editors leave only the mark of a quoted line without text
    return "\n".join("" if line == indentation.rstrip() else line.removeprefix(indentation) for line in lines)


def _submission(text: str, entry_point: str) -> str:
    first = _RE["fence"].search(text)
    if (
        first is not None
        and not (first[1] + first[3]).strip()
        and defines(text[: first.start()], entry_point)
        and _RE["given"].match(text.lstrip())
    ):
        text = f"{first[2]}\n{text}"
    blocks = fenced_blocks(text)
    if blocks:
        place = next((i for i in reversed(range(len(blocks))) if defines(blocks[i], entry_point)), len(blocks) - 1)
        return _with_needed(blocks[place], blocks[:place] + blocks[place + 1 :])
    for tag in _TAGS:
        found = tag.findall(text)
        text = found[-1] if found else text
    return _without_prose(text) if defines(text, entry_point) else text


def _without_prose(text: str) -> str:
    """Remove words before the code, and sentences behind it."""
    lines = text.split("\n")
    begin = next((place for place, line in enumerate(lines) if line.startswith("@") or _RE["given"].match(line)), 0)
    before = [line.strip() for line in lines[:begin] if line.strip()]
    begin = begin if before and all(map(_RE["prose"].fullmatch, before)) else 0
    # A sentence between triple quotes is a text of the program's
    num_quotes = 0
    for end in range(begin, len(lines)):
        if num_quotes % 2 == 0 and end > begin and _RE["sentence"].fullmatch(lines[end]):
            return "\n".join(lines[begin:end])
        num_quotes += len(_RE["quotes"].findall(lines[end]))
    return "\n".join(lines[begin:])


def _with_needed(block: str, others: list[str]) -> str:
    """Prepend other blocks that define missing names, and do nothing else."""
    own, _ = _given(block)
    lacking = set(_RE["word"].findall(block)) - own
    for other in reversed(others):
        names, is_pure = _given(other)
        if is_pure and not names.isdisjoint(lacking):
            block = f"{other.rstrip()}\n{block}"
            own |= names
            lacking = (lacking | set(_RE["word"].findall(other))) - own
    return block


def _given(block: str) -> tuple[set[str], bool]:
    """Return a block's definitions, and whether it does nothing else."""
    names: set[str] = set()
    is_pure = True
    for line in block.split("\n"):
        found = _RE["given"].match(line)
        if found is not None:
            names.update(_RE["word"].findall(found[4]) if found[4] else [found[1] or found[2] or found[3]])
        elif line and not line.startswith(_NO_STATEMENT):
            is_pure = False
    return names, is_pure


def _joined(opening: str, rest: str) -> str:
    """Join an opening and the rest of its body, fixing the first indentation."""
    first = next(line for line in rest.split("\n") if line.strip())
    indented = first.startswith((" ", "\t"))
    return opening + (rest if indented else "    " + rest.lstrip())
