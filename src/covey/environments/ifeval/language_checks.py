"""Checks of language and case. Each is true where the text follows the instruction."""

from covey.environments.ifeval.languages import detect
from covey.environments.ifeval.text_checks import compares
from covey.environments.ifeval.words import count_capital_words


def response_language(text: str, *, language: str) -> bool:
    """The language of the whole; a text without usable letters (digits, marks, emoji) is in any."""
    return detect(text) in (language, None)


def capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    return compares(count_capital_words(text), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    """No small letter, at least one capital, and English (langdetect is poor on capitals)."""
    return text.isupper() and detect(text) in ("en", None)


def english_lowercase(text: str) -> bool:
    """No capital letter, at least one small one, and English."""
    return text.islower() and detect(text) in ("en", None)
