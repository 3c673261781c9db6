"""Checks of language and case. Each is true where the text follows the instruction."""

from covey.environments.ifeval.checks.languages import detect
from covey.environments.ifeval.checks.text_checks import compares
from covey.environments.ifeval.checks.words import count_capital_words


def response_language(text: str, *, language: str) -> bool:
    """Check the language of the whole. A text without usable letters (digits, marks, emoji) is in any."""
    return detect(text) in (language, None)


def capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    return compares(count_capital_words(text), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    """Check for no small letter, at least one capital, and English (langdetect is poor on capitals)."""
    return text.isupper() and detect(text) in ("en", None)


def english_lowercase(text: str) -> bool:
    """Check for no capital letter, at least one small one, and English."""
    return text.islower() and detect(text) in ("en", None)
