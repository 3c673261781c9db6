"""Figures are what the command draws from the data that are committed, and every page has one."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from benchmarks.figures.__main__ import FIGURES, FOLDER
from benchmarks.figures.front import ROOT
from benchmarks.figures.measured import read
from benchmarks.figures.sentences import sentences, written
from benchmarks.figures.shapes import Box, box
from benchmarks.figures.svg import DARK, LIGHT, Drawing
from covey.config import compose as settings
from covey.run.records import terminal


@pytest.mark.parametrize("name", FIGURES)
def test_a_committed_figure_is_what_is_drawn_from_the_committed_data(name: str) -> None:
    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == str(FIGURES[name]()), "run `make figures`"


@pytest.mark.parametrize(("page", "template"), sentences(), ids=lambda one: str(one)[:40])
def test_a_measured_number_in_a_page_is_that_of_the_committed_data(page: str, template: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert written(text, template) == text, "run `make figures`"


TEMPLATE = "{min table cases/step-S/ratio/median .1f} to {max table cases/step-S/ratio/median .1f} times"


def test_wrong_numbers_are_rewritten_across_line_breaks() -> None:
    assert written("It is\n1.2 to 9 %\ntimes as fast.", TEMPLATE) == "It is\n3.8 to 3.8\ntimes as fast."


@pytest.mark.parametrize(
    ("text", "template", "said"),
    [
        ("It is slow.", TEMPLATE, "must stand once on its page, got 0 times"),
        ("1 to 2 times, 3 to 4 times", TEMPLATE, "must stand once on its page, got 2 times"),
        ("1 to 2 times", "{the table cases/*/at_least s} to", "one alone for `the`, got 21"),
        ("1 to 2 times", "{min table cases/none/ratio .1f} to", "must name one value at least, and one alone"),
    ],
)
def test_a_sentence_that_does_not_fit_its_page_or_the_data_is_refused(text: str, template: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        written(text, template)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_a_picture_with_a_title_that_loads_nothing(name: str) -> None:
    text = str(FIGURES[name]())
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "<image" not in text
    assert name == "front/panel" or root.find("{http://www.w3.org/2000/svg}title") is not None


def test_the_panel_is_of_a_run_as_its_recipe_is_and_has_all_columns() -> None:
    settings.register()
    with initialize_config_dir(str(settings.CONF), version_base=None):
        config = settings.to_config(compose("config", overrides=["recipe=arithmetic"]))
    shown = read("panel")
    looks = sorted({*range(0, config.num_steps, config.evaluation.every), config.num_steps})
    assert (shown["command"], shown["num_steps"]) == ("covey train recipe=arithmetic", config.num_steps)
    assert [look["step"] for look in shown["looks"]] == looks
    always = {name for _, name, _ in terminal.COLUMNS} - {"curriculum/level", "kl", "teacher/kl"}
    assert shown["steps"].keys() == always | {"seconds"}


def test_text_that_does_not_fit_into_its_box_is_refused() -> None:
    with pytest.raises(ValueError, match="wider than its box"):
        box(Drawing(100, 100, "a figure"), (0, 0), (60, 40), Box("much too long for it"))


def test_every_colour_of_text_can_be_read_on_its_ground_in_light_and_dark() -> None:
    for palette in (LIGHT, DARK):
        assert set(palette) == set(LIGHT)
        for ground in ("page", "panel", "warm-soft", "cool-soft", "good-soft", "bad-soft"):
            assert contrast(palette["ink"], palette[ground]) > 7
            assert contrast(palette["muted"], palette[ground]) > 4


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of WCAG 2."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


WITHOUT_FIGURES = {
    *(ROOT / "docs" / "reference").glob("*.md"),
    ROOT / "docs" / "develop" / "releases.md",
    *(ROOT / "docs" / name for name in ("trust/branch.md", "trust/verify.md", "use/serve.md")),
}
"""Lists of names and rules, and pages of commands, where a figure would show nothing."""


def test_every_page_of_the_documentation_shows_a_figure_and_no_figure_is_left_over() -> None:
    pages = [*(ROOT / "docs").glob("*/*.md"), ROOT / "README.md", *(ROOT / "benchmarks").rglob("*.md")]
    shown: set[Path] = set()
    for page in pages:
        pictures = re.findall(
            r"(?:!\[[^\]]*\]\(|src(?:set)?=\")([^)\"\s]+\.(?:svg|png|gif))", page.read_text(encoding="utf-8")
        )
        shown |= {(page.parent / picture).resolve() for picture in pictures}
        assert pictures or page.is_relative_to(ROOT / "benchmarks") or page in WITHOUT_FIGURES, page
    assert {path.resolve() for path in FOLDER.rglob("*") if path.is_file()} <= shown
