"""Extract the answer to a question with one right answer.

The rule, in this order:

1. Text in a think block or a comment, or struck out, is not the answer; a block that never ends hides the rest.
2. An explicit mark decides: `####`, `\\boxed{}`, an answer tag, a sentence ("the answer is 42") or a label
   ("Answer: 42", "A: 42"). The last of several marks decides, but a list of alternatives is wrong.
3. Without a mark the last formula decides, as a whole, or the last number behind it; a completion that was cut before
   its end has then given no answer.

Pure, in linear time, and text is never evaluated as code.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from covey_graders.math.equal import MAX_FORMULA
from covey_graders.math.reading.hedges import PIECES
from covey_graders.math.reading.normalize import TEXT_COMMAND, closing_brace, single_blanks
from covey_graders.math.reading.numerals import read_values
from covey_graders.math.reading.units import conversions
from covey_graders.tables import patterns_beside
from covey_graders.tags import visible

Form = Literal["hash", "box", "tag", "label", "formula", "none"]

_RE = patterns_beside(__file__, PIECES)
MAX_COMPLETION = 100_000
"""Characters at the end of a completion that are searched."""
MAX_MARKS = 50
"""Last marks of a kind that are tried."""


@dataclass(frozen=True, slots=True)
class ExtractedAnswer:
    """The extracted answer and the form of its mark ("none": last number).

    >>> find_answer("7 boxes hold 42 pens.\\n#### 42")
    ExtractedAnswer(text=' 42', form='hash')
    """

    text: str
    form: Form


@dataclass(frozen=True, slots=True)
class _Mark:
    begin: int
    end: int
    text: str
    form: Form
    outer_begin: int | None = None
    """Begin of the mark around this one, if any."""

    @property
    def first(self) -> int:
        return self.begin if self.outer_begin is None else self.outer_begin


def _hashes(text: str) -> Iterator[_Mark]:
    for mark in list(_RE["hash"].finditer(text))[-MAX_MARKS:]:
        following = _RE["hash"].search(text, mark.end())
        limit = following.start() if following is not None else len(text)
        newline = text.find("\n", mark.end(), limit)
        end = limit if newline < 0 else newline
        content = text[mark.end() : end]
        below = _RE["next_line_value"].match(text, mark.end()) if not content.strip() else None
        if below is not None:
            content, end = below[1], below.end(1)
        if not _RE["hash_heading"].match(content):
            yield _Mark(mark.start(), end, content, "hash")


def _boxes(text: str) -> Iterator[_Mark]:
    for command in list(_RE["box"].finditer(text))[-MAX_MARKS:]:
        if text.startswith("{", command.end()):
            end = closing_brace(text, command.end())
            content = text[command.end() + 1 : end] if end is not None else "\\unclosed"
            yield _Mark(command.start(), len(text) if end is None else end + 1, content, "box")
        else:
            bare = _RE["bare_box"].match(text, command.end())
            content = bare[0] if bare is not None else ""
            yield _Mark(command.start(), command.end() + len(content), content, "box")


def _tags(text: str) -> Iterator[_Mark]:
    opened: re.Match[str] | None = None
    for tag in _RE["tag"].finditer(text):
        if not tag[1]:
            opened = tag
        elif opened is not None:
            yield _Mark(opened.start(), tag.end(), text[opened.end() : tag.start()], "tag")
            opened = None
    if opened is not None:
        yield _Mark(opened.start(), len(text), text[opened.end() :], "tag")


def _labels(text: str, numeric: bool) -> Iterator[_Mark]:
    """Yield sentences and labels that state a value, `numeric` or any."""
    for label in list(_RE["label"].finditer(text))[-MAX_MARKS:]:
        gap = _RE["label_gap"].match(text, label.end())
        begin = gap.end() if gap is not None else label.end()
        end = _RE["sentence_end"].search(text, begin)
        content = text[begin : end.start() if end is not None else len(text)][:MAX_FORMULA]
        content = (
            f"not {content}"
            if _RE["not"].search(label[0]) or _RE["doubted"].search(text[max(0, label.start() - 40) : label.start()])
            else content.rstrip("*_` ")
        )
        if not content.strip() or _RE["remark"].match(content):
            continue
        lead = _RE["lead"].match(content)
        says_number = lead is not None and len(lead[0].split()) <= 8 and not _RE["remark"].search(lead[0])
        if not numeric or says_number or "\\" in content or _RE["number_word"].match(content):
            yield _Mark(label.start(), end.start() if end is not None else len(text), content, "label")


def _marks(text: str, numeric: bool) -> list[_Mark]:
    """Return all marks in order, the innermost of nested ones."""
    found = [*_hashes(text), *_boxes(text), *_tags(text), *_labels(text, numeric)]
    innermost: list[_Mark] = []
    for mark in sorted(found, key=lambda mark: (mark.begin, -mark.end)):
        if innermost and mark.begin < innermost[-1].end:
            mark = replace(mark, outer_begin=innermost.pop().first)
        innermost.append(mark)
    return innermost


_SEPARATORS = frozenset(",;/|")
MAX_HEDGE, MAX_OPEN_END = 160, 20
"""Characters."""


def _answer_of(text: str, marks: list[_Mark], numeric: bool) -> ExtractedAnswer:
    """Return the last mark's answer, or its whole list of alternatives.

    The last of `x=\\boxed{5}` and `y=\\boxed{6}` counts if one number is asked for.
    """
    last = len(marks) - 1
    first, joined = last, False
    while first > 0:
        between, num_doubts = _RE["doubt"].subn(" ", text[marks[first - 1].end : marks[first].first])
        joint = _RE["joint"].fullmatch(_RE["tag"].sub(" ", between))
        if joint is None or (numeric and joint[2] and joint[1] in (None, "and")):
            break
        is_open = _without_or(marks[first - 1].text) != marks[first - 1].text
        joined = joined or is_open or num_doubts > 0 or joint[1] is not None or not _SEPARATORS.isdisjoint(joint[0])
        first -= 1
    run = [_without_or(mark.text).strip() for mark in marks[first:]]
    if len(set(run)) > 1 and (joined or len(set(run)) > 2):
        return ExtractedAnswer(", ".join(run), marks[last].form)
    return ExtractedAnswer(_with_hedge(text, marks[last]), marks[last].form)


def _without_or(text: str) -> str:
    tail = _RE["open_end"].search(text, max(0, len(text) - MAX_OPEN_END))
    return text if tail is None else text[: tail.start()]


def _with_hedge(text: str, mark: _Mark) -> str:
    """Return a mark's text with hedges beside it: `\\boxed{42} or 43`."""
    following = TEXT_COMMAND.sub(r"\1", text[mark.end : mark.end + MAX_HEDGE])
    after, before = _RE["taken_back"].match(following), None
    if mark.form in {"box", "tag"}:
        restated = _RE["restated"].match(following)
        agrees = None if restated is None else same_measure(mark.text, restated[1])
        after = after or (None if agrees else restated if agrees is False else _RE["hedge_after"].match(following))
        before = _RE["hedge_before"].search(text[max(0, mark.begin - 40) : mark.begin])
    elif after is None:
        return mark.text
    prefix = f"{before[1]} or " if before is not None else ""
    suffix = after[0].lstrip("$ *()[]\\.,;:?") if after is not None else ""
    return f"{prefix}{mark.text} {suffix}".strip()


def same_measure(text: str, other: str) -> bool | None:
    """Return True for equal measures (120 minutes), None for unknown units."""
    factors = conversions(text, other)
    pairs = list(product(read_values(other), read_values(text), factors))
    return any(one.agrees(another, factor) for one, another, factor in pairs) if factors else None


_OPERATORS = frozenset("+-*/^=<>\u2264\u2265\u2260\u00b1\u00d7\u00b7\u00f7")


def _unmarked(text: str, numeric: bool) -> ExtractedAnswer:
    """Return the formula that ends an unmarked text, else the text.

    If a number is asked for and one follows the last formula, that one decides.
    """
    formulas = [
        _Mark(found.start(), found.end(), found[1] or found[2] or found[3], "formula")
        for found in list(_RE["formula"].finditer(text))[-MAX_MARKS:]
    ]
    if formulas and not (numeric and re.search(r"\d", text[formulas[-1].end :])):
        return _answer_of(text, formulas, numeric=False)
    if not numeric and text.count("```") > 1 and text.rstrip().endswith("```"):  # the last block
        text = text.rstrip()[:-3].rpartition("```")[2].partition("\n")[2]
    run = _last_run(text) if numeric else ""
    return ExtractedAnswer(run, "formula") if _RE["formula_sign"].search(run) else ExtractedAnswer(text.strip(), "none")


def _last_run(text: str) -> str:
    """Return the last word with a digit, joined by operators."""
    *_, line = [line for line in text.split("\n") if re.search(r"\d", line)] or [""]
    words = _RE["stops"].sub("", line[-MAX_FORMULA:]).replace("\\$", "").replace("\\%", "%").split()
    last = max((i for i, word in enumerate(words) if re.search(r"\d", word)), default=0)
    first = last
    while first > 0 and _is_joined(words[first - 1], words[first]):
        first -= 1
    while last + 1 < len(words) and (words[last + 1][0] in _OPERATORS or words[last][-1] in _OPERATORS):
        last += 1
    return " ".join(words[first : last + 1]).rstrip(".,;:*")


def _is_joined(before: str, word: str) -> bool:
    """Return True if an operator, function or list joins two words."""
    is_listed = before.endswith(",") and word[-1:] in ")]}" and word[0] not in "([{"
    return (
        word[0] in _OPERATORS | {"\\"}
        or before[-1] in _OPERATORS
        or is_listed
        or bool(_RE["function"].fullmatch(before))
    )


def find_answer(completion: str, numeric: bool = True, is_cut: bool = False) -> ExtractedAnswer | None:
    """Return a completion's answer, None without one.

    Args:
        numeric: the question asks for a number; otherwise any expression or text is taken from a mark.
        is_cut: the completion ran out of tokens before its end; without a mark it then gives no answer.
    """
    text = single_blanks(visible(completion[-MAX_COMPLETION:]))
    marks = _marks(text, numeric)
    negated = [mark for mark in marks if mark.form == "label" and _RE["negated"].match(mark.text)]
    stated = [_affirmed(mark) for mark in marks]
    filled = [mark for mark in stated if mark.text.strip()]
    if filled:
        return _answer_of(text, filled, numeric)
    if len(negated) < len(marks) or is_cut:
        return None
    for mark in reversed(negated):
        text = text[: mark.begin] + text[mark.end :]
    return _unmarked(text, numeric) if text.strip() else None


def boxes_of(completion: str) -> list[str]:
    return [mark.text for mark in _boxes(single_blanks(visible(completion[-MAX_COMPLETION:])))]


def _affirmed(mark: _Mark) -> _Mark:
    """Return a label without its denial: "is not 41 but 42" states 42."""
    denied = _RE["negated"].match(mark.text) if mark.form == "label" else None
    if denied is None:
        return mark
    text = mark.text[denied.end() :] if denied["but"] else ""
    return replace(mark, text=text)
