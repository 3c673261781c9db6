"""Colours of the page: text can be read on whatever it stands, light, dark, and marked as strongly as tokens are."""

import re
from itertools import product

import pytest

from covey_report.page.make import asset

TEXTS, GROUNDS, MARKS = ("ink", "soft", "accent", "good", "bad"), ("ground", "panel"), ("cool", "warm", "one")
STRONGEST = 0.63
"""Opacity of a token's colour: .08 + .55 in groups.js."""
LEAST = 4.5
"""Contrast of small text by WCAG 2.2, AA."""

Colour = tuple[float, float, float]


def palette(theme: str) -> dict[str, Colour]:
    """The colours of a theme; dark ones stand over the light ones."""
    css = asset("report.css")
    blocks = [css.partition("}")[0]] + ([css.partition("[data-theme")[2].partition("}")[0]] if theme == "dark" else [])
    found = {name: value for block in blocks for name, value in re.findall(r"--(\w+): ([^;]+);", block)}
    return {name: colour(value) for name, value in found.items()}


def colour(value: str) -> Colour:
    if value.startswith("#"):
        return int(value[1:3], 16), int(value[3:5], 16), int(value[5:7], 16)
    red, green, blue = re.findall(r"[\d.]+", value)[:3]
    return float(red), float(green), float(blue)


def luminance(of: Colour) -> float:
    shares = [part / 255 for part in of]
    red, green, blue = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: Colour, other: Colour) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def over(mark: Colour, ground: Colour) -> Colour:
    red, green, blue = (STRONGEST * m + (1 - STRONGEST) * g for m, g in zip(mark, ground, strict=True))
    return red, green, blue


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa_on_all_that_it_stands_on(theme: str) -> None:
    of = palette(theme)
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    pairs = {f"{text} on {ground}": contrast(of[text], of[ground]) for text, ground in product(TEXTS, GROUNDS)}
    pairs |= {f"ink on a token of {mark}": contrast(of["ink"], over(of[mark], of["panel"])) for mark in MARKS}
    pairs |= {"ink on a mark": contrast(of["ink"], of["mark"]), "a pressed button": contrast(of["ground"], of["ink"])}
    assert {name: round(value, 2) for name, value in pairs.items() if value < LEAST} == {}


def test_no_other_colour_stands_on_a_token_that_is_marked() -> None:
    (rule,) = re.findall(r"\.tok small \{[^}]*\}", asset("report.css"))
    assert "color" not in rule
