"""Trees of prefixes by hand."""

from collections.abc import Sequence

import numpy as np
import pytest

from covey.policy.attention.packed import places_of
from covey.trainer import layouts
from covey.trainer.layouts import PrefixTree, positions_of, stretches_to

PROMPT = (5, 6)


@pytest.fixture(autouse=True)
def _two_tokens_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "MIN_SHARED", 2)


def laid_out(
    *sequences: Sequence[int], start: int = 0, prompt_length: int = 2
) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of each segment, and where the tokens of each sequence are; what is there is checked to be it."""
    tree = PrefixTree()
    ends = [tree.add(tuple(sequence), prompt_length) for sequence in sequences]
    order, segments = tree.laid_out(start)
    stream = [token_id for node in order for token_id in node.ids]
    positions = list(positions_of(order))
    assert len(stream) == len(positions) == tree.num_tokens
    places = [
        places_of([*stretches_to(segments[end], len(own))]).tolist() for end, own in zip(ends, sequences, strict=True)
    ]
    for own, where in zip(sequences, places, strict=True):
        assert [stream[place - start] for place in where] == list(own)
        assert [positions[place - start] for place in where] == list(range(len(own)))
    return [list(node.ids) for node in order], places


def test_a_prompt_is_shared_and_what_differs_stands_behind_it() -> None:
    segments, places = laid_out((5, 6, 7, 8), (5, 6, 9), start=10)
    assert segments == [[5, 6], [7, 8], [9]]
    assert places == [[10, 11, 12, 13], [10, 11, 14]]


def test_a_single_token_that_agrees_by_chance_cuts_nothing() -> None:
    assert laid_out((5, 6, 7, 8), (5, 6, 7, 9))[0] == [[5, 6], [7, 8], [7, 9]]


def test_what_agrees_in_more_is_split_off_and_its_continuations_stand_behind_it() -> None:
    segments, places = laid_out((5, 6, 7, 8, 1), (5, 6, 9), (5, 6, 7, 8, 2, 3))
    assert segments == [[5, 6], [7, 8], [1], [2, 3], [9]]
    assert places[2] == [0, 1, 2, 3, 5, 6]


def test_a_sequence_that_extends_another_adds_only_its_end() -> None:
    segments, _ = laid_out((5, 6, 7, 8), (5, 6, 7, 8, 1, 2), (5, 6, 7, 8, 1, 2, 3))
    assert segments == [[5, 6], [7, 8], [1, 2], [3]]


def test_a_sequence_that_is_the_beginning_of_another_or_the_same_adds_nothing() -> None:
    segments, places = laid_out((5, 6, 7, 8, 1), (5, 6, 7, 8), (5, 6, 7, 8, 1), (5, 6))
    assert segments == [[5, 6], [7, 8, 1]]
    assert places == [[0, 1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1]]


def test_a_split_above_leaves_earlier_sequences_where_they_belong() -> None:
    segments, places = laid_out((5, 6, 7, 8, 1, 2), (5, 6, 7, 8, 1, 2), (5, 6, 7, 8, 1), (5, 6, 7, 8, 9))
    assert segments == [[5, 6], [7, 8], [1, 2], [9]]
    assert places[2] == [0, 1, 2, 3, 4]


def test_a_prompt_is_shared_however_short_and_another_prompt_is_one_of_its_own() -> None:
    assert laid_out((5, 7), (5, 8), (6, 8), (6, 9), prompt_length=1)[0] == [[5], [7], [8], [6], [8], [9]]


def test_prompts_that_agree_in_part_share_that() -> None:
    assert laid_out((5, 6, 7, 1), (5, 6, 8, 1), prompt_length=3)[0] == [[5, 6], [7], [1], [8, 1]]


def test_any_sequences_are_found_again_and_cost_no_more_than_apart() -> None:
    chance = np.random.default_rng(0)
    for _ in range(60):
        sequences = [tuple(chance.integers(0, 2, chance.integers(1, 9)).tolist()) for _ in range(7)]
        segments, _ = laid_out(*sequences, prompt_length=int(chance.integers(1, 4)))
        assert sum(map(len, segments)) <= sum(map(len, sequences))
