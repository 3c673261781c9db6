"""What a model writes can be looked at and does nothing."""

import sys

import pytest

from covey.system.text.escaping import escape


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x9b2J", r"\x9b2J"),
        ("a\rb\x08", r"a\rb\x08"),
        ("line\nline\ttab", r"line\nline\ttab"),
        ("\u2028\u2029\x85", r"\u2028\u2029\x85"),
        ("abc\u202e\u2066cba", r"abc\u202e\u2066cba"),
        ("zero\u200bwidth\ufeff", r"zero\u200bwidth\ufeff"),
        ("\U000e0041tag", r"\U000e0041tag"),
        ("half \ud83d", r"half \ud83d"),
        ("\x7f\x00", r"\x7f\x00"),
    ],
)
def test_what_could_act_or_hide_is_written_out(text: str, shown: str) -> None:
    assert escape(text) == shown


@pytest.mark.parametrize("text", ["\\frac{1}{2}", "naïve 日本語\u3000שלום", "1\u00a0000 €", "😀 e\u0301", ""])
def test_what_can_be_seen_stays_as_it_is(text: str) -> None:
    assert escape(text) == text


def test_line_breaks_stay_where_they_are_wanted_and_nothing_else_does() -> None:
    assert escape("a\n\tb\x1b", keep="\n") == "a\n\\tb\\x1b"


@pytest.mark.long
def test_no_character_at_all_passes_that_a_terminal_would_obey() -> None:
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    assert all(c.isprintable() or c.isspace() for c in escape(everything))
    assert not set(escape(everything)) & set("\n\r\t\x0b\x0c\x1b\x85\u2028\u2029")
