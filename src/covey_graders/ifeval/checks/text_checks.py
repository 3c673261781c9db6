"""Checks of words, lengths, layout, language and case; True if followed."""

import json
import operator
import re
from collections.abc import Callable

from covey_graders.ifeval.checks.languages import detect
from covey_graders.ifeval.checks.sentences import sentences
from covey_graders.tables import patterns_beside, steps, substitute, table_beside

_RE = patterns_beside(__file__)

AT_LEAST, LESS_THAN = "at least", "less than"
RELATIONS = (LESS_THAN, AT_LEAST)
"""Relations of IFEval itself."""
COMPARED: dict[str, Callable[[int, int], bool]] = {
    **{LESS_THAN: operator.lt, AT_LEAST: operator.ge, "at most": operator.le, "exactly": operator.eq},
    "around": lambda count, threshold: abs(count - threshold) <= max(round(threshold * 0.1), 1),
}
"""These, and further ones of Tulu's rows."""

_TABLE = table_beside(__file__)
_AT_MARKS, _IN_WORDS = steps(_TABLE["at_marks"]), steps(_TABLE["in_words"])
"""Steps of the Penn Treebank's split of a sentence, as in nltk: at punctuation, then in CANNOT and 'TIS."""


def compares(count: int, relation: str, threshold: int) -> bool:
    """Return True if a count stands to the threshold as the relation says."""
    return COMPARED[relation](count, threshold)


def existence(text: str, *, keywords: list[str]) -> bool:
    """Check that each keyword occurs, in words too, in any case."""
    return all(_occurrences(keyword, text) for keyword in keywords)


def frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    """Check the number of occurrences, parts of words included, without overlaps."""
    return compares(_occurrences(keyword.strip(), text), relation, frequency)


def _occurrences(keyword: str, text: str) -> int:
    return sum(1 for _ in re.finditer(re.escape(keyword), text, re.IGNORECASE))


def forbidden_words(text: str, *, forbidden_words: list[str]) -> bool:
    """Check that none occurs as a whole word.

    The `cat` of cat's and cat-like does, that of cats and cat_name not.
    """
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    """Check the number of a character, in both cases, without accented ones."""
    return compares(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


def number_words(text: str, *, num_words: int, relation: str) -> bool:
    return compares(count_words(text), relation, num_words)


def number_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    return compares(len(sentences(text)), relation, num_sentences)


def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Check the number of pieces between `***`, without blank end pieces."""
    pieces = [piece.strip() for piece in _RE["divider"].split(text)]
    return all(pieces[1:-1]) and sum(map(bool, pieces)) == num_paragraphs


def nth_paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    pieces = text.split("\n\n")
    num_filled = sum(bool(piece.strip()) for piece in pieces)
    words = pieces[nth_paragraph - 1].split() if nth_paragraph <= num_filled else []
    if not words:
        return False
    first = _RE["word_end"].split(words[0].lstrip("'").lstrip('"'), maxsplit=1)[0].lower()
    return num_filled == num_paragraphs and first == first_word.lower()


def two_responses(text: str) -> bool:
    """Check for two different answers with `******` between them.

    A further blank piece may stand at either end.
    """
    pieces = [piece.strip() for piece in text.split("******")]
    answers = [piece for piece in pieces if piece]
    return all(pieces[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """Check that the request comes first, in any case. Nothing need follow."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, *, end_phrase: str) -> bool:
    """Check that the phrase comes last, in any case, before quotes."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    """Check for straight double quotes around everything."""
    whole = text.strip()
    return len(whole) > 1 and whole[0] == whole[-1] == '"'


def no_comma(text: str) -> bool:
    """Check for no ASCII comma. Other scripts' commas are other characters."""
    return "," not in text


def response_language(text: str, *, language: str) -> bool:
    """Check the text's language; without usable letters any passes."""
    return detect(text) in (language, None)


def capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    return compares(count_capital_words(text), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    """Check for capitals alone, and English (langdetect is poor on capitals)."""
    return text.isupper() and detect(text) in ("en", None)


def english_lowercase(text: str) -> bool:
    """Check for no capital letter, at least one small one, and English."""
    return text.islower() and detect(text) in ("en", None)


_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_FENCES = ("```json", "```Json", "```JSON", "```")
_POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}


def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    """Check the number of `[...]`, each on one line, empty ones included."""
    return sum(map(_placeholders, text.split("\n"))) >= num_placeholders


def _placeholders(line: str) -> int:
    count, end = 0, -1
    while (begin := line.find("[", end + 1)) >= 0 and (end := line.find("]", begin)) >= 0:
        count += 1
    return count


def postscript(text: str, *, postscript_marker: str) -> bool:
    """Check for the marker anywhere, in any case.

    P.S. and P.P.S may have white space inside.
    """
    marker = postscript_marker.strip()
    return re.search(_POSTSCRIPTS.get(marker, re.escape(marker.lower())), text.lower()) is not None


def number_bullet_lists(text: str, *, num_bullets: int) -> bool:
    """Check the exact number of lines that begin with `-` or `*`."""
    stars, dashes = _RE["star_bullet"].findall(text), _RE["dash_bullet"].findall(text)
    return len(stars) + len(dashes) == num_bullets


def constrained_response(text: str) -> bool:
    """Check that one of the three answers occurs, letter by letter."""
    return any(answer in text for answer in _ANSWERS)


def number_highlighted_sections(text: str, *, num_highlights: int) -> bool:
    """Check the number of nonblank `*...*` and `**...**`, counted separately."""
    found = [*_RE["highlight"].findall(text), *_RE["bold"].findall(text)]
    return sum(bool(inside.strip()) for inside in found) >= num_highlights


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """Check the number of the word, in this case, before a number."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


def json_format(text: str) -> bool:
    """Check for any JSON value, NaN included, fenced or not."""
    value = text.strip()
    for fence in _FENCES:
        value = value.removeprefix(fence)
    try:
        json.loads(value.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """Check for a nonblank text between `<<` and a line's last `>>`."""
    return any(map(_has_title, text.split("\n")))


def _has_title(line: str) -> bool:
    begin, end = line.find("<<"), line.rfind(">>")
    return 0 <= begin < end - 2 and bool(line[begin : end + 2].lstrip("<").rstrip(">").strip())


def count_words(text: str) -> int:
    """Count runs of letters, digits and underscores: don't is two."""
    return sum(1 for _ in _RE["word"].finditer(text))


def count_capital_words(text: str) -> int:
    """Count words in upper case: I, U.S. and 3D count, DON'T twice."""
    return sum(word.isupper() for sentence in sentences(text) for word in _words(sentence))


def _words(sentence: str) -> list[str]:
    """Return a sentence's words without punctuation, in nltk's order of steps."""
    return substitute(f" {' '.join(substitute(sentence, _AT_MARKS).split())} ", _IN_WORDS).split()
