"""The compact form: lossless, and any text is data."""

import random

import pytest

from covey_tasks.machines.design.blocks import BLOCKS, CAR_TYPES
from covey_tasks.machines.design.compact import FACES, PARENTS, read_compact, write_compact
from covey_tasks.machines.design.demonstrations import make_designs
from covey_tasks.machines.design.types import ROOT, Block, Invalid, Rules

from .designs import demonstrating

CAR = Rules(CAR_TYPES)
TYPES = {type_: block.character for type_, block in BLOCKS.items() if type_ != 0}


def test_every_type_parent_and_face_has_a_character_of_its_own() -> None:
    characters = [*TYPES.values(), *PARENTS, *FACES]
    assert len(set(characters)) == len(characters) == 23 + 48 + 13
    assert BLOCKS[0].character == ""
    assert all(" " < character <= "~" for character in characters)
    assert not set(characters) & set("`\"'\\")


def test_a_car_is_three_characters_a_block_and_a_band_five() -> None:
    tree = (ROOT, Block(63, 0, 0), Block(2, 1, 1), Block(2, 1, 4), Block(9, 0, 4, 1, 12))
    assert write_compact(tree) == "Ba0Wb1Wb4Ya4b<"
    assert read_compact("Ba0Wb1Wb4Ya4b<", CAR) == tree


def test_demonstrations_come_back_unchanged() -> None:
    designs = make_designs(demonstrating(("car", "catapult"), 100, 48, 0.5, seed=0))
    assert len(designs) > 90
    for design in designs:
        assert read_compact(write_compact(design.tree), design.problem.rules) == design.tree


def test_nothing_is_the_root_alone() -> None:
    assert read_compact(" \n", CAR) == (ROOT,)


@pytest.mark.parametrize("text", ["B", "Ba", "Ba0W", "ba0", "B00", "Baa", "Ba0 Wb1", "Ya4b", "é", "Ba0\x00", "????"])
def test_what_does_not_follow_the_grammar_has_the_wrong_shape(text: str) -> None:
    found = read_compact(text, CAR)
    assert isinstance(found, Invalid)
    assert found.code == "shape"


@pytest.mark.parametrize(
    ("text", "code"),
    [("Ba0" * 48, "too_many"), ("Qa0", "type"), ("Bb0", "parent"), ("Ba6", "face"), ("Ba0Ba0", "occupied")],
)
def test_a_tree_that_is_none_is_told_as_in_json(text: str, code: str) -> None:
    found = read_compact(text, CAR)
    assert isinstance(found, Invalid)
    assert found.code == code


def test_any_text_is_read() -> None:
    generator = random.Random(0)
    characters = [*TYPES.values(), *PARENTS, *FACES, " ", "é", "\ud800"]
    for _ in range(2000):
        read_compact("".join(generator.choices(characters, k=generator.randint(0, 40))), CAR)
