"""Counting words and words in capitals."""

from random import Random

import pytest

from covey_graders.ifeval.checks import sentences as module
from covey_graders.ifeval.checks.text_checks import count_capital_words, count_words


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("", 0),
        ("don't", 2),
        ("well-known", 2),
        ("1,000.50", 3),
        ("snake_case", 1),
        ("日本語 です", 2),
        ("😀 😀", 0),
        ("a\nb", 2),
    ],
)
def test_words_are_runs_of_letters_digits_and_underscores(text: str, number: int) -> None:
    assert count_words(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("I am A person", 2),
        ("Stop Right There", 0),
        ("the U.S. and 3D", 2),
        ("***WOW*** **YES**", 2),
        ("WORLD-WIDE", 1),
        ("DON'T", 2),
        ("don't", 0),
        ("I'm here, I've been", 2),
        ("NASA's", 1),
        ("CANNOT", 2),
        ("'TIS", 2),
        ("A,B and C,1", 3),
        ("2024 100", 0),
        ("YES/NO", 1),
        ("WE DON'T. YOU DO.", 5),
    ],
)
def test_words_in_capitals_are_counted_like_this(text: str, number: int) -> None:
    assert count_capital_words(text) == number


def test_words_in_capitals_are_those_of_nltk(monkeypatch: pytest.MonkeyPatch) -> None:
    from nltk.tokenize import NLTKWordTokenizer

    monkeypatch.setattr(module, "FIRST_WORDS", frozenset())
    nltk = NLTKWordTokenizer()
    for seed in range(3000):
        random = Random(seed)
        text = " ".join(random.choice(PIECES) + random.choice(MARKS) for _ in range(random.randint(1, 30)))
        expected = sum(word.isupper() for found in module.sentences(text) for word in nltk.tokenize(found))
        assert count_capital_words(text) == expected, repr(text)


PIECES = [
    *(
        "A",
        "B",
        "HELLO",
        "World",
        "THE",
        "I",
        "the",
        "U.S.",
        "3D",
        "5",
        "1,000",
        "WORLD-WIDE",
        "É",
        "日本",
        "X",
        "t",
        "_",
    ),
    *("DON'T", "don't", "WE'LL", "we'll", "I'M", "I'd", "THEY'RE", "ANNA'S", "CANNOT", "GONNA", "WANNA", "LEMME"),
    *("GOTTA", "D'YE", "MORE'N", "'TIS", "'TWAS", "'", '"YES"', "(NO)", "A/B", "**BOLD**", "“SO”", "‘IT’", "«OUI»"),
]
MARKS = [*[""] * 6, *".?!,;:%&", "...", "--", "'", '"', "''", "'S", "N'T", ")", "]"]
