"""Checks in linear time give the verdicts of the plain patterns they stand for, on text made to be difficult."""

import re
from collections.abc import Callable
from random import Random

import pytest

from covey_graders.ifeval.instructions import CHECKS

PIECES = [
    *"*-<>[]\n\n\n  ",
    "**",
    "***",
    "******",
    "a",
    "b c",
    "\t",
    "\r",
    "<<",
    ">>",
    "\n\n",
    "- ",
    "* ",
    "p.",
    "s.",
    "Day ",
    "1",
]


def bullets(text: str) -> int:
    stars = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)
    return len(stars) + len(re.findall(r"^\s*-.*$", text, re.MULTILINE))


def placeholders(text: str) -> int:
    return len(re.findall(r"\[.*?\]", text))


def highlights(text: str) -> int:
    single = [found.strip("*").strip() for found in re.findall(r"\*[^\n\*]*\*", text)]
    double = [found[2:-2].strip() for found in re.findall(r"\*\*[^\n\*]*\*\*", text)]
    return sum(map(bool, [*single, *double]))


def titles(text: str) -> int:
    return sum(bool(found.lstrip("<").rstrip(">").strip()) for found in re.findall(r"<<[^\n]+>>", text))


def sections(text: str) -> int:
    return len(re.split(r"\s?Day\s?\d+\s?", text)) - 1


def paragraphs(text: str) -> int:
    """-1 where a piece in the middle is blank."""
    pieces = re.split(r"\s?\*\*\*\s?", text)
    if any(not piece.strip() for piece in pieces[1:-1]):
        return -1
    blank = [index for index in {0, len(pieces) - 1} if not pieces[index].strip()]
    return len(pieces) - len(blank)


@pytest.mark.parametrize(
    ("kind", "count", "judged"),
    [
        ("detectable_format:number_bullet_lists", bullets, lambda check, text, n: check(text, num_bullets=n)),
        (
            "detectable_content:number_placeholders",
            placeholders,
            lambda check, text, n: check(text, num_placeholders=n) and not check(text, num_placeholders=n + 1),
        ),
        (
            "detectable_format:number_highlighted_sections",
            highlights,
            lambda check, text, n: check(text, num_highlights=n) and not check(text, num_highlights=n + 1),
        ),
        (
            "detectable_format:multiple_sections",
            sections,
            lambda check, text, n: (
                check(text, section_spliter="Day", num_sections=n)
                and not check(text, section_spliter="Day", num_sections=n + 1)
            ),
        ),
        ("detectable_format:title", titles, lambda check, text, n: check(text) == (n > 0)),
        (
            "length_constraints:number_paragraphs",
            paragraphs,
            lambda check, text, n: n < 1 or check(text, num_paragraphs=n),
        ),
    ],
)
def test_a_check_counts_what_its_pattern_counts(
    kind: str, count: Callable[[str], int], judged: Callable[[Callable[..., bool], str, int], bool]
) -> None:
    for seed in range(3000):
        random = Random(seed)
        text = "".join(random.choice(PIECES) for _ in range(random.randint(1, 25)))
        assert judged(CHECKS[kind], text, count(text)), repr(text)


def test_a_blank_piece_in_the_middle_fails_the_paragraphs() -> None:
    for num_paragraphs in range(5):
        assert not CHECKS["length_constraints:number_paragraphs"]("a***b*** ***c", num_paragraphs=num_paragraphs)
