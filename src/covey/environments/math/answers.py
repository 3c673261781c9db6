"""Which answer a completion gives to a question with one right answer, and whether it is the right one.

The rule, in this order:

1. Text in a think block or a comment, or struck out, is not the answer; a block that never ends hides the rest.
2. An explicit mark decides: `####`, `\\boxed{}`, an answer tag, a sentence ("the answer is 42") or a label
   ("Answer: 42", "A: 42"). Of several marks the last decides, but a list of alternatives is wrong.
3. Without a mark the last number decides; a completion that was cut before its end has then given no answer.
4. Values are compared exactly. Separators, currency signs, units, trailing stops and zeros do not matter; 5 m is not
   5 cm, and 0.33 is not 1/3. A percentage equals both its number and its hundredth part; number words are not read.
5. An answer that leaves the computation undone is wrong (module `computed`), unless values alone are asked for.

Pure, in bounded time, and text is never evaluated as code. Answers that are not numbers go to `symbolic`, whose time
is not bounded: `GSM8K` runs that in a worker process with a deadline.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from covey.environments.math.computed import is_computed, is_respelled
from covey.environments.math.formulas.nodes import is_equation, last_side, numeral_value
from covey.environments.math.formulas.trees import read_tree
from covey.environments.math.normalize import TEXT_COMMAND, closing_brace, plain, single_blanks
from covey.environments.math.numerals import Readings, range_of, read_last, read_values
from covey.environments.math.symbolic import MAX_SYMBOLIC, same_spelling
from covey.environments.math.units import CONCESSION, DOUBT, OR, conversions, differ_in_unit, measures_of
from covey.types import CutText

Form = Literal["hash", "box", "tag", "label", "none"]

MAX_COMPLETION = 100_000
"""Only so many characters at the end of a completion are looked at."""
MAX_MARKS = 50
"""Only so many marks of a kind are looked at, the last ones."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer as it stands in the completion, and the form of the mark that said so ("none": the last number).

    >>> find_answer("7 boxes hold 42 pens.\\n#### 42")
    Answer(text='42', form='hash')
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


_HIDDEN = re.compile(r"<!--.*?(?:-->|\Z)|~~(?=\S)[^~\n]{1,80}(?<=\S)~~", re.DOTALL)
_THINK = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)


def without_thoughts(completion: str) -> str:
    """Return the completion less its think blocks; a closing tag alone ends one that the prompt opened."""
    kept: list[str] = []
    depth = position = 0
    # Text outside of thoughts counts; a closing tag without an opening one ends a thought too
    for tag in _THINK.finditer(completion):
        if depth == 0:
            kept = [] if tag[1] else [*kept, completion[position : tag.start()]]
        depth = max(0, depth - 1) if tag[1] else depth + 1
        position = tag.end()
    # An unclosed thought has no answer
    if depth == 0:
        kept.append(completion[position:])
    return "\n".join(part for part in kept if part)


def visible(completion: str) -> str:
    """Return what a reader sees of prose: no think block, comment or struck-out text. In programs they are code."""
    return _HIDDEN.sub("", without_thoughts(completion))


_HASH = re.compile(r"(?<!#)#{4,}(?!#)")
_HASH_HEADING = re.compile(r"\s*(?:step|part|solution|explanation|conclusion|final answer|answer)\b", re.IGNORECASE)
_NEXT_LINE_VALUE = re.compile(r" ?\n([*_`$\\(-]*\d[^\n]{0,40})(?:\n|$)")
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])[ \t]?")
_BARE_BOX = re.compile(r"\\[A-Za-z]+(?: ?\{[^{}]{0,99}\}){1,2}|[^\s{$.,;]{1,50}")
_TAG = re.compile(r"<(/?)(?:final[ _]?)?answer>", re.IGNORECASE)


def _hashes(text: str) -> Iterator[_Mark]:
    for mark in list(_HASH.finditer(text))[-MAX_MARKS:]:
        following = _HASH.search(text, mark.end())
        limit = following.start() if following is not None else len(text)
        newline = text.find("\n", mark.end(), limit)
        end = limit if newline < 0 else newline
        content = text[mark.end() : end]
        below = _NEXT_LINE_VALUE.match(text, mark.end()) if not content.strip() else None
        if below is not None:
            content, end = below[1], below.end(1)
        if not _HASH_HEADING.match(content):
            yield _Mark(mark.start(), end, content, "hash")


def _boxes(text: str) -> Iterator[_Mark]:
    for command in list(_BOX.finditer(text))[-MAX_MARKS:]:
        if text.startswith("{", command.end()):
            end = closing_brace(text, command.end())
            content = text[command.end() + 1 : end] if end is not None else "\\unclosed"
            yield _Mark(command.start(), len(text) if end is None else end + 1, content, "box")
        else:
            bare = _BARE_BOX.match(text, command.end())
            content = bare[0] if bare is not None else ""
            yield _Mark(command.start(), command.end() + len(content), content, "box")


def _tags(text: str) -> Iterator[_Mark]:
    opened: re.Match[str] | None = None
    for tag in _TAG.finditer(text):
        if not tag[1]:
            opened = tag
        elif opened is not None:
            yield _Mark(opened.start(), tag.end(), text[opened.end() : tag.start()], "tag")
            opened = None
    if opened is not None:
        yield _Mark(opened.start(), len(text), text[opened.end() :], "tag")


_LABEL = re.compile(
    r"(?:\b(?:the|my|our|your|its|final|correct|right|numeric|numerical|exact|overall|an?)[ ](?:final[ ]|correct[ ])?"
    r"|^[^\w\n]{0,10}(?:(?:so|thus|hence|then|therefore),?[ ])?)"
    r"(?:answer|ans)\b"
    r"(?:[ ]\([^()\n]{0,60}\))?"
    r"(?:,?[ ](?:then|therefore|thus|hence|so|now|here|again|should|would|must|will|to|for|in|we|they|you)\b"
    r"[^.:!?=\n]{0,80}?)?"
    r"[\"'*_`]{0,4}[ ]?"
    r"(?:\b(?:is(?:n['\u2019]t)?|are|was|be|becomes?|equals?|of|comes[ ](?:out[ ])?to)\b|=|:|\u2192|->)"
    r"|^[^\w\n]{0,10}A:",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(r"(?<!\bRs)(?<!approx)[.!?](?=[\s\"'*)\]<]|$)|\n|<(?=[/|]|[A-Za-z_]{1,20}>)")
_LABEL_GAP = re.compile(r"[\s:*_`]*")
_NEGATED = re.compile(r"\s*(?:definitely |certainly )?not\b(?:.{0,60}?\bbut\b)?")
_LEAD = re.compile(r"(?:[^\d,;]|,(?=\d)){0,80}(?=\d)")
_REMARK = re.compile(r"\b(?:correct|right|wrong|incorrect|helpful|clear|above|below|unknown|given by)\b", re.IGNORECASE)
_NUMBER_WORD = re.compile(
    r"\b(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|[a-z]+teen|twenty|thirty|forty|fifty"
    r"|sixty|seventy|eighty|ninety|hundred|thousand|million)\b",
    re.IGNORECASE,
)


def _labels(text: str, numeric: bool) -> Iterator[_Mark]:
    """Yield sentences and labels that state a value: with `numeric` a number, as others are prose."""
    for label in list(_LABEL.finditer(text))[-MAX_MARKS:]:
        gap = _LABEL_GAP.match(text, label.end())
        begin = gap.end() if gap is not None else label.end()
        end = _SENTENCE_END.search(text, begin)
        content = text[begin : end.start() if end is not None else len(text)][:MAX_SYMBOLIC]
        content = f"not {content}" if label[0].endswith("n't") else content
        if not content.strip() or _REMARK.match(content):
            continue
        lead = _LEAD.match(content)
        says_number = lead is not None and len(lead[0].split()) <= 8 and not _REMARK.search(lead[0])
        if not numeric or says_number or "\\" in content or _NUMBER_WORD.match(content):
            yield _Mark(label.start(), end.start() if end is not None else len(text), content, "label")


def _marks(text: str, numeric: bool) -> list[_Mark]:
    """Return all marks in order of their place. Of nested marks (a box in a sentence) the innermost."""
    found = [*_hashes(text), *_boxes(text), *_tags(text), *_labels(text, numeric)]
    innermost: list[_Mark] = []
    for mark in sorted(found, key=lambda mark: (mark.begin, -mark.end)):
        if innermost and mark.begin < innermost[-1].end:
            mark = replace(mark, outer_begin=innermost.pop().first)
        innermost.append(mark)
    return innermost


_JOINT = re.compile(
    rf"(?:[\s$*.,;:|/&()\[\]\\-]|\\q?quad)*(?:(?:\\text *\{{[ ,]*)?({OR}|vs|and)(?:[\s$*:(\[\\}}]|\\q?quad)*)?"
    r"([A-Za-z](?:_\{?\w\}?)? ?= ?)?"
)
_SEPARATORS = frozenset(",;/|")
_DOUBT = re.compile(rf"\b(?:{DOUBT}|else)\b(?: even\b)?")
_HEDGE_AFTER = re.compile(
    rf"[\s$*()\[\]\\,]{{0,6}}\b(?:{OR}|vs|{DOUBT})\b(?: (?:{DOUBT}))?"
    r"[\s$*(\\]{0,6}-?[\d.,/]{1,40}(?=[\s$*)\]}]{0,6}(?:$|[.;!?\n]))"  # "or 1 hour" says the same in another unit
    r"|[\s$*)\]\\]{0,6}\bor\b(?!,? equivalently)[^.\n]{0,40}"
)
_TAKEN_BACK = re.compile(
    rf"[\s$*()\[\]\\,;.:-]{{0,6}}\b{CONCESSION}[\s$*(\\]{{0,6}}-?[\d.,/]{{1,40}}(?! ?(?:times|more|less|of)\b)"
    r"|[\s$*)]{0,6}(?:is|was)(?: (?:wrong|incorrect)| ?n[o'\u2019]t (?:right|correct|the)\b)"
)
_RESTATED = re.compile(
    rf"[\s$*()\[\]\\,]{{0,6}}\b(?:{OR}) (-?[\d.,/]{{1,40}} ?[A-Za-z]{{1,12}})[\s$*)\]]{{0,6}}(?:$|[.;!?\n])"
)
_HEDGE_BEFORE = re.compile(rf"([\d.,]+)[^\w\n]{{0,4}}\b(?:{OR})(?: (?:{DOUBT}))?[\s$*(\[\\]{{0,6}}$")
_OPEN_END = re.compile(rf"[\s,]*\b(?:{OR})[\s$*]*$")
MAX_HEDGE, MAX_OPEN_END = 160, 20
"""Characters."""


def _answer_of(text: str, marks: list[_Mark], numeric: bool) -> Answer:
    """Return what the last mark says, or the whole list of alternatives that it ends.

    Of `x=\\boxed{5}` and `y=\\boxed{6}` the last counts where one number is asked for.
    """
    # Find where the run of values before the last one begins
    last = len(marks) - 1
    first, joined = last, False
    while first > 0:
        between, num_doubts = _DOUBT.subn(" ", text[marks[first - 1].end : marks[first].first])
        joint = _JOINT.fullmatch(_TAG.sub(" ", between))
        if joint is None or (numeric and joint[2] and joint[1] in (None, "and")):
            break
        is_open = _without_or(marks[first - 1].text) != marks[first - 1].text
        joined = joined or is_open or num_doubts > 0 or joint[1] is not None or not _SEPARATORS.isdisjoint(joint[0])
        first -= 1
    # Several values joined by "and" or commas are one answer
    run = [_without_or(mark.text).strip() for mark in marks[first:]]
    if len(set(run)) > 1 and (joined or len(set(run)) > 2):
        return Answer(", ".join(run), marks[last].form)
    return Answer(_with_hedge(text, marks[last]), marks[last].form)


def _without_or(text: str) -> str:
    tail = _OPEN_END.search(text, max(0, len(text) - MAX_OPEN_END))
    return text if tail is None else text[: tail.start()]


def _with_hedge(text: str, mark: _Mark) -> str:
    """Return the mark's text and what is offered beside it: `\\boxed{42} or 43`. In another unit it may be the same."""
    following = TEXT_COMMAND.sub(r"\1", text[mark.end : mark.end + MAX_HEDGE])
    after, before = _TAKEN_BACK.match(following), None
    if mark.form in {"box", "tag"}:
        restated = _RESTATED.match(following)
        agrees = None if restated is None else _agree(mark.text, restated[1])
        after = after or (None if agrees else restated if agrees is False else _HEDGE_AFTER.match(following))
        before = _HEDGE_BEFORE.search(text[max(0, mark.begin - 40) : mark.begin])
    elif after is None:
        return mark.text
    prefix = f"{before[1]} or " if before is not None else ""
    suffix = after[0].lstrip("$ *()[]\\.,;:") if after is not None else ""
    return f"{prefix}{mark.text} {suffix}".strip()


def _agree(text: str, other: str) -> bool | None:
    """Check whether two measures are the same, such as 120 (minutes) and 2 hours. None where units are unknown."""
    factors = conversions(text, other)
    given, restated = (frozenset().union(*read_values(measure)) for measure in (text, other))
    converted = {value * factor for value in restated for factor in factors}
    return not converted.isdisjoint(given) if factors else None


def find_answer(completion: str, numeric: bool = True) -> Answer | None:
    """Return the answer that a completion gives, or None where it gives none.

    Args:
        numeric: the question asks for a number; otherwise any expression or text is taken from a mark.
    """
    # Collect the marks of answers
    text = single_blanks(visible(completion[-MAX_COMPLETION:]))
    marks = _marks(text, numeric)
    negated = [mark for mark in marks if mark.form == "label" and _NEGATED.match(mark.text)]
    stated = [_affirmed(mark) for mark in marks]
    filled = [mark for mark in stated if mark.text.strip()]
    if filled:
        return _answer_of(text, filled, numeric)
    if len(negated) < len(marks) or isinstance(completion, CutText):
        return None
    # All say what the answer is not: read the text without them
    for mark in reversed(negated):
        text = text[: mark.begin] + text[mark.end :]
    return Answer(text.strip(), "none") if text.strip() else None


def _affirmed(mark: _Mark) -> _Mark:
    """Return a label less what it denies: "is not 41 but 42" states 42, "is not 42" states nothing."""
    denied = _NEGATED.match(mark.text) if mark.form == "label" else None
    if denied is None:
        return mark
    text = mark.text[denied.end() :] if denied[0].endswith("but") else ""
    return replace(mark, text=text)


def answer_values(answer: Answer, computed: bool = False) -> list[Readings]:
    """Return the number an answer states, or several where it lists alternatives. Empty where it states none.

    Args:
        computed: a number that is left to compute, such as `12+7`, has no readings.
    """
    starts_with_words = re.match(r"\s*[A-Za-z]", answer.text) is not None
    is_sentence = answer.form == "tag" and starts_with_words and "\\" not in answer.text
    if answer.form == "none" or is_sentence:
        return read_last(answer.text, computed)
    values = read_values(answer.text, answer.form == "box", computed)
    return values or (_written_otherwise(answer.text) if answer.form == "box" else [])


@lru_cache(maxsize=1024)  # every answer of a group is compared with the same one
def gold_value(gold: str, computed: bool = False) -> Readings | None:
    """Return the number a reference answer states. None where it is not one number (an expression, a list, a text).

    `x=3` states one, `x+2y=3` does not.
    """
    tree = read_tree(gold)
    if tree is not None and is_equation(tree):
        return None
    values = read_values(gold, strict=True, computed=computed) or _written_otherwise(gold)
    return values[0] if len(values) == 1 and values[0] else None


_NO_UNIT = re.compile(r"\b(?:not|than)\b")
"""Words that are no name of a number."""


def _written_otherwise(text: str) -> list[Readings]:
    """Return the number that a formula is, such as `0.\\overline{3}` and `\\{5\\}`, if it is one."""
    tree = None if _NO_UNIT.search(text) else read_tree(text)
    value = None if tree is None else numeral_value(last_side(tree))
    return [] if value is None else [frozenset({value})]


_ROUNDED = re.compile(r"(?<=\S)\s*(?:\\approx|\\simeq|≈)[\s$\\]*-?[\d,]*\.\d+[\s$.]*$")
"""What an exact value is said to be about."""
_BASE = re.compile(r"^([\s$]*\d+)_\{?\d{1,2}\}?(?![\d}])")
"""Which of digits need not be said."""
_LAST_LETTER = re.compile(r"\d\}? ?([A-Za-z])$")
"""A unit, or a letter of the question: of `5k` and "in terms of $k$"."""


def compare(completion: str, gold: str, question: str = "", computed: bool = True) -> bool | Answer:
    """Judge the completion's answer, or return the answer where arithmetic alone cannot tell.

    The latter happens for reference answers that are not numbers, and for answers like `\\{42\\}`.

    Args:
        question: says whether a form is asked for (module `computed`).
        computed: an answer that leaves the computation undone is wrong; else values alone count.
    """
    unit = _LAST_LETTER.search(gold)
    expected = None if unit is not None and f"${unit[1]}$" in question else gold_value(gold)
    answer = find_answer(completion, numeric=expected is not None)
    if answer is None:
        return False
    answer = answer if "." in gold else replace(answer, text=_ROUNDED.sub("", answer.text))
    answer = answer if "_" in gold else replace(answer, text=_BASE.sub(r"\1", answer.text))
    if _is_stated(gold, answer.text):
        return True
    # A reference that is no number: hand the answer on, unless a computation is left undone.
    if expected is None:
        answer = answer if answer.form != "none" else _last_formula(answer)
        return answer if not computed or _is_allowed(answer, gold, question) else False
    if differ_in_unit(answer.text, gold):
        return False
    # Values alone.
    if not computed:
        values = answer_values(answer)
        return all(value & expected for value in values) if values else _needs_algebra(answer) and answer
    # Values, and nothing left to compute.
    is_final = gold_value(gold, computed=True) is not None
    values = answer_values(answer, computed=is_final)
    if values:
        is_allowed = is_final or answer.form == "none" or _is_allowed(answer, gold, question)
        return is_allowed and all(value & expected for value in values) and is_respelled(answer.text, gold, question)
    return _needs_algebra(answer) and _is_allowed(answer, gold, question) and answer


def _is_stated(gold: str, text: str) -> bool:
    """Check for the same text, the same range, or the same numbers with their units."""
    ends, measures = range_of(gold), measures_of(gold)
    is_same_range = ends is not None and ends == range_of(text)
    return text.strip(" $.") == gold.strip() or is_same_range or measures_of(text) == measures != set()


def _needs_algebra(answer: Answer) -> bool:
    """Check whether algebra may find a number where arithmetic finds none."""
    has_command = "\\" in plain(answer.text[:MAX_SYMBOLIC]) or (answer.form == "box" and "!" in answer.text)
    return has_command and answer.form != "none"


def _is_allowed(answer: Answer, gold: str, question: str) -> bool:
    return same_spelling(answer.text, gold) or is_computed(answer.text, gold, question)


_FORMULA = re.compile(r"\$([^$\n]{1,200})\$|\\\(([^\n]{1,200}?)\\\)|\\\[(.{1,200}?)\\\]", re.DOTALL)


def _last_formula(answer: Answer) -> Answer:
    """Return the last formula, which without a mark stands for an answer that is not a number."""
    formulas = [match[1] or match[2] or match[3] for match in _FORMULA.finditer(answer.text[-2000:])]
    return Answer(formulas[-1] if formulas else answer.text[-MAX_SYMBOLIC:], "none")
