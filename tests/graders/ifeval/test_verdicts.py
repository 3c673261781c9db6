"""Strict and loose verdicts."""

import pytest

from covey_graders.ifeval.instructions import Instruction, Verdicts, instruction, judge, verdicts

NO_COMMA = instruction("punctuation:no_comma", {})
QUOTATION = instruction("startend:quotation", {})
END = instruction("startend:end_checker", {"end_phrase": "bye"})


def loose(response: str, asked: Instruction) -> bool:
    return judge(response, [asked]).loose[0]


@pytest.mark.parametrize(
    ("response", "asked"),
    [
        ("a, b\nc", NO_COMMA),  # less its first line
        ("c\na, b", NO_COMMA),  # less its last
        ("a, b\nc\na, b", NO_COMMA),  # less both
        ("x *bye*", END),  # without asterisks
        ("Sure:\n  *bye*\nHope that helps", END),  # less both lines, trimmed, without asterisks
        ('Sure:\n"so"', QUOTATION),
    ],
)
def test_the_loose_verdict_looks_at_eight_texts(response: str, asked: Instruction) -> None:
    assert judge(response, [asked]) == Verdicts((False,), (True,))


def test_a_line_in_the_middle_counts_in_every_text() -> None:
    assert not loose("a\nb, c\nd", NO_COMMA)


def test_one_line_has_no_shortened_text_to_follow_with() -> None:
    assert not loose("a, b", NO_COMMA)


def test_shortened_texts_are_trimmed() -> None:
    """Else a blank piece would come first."""
    arguments = {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "so"}
    assert loose("Here:\n\n\nSo it is", instruction("length_constraints:nth_paragraph_first_word", arguments))


def test_shortened_texts_are_trimmed_before_the_asterisks_go() -> None:
    """So the blank before an asterisk stays."""
    asked = instruction("keywords:existence", {"keywords": ["x "]})
    assert loose("x *\nend", asked)


def test_different_instructions_may_be_followed_in_different_texts() -> None:
    few = instruction("length_constraints:number_words", {"num_words": 2, "relation": "less than"})
    assert judge("a, b\nbye\nc", [few, END]).loose == (True, True)


def test_loose_is_never_stricter_than_strict() -> None:
    asked = instruction("detectable_format:number_highlighted_sections", {"num_highlights": 1})
    assert judge("*a*", [asked]) == Verdicts((True,), (True,))


@pytest.mark.parametrize("response", ["", " \n\t", "\n\n"])
def test_a_blank_response_follows_nothing(response: str) -> None:
    assert judge(response, [NO_COMMA, END]) == Verdicts((False, False), (False, False))


def test_the_four_measures() -> None:
    found = Verdicts((True, False, False, True), (True, True, False, True))
    assert (found.all_strict, found.share_strict, found.all_loose, found.share_loose) == (0.0, 0.5, 0.0, 0.75)
    assert Verdicts((True,), (True,)).all_strict == Verdicts((False,), (True,)).all_loose == 1.0


def test_a_row_needs_arguments_for_each_instruction() -> None:
    assert verdicts("a", ["punctuation:no_comma"], [None]).strict == (True,)
    with pytest.raises(ValueError, match="got 2 instructions and 1 kwargs"):
        verdicts("a", ["punctuation:no_comma"] * 2, [{}])
    with pytest.raises(ValueError, match="at least one instruction"):
        verdicts("a", [], [])
