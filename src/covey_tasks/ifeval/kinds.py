"""The kinds of instruction as the generator uses them: arguments to draw, words to ask in, and what goes together."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from covey_graders.ifeval.checks.text_checks import AT_LEAST, LESS_THAN, RELATIONS
from covey_tasks.ifeval import material

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of instruction in one style of prompt.

    >>> Kind(lambda random: {"num_bullets": random.randint(2, 7)}, ("Use exactly {num_bullets} bullet points.",))
    """

    draw: Callable[[Random], Arguments]
    wordings: tuple[str, ...]
    """Templates over the arguments, of which one is drawn; lists are joined by "and"."""


def compatible(first: str, second: str) -> bool:
    """Return whether one answer can follow both kinds of instruction, and neither makes the other idle."""
    if first == second:
        return False
    for one, other in ((first, second), (second, first)):
        if one in ONLY_WITH and other not in ONLY_WITH[one]:
            return False
    return not any(first in group and second in group for group in EXCLUSIVE)


def _nothing(random: Random) -> Arguments:
    return {}


def _number(name: str, low: int, high: int) -> Callable[[Random], Arguments]:
    return lambda random: {name: random.randint(low, high)}


def _compared(name: str, relation: str, at_least: tuple[int, int], less_than: tuple[int, int]) -> Any:
    """Return a number and its relation, from one range for each relation."""

    def draw(random: Random) -> Arguments:
        chosen = random.choice(RELATIONS)
        return {name: random.randint(*(at_least if chosen == AT_LEAST else less_than)), relation: chosen}

    return draw


def _some(name: str, pool: tuple[str, ...], low: int, high: int) -> Callable[[Random], Arguments]:
    return lambda random: {name: random.sample(pool, random.randint(low, high))}


def _one(name: str, pool: tuple[str, ...]) -> Callable[[Random], Arguments]:
    return lambda random: {name: random.choice(pool)}


def _keyword_frequency(random: Random) -> Arguments:
    return {"keyword": random.choice(material.KEYWORDS), **_FREQUENCY(random)}


def _letter_frequency(random: Random) -> Arguments:
    drawn: Arguments = _LETTERS(random)
    rare = drawn["let_relation"] == LESS_THAN
    return {"letter": random.choice(material.RARE_LETTERS if rare else material.COMMON_LETTERS), **drawn}


def _first_word(random: Random) -> Arguments:
    num_paragraphs = random.randint(2, 5)
    nth = random.randint(1, num_paragraphs)
    return {"num_paragraphs": num_paragraphs, "nth_paragraph": nth, **_FIRST_WORD(random)}


def _sections(random: Random) -> Arguments:
    return {
        "section_spliter": random.choice(("Section", "SECTION", "Part", "Day")),
        "num_sections": random.randint(2, 5),
    }


_FREQUENCY = _compared("frequency", "relation", (2, 5), (2, 4))
_LETTERS = _compared("let_frequency", "let_relation", (5, 20), (2, 5))
_FIRST_WORD = _one("first_word", material.FIRST_WORDS)

KINDS: dict[str, Kind] = {
    "keywords:existence": Kind(
        _some("keywords", material.KEYWORDS, 1, 3),
        ("Include the words {keywords}.", "The words {keywords} must occur.", "Make use of {keywords}."),
    ),
    "keywords:frequency": Kind(
        _keyword_frequency,
        ("Use the word {keyword} {relation} {frequency} times.",
         "The word {keyword} should occur {relation} {frequency} times."),
    ),
    "keywords:forbidden_words": Kind(
        _some("forbidden_words", material.FORBIDDEN, 2, 4),
        ("Do not use the words {forbidden_words}.", "Avoid the words {forbidden_words}."),
    ),
    "keywords:letter_frequency": Kind(
        _letter_frequency,
        ("The letter {letter} should occur {let_relation} {let_frequency} times.",),
    ),
    "language:response_language": Kind(
        _one("language", tuple(material.LANGUAGES)),
        ("Answer in {language} and in no other language.", "The whole answer has to be in {language}."),
    ),
    "length_constraints:number_sentences": Kind(
        _compared("num_sentences", "relation", (3, 12), (9, 14)),
        ("Write {relation} {num_sentences} sentences.", "Answer in {relation} {num_sentences} sentences."),
    ),
    "length_constraints:number_paragraphs": Kind(
        _number("num_paragraphs", 2, 6),
        ("Write {num_paragraphs} paragraphs, with the divider *** between them.",),
    ),
    "length_constraints:number_words": Kind(
        _compared("num_words", "relation", (30, 250), (110, 250)),
        ("Write {relation} {num_words} words.", "Use {relation} {num_words} words."),
    ),
    "length_constraints:nth_paragraph_first_word": Kind(
        _first_word,
        ("Write {num_paragraphs} paragraphs, separated by one blank line each. Paragraph {nth_paragraph} must begin "
         "with the word {first_word}.",),
    ),
    "detectable_content:number_placeholders": Kind(
        _number("num_placeholders", 1, 6),
        ("Leave at least {num_placeholders} placeholders in square brackets, such as [name].",),
    ),
    "detectable_content:postscript": Kind(
        _one("postscript_marker", ("P.S.", "P.P.S")),
        ("Add a postscript that begins with {postscript_marker}", "Close with a postscript marked {postscript_marker}"),
    ),
    "detectable_format:number_bullet_lists": Kind(
        _number("num_bullets", 2, 7),
        ("Use exactly {num_bullets} bullet points in markdown, each on a line that begins with a star and a blank.",
         "Give exactly {num_bullets} bullet points, on lines that begin with a dash."),
    ),
    "detectable_format:constrained_response": Kind(
        _nothing, ("Say one of: My answer is yes. My answer is no. My answer is maybe.",)
    ),
    "detectable_format:number_highlighted_sections": Kind(
        _number("num_highlights", 1, 5),
        ("Highlight at least {num_highlights} passages with stars, *like this*.",),
    ),
    "detectable_format:multiple_sections": Kind(
        _sections,
        ("Divide the answer into {num_sections} sections, headed {section_spliter} 1 and so on.",),
    ),
    "detectable_format:json_format": Kind(
        _nothing, ("The whole answer must be valid JSON; markdown fences are allowed.", "Answer with JSON only.")
    ),
    "detectable_format:title": Kind(
        _nothing, ("Give it a title in double angle brackets, as in <<title>>.", "Put a title inside << and >>.")
    ),
    "combination:two_responses": Kind(
        _nothing, ("Give two different answers, with six asterisks ****** and nothing else between them.",)
    ),
    "combination:repeat_prompt": Kind(
        _nothing, ("Begin by repeating the first sentence of this request word for word, then answer it.",)
    ),
    "startend:end_checker": Kind(
        _one("end_phrase", material.PHRASES),
        ("End with exactly these words: {end_phrase}", "Your last words must be: {end_phrase}"),
    ),
    "startend:quotation": Kind(_nothing, ("Put the whole answer in double quotation marks.",)),
    "change_case:capital_word_frequency": Kind(
        _compared("capital_frequency", "capital_relation", (2, 10), (6, 15)),
        ("Write {capital_relation} {capital_frequency} words in capital letters only.",),
    ),
    "change_case:english_capital": Kind(_nothing, ("Write in English and in capital letters only.",)),
    "change_case:english_lowercase": Kind(
        _nothing, ("Write in English and without any capital letter.", "Use small letters only, in English.")
    ),
    "punctuation:no_comma": Kind(_nothing, ("Do not use any commas.", "Write without commas.")),
}  # fmt: skip
"""Style full: all 25 kinds."""

SHORT_KINDS: dict[str, Kind] = {
    "keywords:existence": Kind(_some("keywords", material.SHORT_KEYWORDS, 1, 1), ("say {keywords}.",)),
    "keywords:frequency": Kind(
        lambda random: {"keyword": random.choice(material.SHORT_KEYWORDS), "frequency": 2, "relation": AT_LEAST},
        ("say {keyword} twice.",),
    ),
    "length_constraints:number_sentences": Kind(
        lambda random: {"num_sentences": random.randint(2, 3), "relation": AT_LEAST}, ("{num_sentences} sentences.",)
    ),
    "detectable_format:number_bullet_lists": Kind(_number("num_bullets", 2, 3), ("{num_bullets} bullets.",)),
    "detectable_format:title": Kind(_nothing, ("a <<title>>.",)),
    "startend:end_checker": Kind(_one("end_phrase", material.SHORT_PHRASES), ("end with {end_phrase}",)),
    "startend:quotation": Kind(_nothing, ("in quotes.",)),
    "punctuation:no_comma": Kind(_nothing, ("no commas.",)),
}
"""Style short: what a model of a million parameters can learn in minutes."""

STYLES = {"full": KINDS, "short": SHORT_KINDS}

EXCLUSIVE = (
    {"length_constraints:number_paragraphs", "length_constraints:nth_paragraph_first_word",
     "detectable_format:number_bullet_lists", "detectable_format:constrained_response",
     "detectable_format:multiple_sections", "detectable_format:json_format", "combination:two_responses"},
    {"change_case:english_capital", "change_case:english_lowercase", "change_case:capital_word_frequency",
     "detectable_format:multiple_sections", "detectable_format:constrained_response"},
    {"length_constraints:number_words", "length_constraints:number_sentences"},
    {"combination:repeat_prompt", "startend:quotation", "detectable_format:json_format",
     "length_constraints:nth_paragraph_first_word"},
    {"combination:repeat_prompt", "keywords:letter_frequency", "change_case:english_capital",
     "change_case:english_lowercase"},
    {"combination:repeat_prompt", "detectable_format:constrained_response"},
)  # fmt: skip
"""Of each group a prompt has at most one: layouts, cases, lengths, beginnings, and what a repeated request upsets."""

ONLY_WITH = {
    "language:response_language": {
        "punctuation:no_comma", "startend:quotation", "length_constraints:number_paragraphs",
        "detectable_format:number_bullet_lists", "combination:two_responses",
    },
    "detectable_format:json_format": {
        "punctuation:no_comma", "keywords:existence", "keywords:frequency", "keywords:forbidden_words",
        "keywords:letter_frequency", "length_constraints:number_words",
    },
}  # fmt: skip
"""Kinds that few others go with."""
