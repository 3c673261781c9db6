import math
from itertools import combinations

import pytest
import torch
from torch import Tensor

from covey.algorithm.credit.advantages import Scores, gdpo, group_center, group_zscore, scores
from covey.algorithm.credit.selection import (
    SELECTION,
    balanced_indices,
    balanced_subset,
    forget,
    keep_top_k,
    max_variance,
    max_variance_indices,
    mean_bounds,
    top_k,
    zero_std,
)
from covey.algorithm.loss_inputs import clamp_symmetric

NAN = math.nan
NEEDED = {"top_k": {"k": 2}, "max_variance": {"m": 2}, "balanced_subset": {"group_size": 2}}


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_top_k_keeps_the_best_of_each_group_with_the_groups_baseline() -> None:
    chosen = top_k(scores([1.0, 4.0, 0.0, 3.0, 2.0, 8.0], [0, 1, 0, 0, 1, 1]), group_center, k=1)
    assert chosen.keep_N.tolist() == [False, False, False, True, False, True]
    torch.testing.assert_close(chosen.advantages_N, tensor(0, 0, 0, 3 - 4 / 3, 0, 8 - 14 / 3))


def test_top_k_can_take_the_baseline_over_the_kept_alone() -> None:
    chosen = top_k(scores([1.0, 0.0, 3.0], [0, 0, 0]), group_center, k=2, baseline_over="selected")
    assert chosen.advantages_N.tolist() == [-1.0, 0.0, 1.0]


def test_equal_rewards_are_kept_in_order() -> None:
    chosen = top_k(scores([0.5, 0.5, 0.5], [0, 0, 0]), group_center, k=2)
    assert chosen.keep_N.tolist() == [True, True, False]


def test_gfpo_ranks_by_length_or_by_reward_per_token() -> None:
    given = scores([1.0, 0.2, 0.9], [0, 0, 0], lengths=[9, 1, 3])
    assert top_k(given, group_center, k=1, rank_by="length").keep_N.tolist() == [False, True, False]
    assert top_k(given, group_center, k=1, rank_by="reward_per_token").keep_N.tolist() == [False, False, True]


def test_any_ranking_can_be_supplied_and_an_unscored_rollout_is_never_kept() -> None:
    given = scores([1.0, NAN, 2.0], [0, 0, 0])
    assert keep_top_k(given, tensor(5, 9, 1), k=1).tolist() == [True, False, False]
    assert keep_top_k(given, tensor(5, 9, 1), k=3).tolist() == [True, False, True]


@pytest.mark.parametrize("m", [2, 3, 5])
def test_the_widest_subset_equals_enumeration(m: int) -> None:
    rewards_M = torch.randn(8, generator=torch.Generator().manual_seed(m), dtype=torch.float64)
    widest = max(float(rewards_M[list(s)].var(correction=0)) for s in combinations(range(8), m))
    chosen = max_variance_indices(rewards_M, m)
    assert len(set(chosen.tolist())) == m
    torch.testing.assert_close(rewards_M[chosen].var(correction=0), tensor(widest)[0])


def test_the_widest_subset_is_standardised_on_its_own() -> None:
    assert max_variance_indices(torch.tensor([0.0, 0.0, 1.0, 1.0]), 3).tolist() == [1, 2, 3]  # of equal spreads
    chosen = max_variance(scores([0.0, 0.4, 0.5, 1.0], [0] * 4), lambda given: group_zscore(given, ddof=0), m=2)
    torch.testing.assert_close(chosen.advantages_N, tensor(-1, 0, 0, 1), rtol=0, atol=1e-5)


def test_parts_of_what_is_left_out_are_in_no_baseline_over_what_is_kept() -> None:
    given = scores([3.0, 2.0, 9.0, 0.0], [0] * 4, parts=[[3.0], [2.0], [9.0], [0.0]])
    kept = top_k(given, lambda on: gdpo(on, eps=0.0), k=2, baseline_over="selected")
    assert kept.keep_N.tolist() == [True, False, True, False]
    torch.testing.assert_close(kept.advantages_N, tensor(-(0.5**0.5), 0, 0.5**0.5, 0))


def test_the_balanced_subset_is_nearest_the_middle_then_widest_then_first() -> None:
    assert balanced_indices(tensor(1, 1, 0, 1, 0), group_size=4) == (0, 1, 2, 4)
    assert balanced_indices(tensor(0.5, 0.5, 0.0, 1.0), group_size=2) == (2, 3)
    assert balanced_indices(tensor(0.3, 0.9), group_size=4) == (0, 1)
    with pytest.raises(ValueError, match=r"^balanced_subset tries at most 200000 subsets, got 40 choose 20$"):
        balanced_indices(torch.zeros(40), group_size=20)


def test_a_balanced_subset_is_taken_from_each_group() -> None:
    given = scores([1.0, 0.0, 1.0, 0.0, 0.0, 1.0], [0, 0, 0, 1, 1, 1])
    chosen = balanced_subset(given, group_center, group_size=2)
    assert chosen.keep_N.tolist() == [True, True, False, True, False, True]
    assert chosen.advantages_N.tolist() == [0.5, -0.5, 0.0, -0.5, 0.0, 0.5]


def test_forgotten_rollouts_leave_every_statistic_parts_included() -> None:
    parts = [[1.0, 5.0], [0.0, 3.0], [9.0, 9.0]]
    drop_N = torch.tensor([False, False, True])
    whole = forget(scores([6.0, 3.0, 18.0], [0, 0, 0], parts=parts), drop_N)
    pair = scores([6.0, 3.0], [0, 0], parts=parts[:2])
    torch.testing.assert_close(gdpo(whole)[:2], gdpo(pair))


@pytest.mark.parametrize("name", SELECTION)
def test_selection_from_nothing_keeps_nothing(name: str) -> None:
    unscored = scores([NAN, NAN], [0, 0])
    for given in (scores([], []), unscored):
        chosen = SELECTION[name](given, group_center, **NEEDED[name])
        assert not chosen.keep_N.any()
        assert chosen.advantages_N.tolist() == [0.0] * len(given.rewards_N)


@pytest.mark.parametrize("name", SELECTION)
def test_selection_does_not_depend_on_the_order_of_the_groups(name: str) -> None:
    rewards = [0.1, 0.9, 0.4, 0.6, 0.2, 0.8]
    interleaved = scores(rewards, [0, 1, 0, 1, 0, 1])
    order = [0, 2, 4, 1, 3, 5]
    apart = scores([rewards[i] for i in order], [0, 0, 0, 1, 1, 1])
    select = SELECTION[name]
    expected = select(interleaved, group_center, **NEEDED[name]).keep_N[order]
    assert select(apart, group_center, **NEEDED[name]).keep_N.tolist() == expected.tolist()


def refuse(given: Scores) -> Tensor:
    raise AssertionError("options are checked before anything is estimated")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("top_k", {"k": 0}, "k must be >= 1, got 0"),
        ("top_k", {"k": 1, "rank_by": "luck"}, "rank_by must be one of reward, length, reward_per_token, got luck"),
        ("top_k", {"k": 1, "baseline_over": "all"}, "baseline_over must be one of group, selected, got all"),
        ("max_variance", {"m": 1}, "m must be >= 2, got 1"),
        ("balanced_subset", {"group_size": 0}, "group_size must be >= 1, got 0"),
    ],
)
def test_impossible_selections_are_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        SELECTION[name](scores([1.0, 0.0], [0, 0]), refuse, **options)


def test_advantages_are_clamped_on_both_sides() -> None:
    assert clamp_symmetric(tensor(-3, 0.1, 0.5), 0.2).tolist() == [-0.2, 0.1, 0.2]
    assert clamp_symmetric(tensor(-3, 0.1), None).tolist() == [-3.0, 0.1]


@pytest.mark.parametrize(
    ("rewards", "keep"),
    [([1, 1, 1], False), ([1, 1, 0], True), ([1, NAN, 1], False), ([1], False), ([NAN], False), ([], False)],
)
def test_a_group_of_equal_rewards_is_dropped(rewards: list[float], keep: bool) -> None:
    assert zero_std(tensor(*rewards)) is keep


def test_rewards_that_differ_by_more_than_rounding_are_not_equal_however_little_they_spread() -> None:
    assert zero_std(tensor(0.5, 0.5, 0.5001))
    assert not zero_std(tensor(0.5, 0.5, 0.5 + 1e-7))
    assert not zero_std(tensor(0.5, 0.5, 0.5001), atol=1e-3)


@pytest.mark.parametrize(
    ("rewards", "keep"),
    [([1, 1], False), ([0, 0], False), ([1, 0], True), ([NAN, 0.3], True), ([NAN], False), ([], False)],
)
def test_a_group_too_easy_or_too_hard_is_dropped(rewards: list[float], keep: bool) -> None:
    assert mean_bounds(tensor(*rewards)) is keep


def test_mean_bounds_are_exclusive_and_in_order() -> None:
    assert not mean_bounds(tensor(0.5, 0.5), low=0.5)
    with pytest.raises(ValueError, match=r"^low must be < high=0.2, got 0.8$"):
        mean_bounds(tensor(0.5), low=0.8, high=0.2)
