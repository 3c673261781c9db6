"""Grade a completion's answer by value and claims.

1. Values are compared exactly. Separators, currency signs, units, trailing stops and zeros do not matter; 0.33 is not
   1/3. A percentage equals its number and its hundredth part, and 5 million may be 5, but not 5 billion.
2. Claims of both sides must not contradict (module `claims`); the same in another unit is the same: 500 cm are 5 m.
3. A letter of a multiple choice is compared as a letter, however it is dressed.
4. An answer that leaves the computation undone is wrong (module `computed`), unless values alone are asked for.

Pure, in bounded time, and text is never evaluated as code.
"""

import re
import struct
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

from covey_graders.math.answers import ExtractedAnswer, boxes_of, find_answer, same_measure
from covey_graders.math.computed import is_computed, is_respelled, is_simplified
from covey_graders.math.equal import MAX_FORMULA, same_formula, same_spelling
from covey_graders.math.formulas.nodes import Grouping, is_equation, last_side, numeral_value
from covey_graders.math.formulas.trees import read_tree
from covey_graders.math.formulas.values import value_at
from covey_graders.math.reading.claims import contradict
from covey_graders.math.reading.normalize import TEXT_COMMAND, plain
from covey_graders.math.reading.numerals import Reading, range_of, read_last, read_values
from covey_graders.math.reading.units import (
    conversion,
    differ_in_unit,
    measures_of,
    same_time,
    total_of,
    unit_of,
    without_unit,
)
from covey_graders.tables import patterns_beside


def compare(completion: str, gold: str, question: str = "", computed: bool = True, is_cut: bool = False) -> bool:
    """Check whether the completion's answer is the gold one.

    Args:
        question: says whether a form is asked for (module `computed`).
        computed: an answer that leaves the computation undone is wrong; else values alone count.
        is_cut: the completion ran out of tokens before its end (module `answers`).
    """
    letter, wording = choice_of(gold)
    if is_no_answer(gold):
        return False
    unit = _RE["last_letter"].search(gold)
    is_letter = unit is not None and f"${unit[1]}$" in question
    expected = None if is_letter or letter else gold_value(gold)
    answer = find_answer(completion, numeric=expected is not None, is_cut=is_cut)
    if answer is None:
        return False
    answer = _without_remarks(answer, gold)
    if letter:
        said, text = choice_of(answer.text if answer.form != "none" else _chosen_line(answer.text))
        if said or not wording:
            return said == letter or (not said and same_spelling(text, gold))
        return compare(completion, wording, question, computed, is_cut)
    if _is_stated(gold, answer.text):
        return True
    if _RE["hyphened"].fullmatch(gold):  # a score, years or a date is no difference
        return [gold] == [re.sub(r"\s", "", one).strip("$.") for one in _RE["hyphened"].findall(answer.text)[-1:]]
    said = _RE["sentences"].split(answer.text[-MAX_FORMULA:].strip())[-1] if answer.form == "none" else answer.text
    shortest = 1 if expected is not None or TEXT_COMMAND.search(gold) else 2
    units = unit_of(_RE["reason"].split(said)[0], shortest), unit_of(gold, shortest)
    sides = zip(units, (said, gold), (gold, said), strict=True)
    is_other = any(unit and "%" in other and not _RE["percent"].search(own) for unit, own, other in sides)
    if contradict(said, gold) or differ_in_unit(*units) or is_other:
        return False
    # A reference that is no number: hand the answer on, unless a computation is left undone.
    if expected is None:
        answer = answer if answer.form != "none" else ExtractedAnswer(answer.text[-MAX_FORMULA:], "none")
        texts = [
            text
            for text in (answer.text, *_in_parts(completion, gold))
            if not computed or _is_allowed(text, gold, question)
        ]
        has_order = _RE["numbers"].fullmatch(gold) or _RE["ordered"].search(question)
        if has_order and not any("=" in text for text in (gold, *texts)):
            texts, gold = [_as_point(text) for text in texts], _as_point(gold)
        is_same = any(same_formula(_converted(text, conversion(*units)), gold) for text in texts)
        return is_same or _same_measures(answer.text, gold, question, computed)
    return _same_number(answer, gold, question, computed, conversion(*units))


def _as_point(text: str) -> str:
    """Return a list or spaced numbers in brackets, in order."""
    if _RE["numbers"].fullmatch(text):
        return f"({','.join(_RE['number'].findall(text))})"
    tree = read_tree(text)
    return f"({text})" if isinstance(tree, Grouping) and tree.kind == "list" else text


def _in_parts(completion: str, gold: str) -> list[str]:
    """Return all boxes as one list, if the gold has as many."""
    boxes = boxes_of(completion)
    tree = read_tree(gold)
    is_list = isinstance(tree, Grouping) and tree.kind == "list" and len(tree.members) == len(boxes)
    return [", ".join(boxes)] if is_list else []


def _chosen_line(text: str) -> str:
    """Return the last line, or the only choice; "" for a list."""
    lines = [line for line in text.split("\n") if line.strip()][-MAX_LINES:]
    letters = [choice_of(line)[0] for line in lines]
    if letters[-1:] == [""]:
        chosen = [place for place, letter in enumerate(letters) if letter]
        return lines[chosen[0]] if len({letters[place] for place in chosen}) == 1 else lines[-1]
    return "" if len(letters) > 1 and letters[-2] not in ("", letters[-1]) else lines[-1]


def _same_measures(text: str, gold: str, question: str, computed: bool) -> bool:
    """Compare lists of measures one by one: units may be left out."""
    given, wanted = (_RE["between"].split(one) for one in (text, gold))
    if len(given) != len(wanted) or len(wanted) < 2 or not any(map(unit_of, wanted)):
        return False
    return all(compare(f"\\boxed{{{a}}}", b, question, computed) for a, b in zip(given, wanted, strict=True))


def _converted(text: str, factor: Fraction) -> str:
    """Return a formula in the unit of the gold, without it."""
    return text if factor == 1 else f"\\frac{{{factor.numerator}}}{{{factor.denominator}}}({without_unit(text)})"


def _same_number(answer: ExtractedAnswer, gold: str, question: str, computed: bool, factor: Fraction) -> bool:
    """Compare numbers, and check that nothing is left to compute."""
    expected = gold_value(gold)
    assert expected is not None
    if not computed:
        values = answer_values(answer)
        if values or expected.slack:
            return all(v.agrees(expected, factor) for v in values) if values else _is_near(answer.text, expected)
        return _needs_algebra(answer) and same_formula(answer.text, gold)
    is_final = gold_value(gold, computed=True) is not None
    values = answer_values(answer, computed=is_final)
    if values:
        is_allowed = is_final or answer.form == "none" or _is_allowed(answer.text, gold, question)
        is_same = all(value.agrees(expected, factor) for value in values)
        return is_allowed and is_same and is_respelled(answer.text, gold, question)
    if expected.slack:
        return _is_near(answer.text, expected)
    is_allowed = _needs_algebra(answer) and _is_allowed(answer.text, gold, question)
    return is_allowed and same_formula(answer.text, gold)


def _is_near(text: str, gold: Reading) -> bool:
    """Check for a simplified irrational number that a float stands for."""
    tree = read_tree(text)
    value = value_at(last_side(tree)) if tree is not None and is_simplified(last_side(tree)) else None
    return value is not None and Reading(Fraction(value)).agrees(gold)


def answer_values(answer: ExtractedAnswer, computed: bool = False) -> list[Reading]:
    """Return the numbers an answer states, several for alternatives.

    Args:
        computed: a number that is left to compute, such as `12+7`, has no reading.
    """
    starts_with_words = re.match(r"\s*[A-Za-z]", answer.text) is not None
    is_sentence = answer.form == "tag" and starts_with_words and "\\" not in answer.text
    is_sentence |= answer.form == "none" and len(answer.text.split()) <= MAX_WORDS and not re.search(r"\d", answer.text)
    if answer.form == "none" or is_sentence:
        values = read_last(answer.text, computed)
        return values or (read_values(answer.text, computed=computed) if is_sentence else [])
    is_strict = answer.form in FORMULAS
    values = read_values(answer.text, is_strict, computed)
    return values or (_written_otherwise(answer.text) if is_strict else [])


@lru_cache(maxsize=1024)  # every answer of a group is compared with the same one
def gold_value(gold: str, computed: bool = False) -> Reading | None:
    """Return the number of a reference answer, None unless single.

    `x=3` states one, `x+2y=3` does not. A float, of 15 digits and more, is what it is to its precision.
    """
    tree = read_tree(gold)
    if tree is not None and is_equation(tree):
        return None
    values = read_values(gold, strict=True, computed=computed) or _written_otherwise(gold)
    if len(values) != 1 or values[0].bare is None:
        return None
    return replace(values[0], slack=precision_of(gold))


def precision_of(gold: str) -> Fraction:
    """Return a float's relative precision, 0 for other text."""
    digits = _RE["float"].fullmatch(gold.strip())
    if digits is None or len((digits[1] + digits[2]).lstrip("0")) < DIGITS_OF_A_FLOAT:
        return Fraction(0)
    value = float(gold)
    is_single = abs(value) < MAX_SINGLE and struct.unpack("f", struct.pack("f", value))[0] == value
    return Fraction(1, 2**23 if is_single else 10**14)


def _written_otherwise(text: str) -> list[Reading]:
    """Return the number of a formula such as `0.\\overline{3}`, if any."""
    tree = None if _RE["no_unit"].search(text) else read_tree(text)
    value = None if tree is None else numeral_value(last_side(tree))
    return [] if value is None else [Reading(value)]


def is_no_answer(text: str) -> bool:
    """Check for placeholders that data sets hold in place of an answer."""
    is_none = text.strip(" .$").lower() == "none"  # \\text{none} is what a solution may be
    return is_none or _RE["no_answer"].fullmatch(TEXT_COMMAND.sub(r"\1", text).strip(" .$")) is not None


def choice_of(text: str) -> tuple[str, str]:
    """Return the choice, or yes or no, and the rest.

    >>> choice_of("\\\\textbf{(E)}\\\\ 12")
    ('E', '12')
    """
    bare = " ".join(_RE["dress"].sub(" ", TEXT_COMMAND.sub(r"\1", text[:MAX_FORMULA])).split())
    found = _RE["choice"].fullmatch(bare)
    if found is None or _RE["next_choice"].search(found["text"] or ""):
        return "", bare
    said = (found["letter"] or found["word"]).upper()
    return {"TRUE": "YES", "FALSE": "NO"}.get(said, said), (found["text"] or "").strip(" .:")


def _without_remarks(answer: ExtractedAnswer, gold: str) -> ExtractedAnswer:
    """Return the answer without remarks: rounding, base, bracketed unit, `i.e.`."""
    text = answer.text if "." in gold else _RE["rounded"].sub("", answer.text)
    text = text if "_" in gold else _RE["base"].sub(r"\1", text)
    if answer.form == "none":
        return replace(answer, text=text)
    text = _RE["that_is"].sub("", text)
    restated = _RE["restated"].fullmatch(text)
    if restated is not None and same_measure(restated[1], restated[2]):
        wanted = gold_value(gold)
        readings = read_values(restated[2])
        is_second = wanted is not None and any(reading.agrees(wanted) for reading in readings)
        text = restated[2] if is_second else restated[1]
    return replace(answer, text=text)


def _is_stated(gold: str, text: str) -> bool:
    """Return True for the same text, range, time, or numbers with units."""
    ends, measures, given = range_of(gold), measures_of(gold), measures_of(text)
    is_same_range = ends is not None and ends == range_of(text)
    is_total = max(len(measures), len(given)) > 1 and _total(text) == _total(gold) is not None
    chosen, choices = (re.findall("[A-K]", one) if _RE["choices"].fullmatch(one) else [] for one in (text, gold))
    # Letters in another order, or that repeat, are no choices
    is_chosen = sorted(chosen) == sorted({*choices}) == choices != []
    is_same = text.strip(" $.") == gold.strip() or given == measures != set() or is_chosen
    return is_same or is_same_range or is_total or same_time(text, gold)


def _total(text: str) -> tuple[object, Fraction] | None:
    """Return a quantity in one unit, of one number or of several."""
    total, unit = total_of(measures_of(text)), unit_of(text)
    values = [] if total or unit is None else read_values(text, strict=True, computed=True)
    value = values[0].bare if len(values) == 1 else None
    return total if unit is None or value is None else (unit.quantity, value * unit.size)


def _needs_algebra(answer: ExtractedAnswer) -> bool:
    """Check whether algebra may find a number where arithmetic finds none."""
    is_formula = answer.form in FORMULAS
    has_command = "\\" in plain(answer.text[:MAX_FORMULA]) or (is_formula and "!" in answer.text)
    return has_command and answer.form != "none"


def _is_allowed(text: str, gold: str, question: str) -> bool:
    return same_spelling(text, gold) or is_computed(without_unit(text), without_unit(gold), question)


_RE = patterns_beside(__file__)
FORMULAS = frozenset({"box", "formula"})
"""Forms that hold an answer and nothing else."""
DIGITS_OF_A_FLOAT = 15
MAX_SINGLE = 2**127
MAX_WORDS = 4
"""Most words of a number in words that stands alone."""
MAX_LINES = 60
"""Last lines of an answer that are searched for a choice."""
