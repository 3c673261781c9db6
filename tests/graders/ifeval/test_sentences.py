"""Counting sentences as Punkt does, without its model."""

from random import Random

import pytest

from covey_graders.ifeval.checks import sentences as module
from covey_graders.ifeval.checks.sentences import sentences


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("", 0),
        ("   \n", 0),
        ("One", 1),
        ("One. Two", 2),
        ("One.Two", 1),
        ("one line\nanother line", 1),
        ("Hi! Bye? Done.", 3),
        ("Hi!Bye!Done!", 1),
        ("!!! Yes", 3),
        ("Pi is 3.14. E is 2.72.", 2),
        ("See www.example.com. It works.", 2),
        ("Dr. Smith and Mrs. Jones met at 5 p.m. on Monday.", 1),
        ("The U.S. Army left. So did we.", 2),
        ("He moved to the U.S. He liked it.", 2),
        ("J. Smith came. B. Jones left.", 2),
        ("From A to B. It is far.", 2),
        ("Use tools, e.g. hammers, i.e. things etc. and so on.", 4),
        ("Well... maybe not.", 1),
        ("Well... The end.", 2),
        ("1. Apples\n2. Pears", 3),
        ("1. apples\n2. pears", 1),
        ('He said, "Go." She went.', 2),
        ('"It is late." "So what?"', 2),
        ("(It is late.) We go.", 2),
        ("**Bold.** Plain.", 2),
        ("Wait. . . . what", 5),
    ],
)
def test_sentences_are_counted_like_this(text: str, number: int) -> None:
    assert len(sentences(text)) == number, sentences(text)


def test_a_closing_quote_belongs_to_the_sentence_before() -> None:
    assert sentences('He said, "Go." She went.') == ['He said, "Go."', "She went."]


@pytest.mark.long
def test_untrained_rules_are_those_of_nltk(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same abbreviations and no words that usually begin a sentence, on text made to be difficult."""
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    monkeypatch.setattr(module, "FIRST_WORDS", frozenset())
    nltk = PunktSentenceTokenizer()
    nltk._params.abbrev_types |= module.ABBREVIATIONS
    for seed in range(3000):
        random = Random(seed)
        text = "".join(random.choice(PIECES) for _ in range(random.randint(1, 40)))
        assert sentences(text) == [found.strip() for found in nltk.tokenize(text) if found.strip()], repr(text)


PIECES = [
    *".?!,;:\"'()[]{}*-@&#`<>",
    *[" "] * 12,
    *("\n", "\n\n", "a", "B", "hello", "World", "the", "The", "Dr.", "U.S.", "e.g.", "1.", "3.14", "...", ". . ."),
    *(
        "--",
        "J.",
        "No",
        "st.",
        "word-st.",
        "Ph.D.",
        "é",
        "É",
        "日本",
        "。",
        "?!",
        "!!!",
        "'s",
        "\u00a0",
        "\t",
        "“",
        "”",
    ),
]


@pytest.mark.long
def test_megabytes_of_nonsense_take_no_time() -> None:
    for nonsense in ("." * 200_000, "a." * 100_000, "\n" * 200_000, ". " * 100_000, "(" * 200_000):
        assert len(sentences(nonsense)) >= 0
