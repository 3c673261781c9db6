"""Estimators on small literal batches, and the identities that hold whatever the rewards are."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithm.credit.advantages import (
    ADVANTAGES,
    Scores,
    gdpo,
    gpg,
    group_center,
    group_center_batch_std,
    group_center_token_whiten,
    group_zscore,
    leave_one_out,
    maxrl,
    none,
    opo,
    pairwise,
    reinforce_plus_plus,
    role_ema,
    role_ema_step,
    scores,
)
from covey.algorithm.credit.assign import snap_ties

NAN = math.nan
NEEDED: dict[str, dict[str, Any]] = {"passk": {"k": 2}, "pkpo": {"k": 2}}
GROUPWISE = [
    "group_zscore",
    "group_center",
    "leave_one_out",
    "group_center_batch_std",
    "passk",
    "pairwise",
    "maxrl",
]
"""Estimators whose advantages sum to 0 over every group."""


def batch(seed: int = 0, sizes: tuple[int, ...] = (4, 6, 5)) -> Scores:
    """Interleaved groups of unequal size with random rewards, lengths and two parts."""
    generator = torch.Generator().manual_seed(seed)
    labels = [g for g, size in enumerate(sizes) for _ in range(size)]
    order = torch.randperm(len(labels), generator=generator).tolist()
    n = len(labels)
    parts = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, 9, (n,), generator=generator)
    return scores(parts.sum(1), [labels[i] for i in order], lengths=lengths, parts=parts)


def permuted(given: Scores, order_N: Tensor) -> Scores:
    return replace(
        given,
        rewards_N=given.rewards_N[order_N],
        groups_N=given.groups_N[order_N],
        lengths_N=given.lengths_N[order_N],
        written_N=given.written_N[order_N],
        parts_NK=given.parts_NK[order_N],
    )


def estimate(name: str, given: Scores) -> Tensor:
    return ADVANTAGES[name](given, **NEEDED.get(name, {}))


def close(actual: Tensor, expected: Any, atol: float = 1e-9) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=atol)


def test_a_zscore_is_the_distance_to_the_mean_in_sample_standard_deviations() -> None:
    close(group_zscore(scores([1, 2, 3], [0, 0, 0]), eps=0.0), [-1.0, 0.0, 1.0])
    close(group_zscore(scores([1, 2, 3], [0, 0, 0]), eps=1.0), [-0.5, 0.0, 0.5])
    close(group_zscore(scores([1, 2, 3], [0, 0, 0]), eps=4.0, eps_mode="floor"), [-0.25, 0.0, 0.25])


def test_two_rollouts_lose_the_size_of_their_gap() -> None:
    close(group_zscore(scores([0.0, 7.0], [0, 0]), ddof=1, eps=0.0), [-math.sqrt(0.5), math.sqrt(0.5)])
    close(group_zscore(scores([0.0, 7.0], [0, 0]), ddof=0, eps=0.0), [-1.0, 1.0])


def test_leave_one_out_compares_with_the_others() -> None:
    close(leave_one_out(scores([1.0, 0.0, 0.5], [0, 0, 0])), [0.75, -0.75, 0.0])


def test_leave_one_out_can_be_standardised_over_the_batch() -> None:
    advantages_N = leave_one_out(batch(), post_normalize="batch_zscore", eps=0.0)
    close(advantages_N.mean(), 0.0)
    close(advantages_N.std(), 1.0)


def test_a_group_of_equal_rewards_has_exactly_zero_advantage() -> None:
    given = scores([0.1, 0.1, 0.1, 0.1, 0.7, 0.7, 0.7], [0, 0, 0, 0, 1, 1, 1], lengths=[3, 1, 4, 1, 5, 9, 2])
    for estimator in (group_zscore, group_center, leave_one_out, group_center_batch_std, opo, gpg, pairwise, maxrl):
        assert estimator(given).tolist() == [0.0] * 7, estimator.__name__
    assert group_zscore(given, eps=0.0).tolist() == [0.0] * 7
    assert gpg(given, f_norm="group_std").tolist() == [0.0] * 7


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"role_ema"}))  # which is defined by the order of play
def test_order_of_the_rollouts_does_not_matter(name: str) -> None:
    given = batch()
    order_N = torch.randperm(len(given.rewards_N), generator=torch.Generator().manual_seed(3))
    close(estimate(name, permuted(given, order_N)), estimate(name, given)[order_N])


WHERE_DDOF_ACTS: dict[str, list[dict[str, Any]]] = {
    "leave_one_out": [{"post_normalize": "batch_zscore"}],
    "pairwise": [{"post": "group_zscore"}],
    "gdpo": [{}, {"post": "token_whiten"}],
}


@pytest.mark.parametrize("name", [name for name, f in ADVANTAGES.items() if "ddof" in inspect.signature(f).parameters])
def test_ddof_0_divides_by_the_size_and_ddof_1_by_one_less(name: str) -> None:
    given = scores([0.0, 1.0, 3.0, 7.0], [0] * 4, parts=[[0.0], [1.0], [3.0], [7.0]])
    for options in WHERE_DDOF_ACTS.get(name, [{}]):
        population, sample = (ADVANTAGES[name](given, ddof=ddof, eps=0.0, **options) for ddof in (0, 1))
        close(population, sample * math.sqrt(4 / 3), atol=1e-7)


@pytest.mark.parametrize("name", GROUPWISE)
def test_a_group_sums_to_zero(name: str) -> None:
    given = batch()
    advantages_N = estimate(name, given)
    sums_G = torch.zeros(3, dtype=torch.float64).index_add(0, given.groups_N, advantages_N)
    close(sums_G, [0.0, 0.0, 0.0])
    assert advantages_N.abs().min() < advantages_N.abs().max()


@pytest.mark.parametrize(
    "name",
    ["group_zscore", "group_center", "leave_one_out", "opo", "passk", "pkpo", "best_minus_second", "pairwise"],
)
def test_a_constant_added_to_a_group_changes_nothing(name: str) -> None:
    given = batch()
    moved = replace(given, rewards_N=given.rewards_N + torch.tensor([5.0, -3.0, 100.0])[given.groups_N])
    close(estimate(name, moved), estimate(name, given))


def test_scale_of_the_rewards_does_not_reach_a_zscore_but_scales_a_centred_reward() -> None:
    given = batch()
    larger = replace(given, rewards_N=given.rewards_N * 50)
    close(group_zscore(larger, eps=0.0), group_zscore(given, eps=0.0))
    close(group_center(larger), group_center(given) * 50)


def test_rewards_that_differ_by_rounding_are_equal_at_any_size() -> None:
    groups_N = torch.zeros(3, dtype=torch.int64)
    for size in (1e-6, 1.0, 1e6):
        rewards_N = size * torch.tensor([0.1 + 0.7, 0.8, 0.8 + 1e-9], dtype=torch.float64)
        equal = snap_ties(rewards_N, groups_N).tolist()
        assert equal[0] == equal[1] < equal[2]


@pytest.mark.parametrize("name", ["group_center_token_whiten", "reinforce_plus_plus"])
def test_whitening_is_over_loss_tokens_alone(name: str) -> None:
    given = scores([1.0, 0.0, 0.0], [0, 0, 0], lengths=[1, 3, 0])
    longer = replace(given, written_N=torch.tensor([1.0, 3.0, 8.0], dtype=torch.float64))
    close(ADVANTAGES[name](longer), ADVANTAGES[name](given))
    close((ADVANTAGES[name](longer) * given.lengths_N).sum(), 0.0)


def test_a_large_common_offset_keeps_the_spread() -> None:
    given = scores([1e9, 1e9 + 1e-3, 1e9 + 2e-3], [0, 0, 0])
    close(group_zscore(given, eps=0.0), [-1.0, 0.0, 1.0], atol=1e-3)


OVER_THE_BATCH: list[tuple[str, dict[str, Any]]] = [
    ("leave_one_out", {"post_normalize": "batch_zscore"}),
    ("group_center_batch_std", {"std_of": "centered", "recenter": True}),
    ("gpg", {"alpha": "nonzero_rewards"}),
    ("gpg", {"f_norm": "group_std"}),
    ("gdpo", {"post": "token_whiten"}),
]


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in ADVANTAGES), *OVER_THE_BATCH])
def test_an_unscored_rollout_has_no_advantage_and_moves_no_sibling(name: str, options: dict[str, Any]) -> None:
    given = batch(sizes=(4, 5))
    absent = torch.zeros(9, dtype=torch.bool)
    absent[2] = True
    marked = replace(
        given,
        rewards_N=given.rewards_N.masked_fill(absent, NAN),
        parts_NK=given.parts_NK.masked_fill(absent[:, None], NAN),
    )
    options = NEEDED.get(name, {}) | options
    advantages_N = ADVANTAGES[name](marked, **options)
    assert float(advantages_N[2]) == 0.0
    close(advantages_N[~absent], ADVANTAGES[name](without(given, absent), **options))


def without(given: Scores, absent: Tensor) -> Scores:
    kept = ~absent
    return scores(
        given.rewards_N[kept],
        given.groups_N[kept],
        lengths=given.lengths_N[kept],
        parts=given.parts_NK[kept],
        weights=given.weights_K,
    )


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_batch_of_nothing_gives_nothing(name: str) -> None:
    empty = scores([], [], parts=torch.zeros(0, 2))
    assert estimate(name, empty).shape == (0,)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_batch_without_any_score_gives_zeros(name: str) -> None:
    unscored = scores([NAN] * 4, [0, 0, 1, 1], parts=[[NAN, NAN]] * 4)
    assert estimate(name, unscored).tolist() == [0.0] * 4


SINGLETONS: list[Callable[..., Tensor]] = [group_zscore, group_center, leave_one_out, opo, gpg]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (group_zscore, 0.697246),  # 0.5 / (0.707107 + 0.01)
        (partial(leave_one_out, post_normalize="batch_zscore"), 0.414214),  # 1 / (1.414214 + 1)
        (group_center_batch_std, 0.292893),  # 0.5 / (0.707107 + 1)
        (group_center_token_whiten, 0.408248),  # 0.5 / sqrt(0.5 + 1)
        (reinforce_plus_plus, 0.408248),
        (partial(pairwise, post="group_zscore"), 0.707106),
        (partial(ADVANTAGES["passk"], k=1), 0.980392),  # 0.5 / (0.5 + 0.01)
        (gdpo, 0.706936),  # of 0.292893, whose deviation is 0.414214
    ],
)
def test_rewards_as_small_as_eps_show_its_default_and_that_of_ddof(
    estimator: Callable[..., Tensor], expected: float
) -> None:
    given = scores([1e-4, 0.0], [0, 0], parts=[[1e-4], [0.0]])
    close(estimator(given), [expected, -expected], atol=1e-6)


@pytest.mark.parametrize("estimator", SINGLETONS)
def test_a_lone_rollout_follows_the_singleton_rule(estimator: Callable[..., Tensor]) -> None:
    given = scores([0.8, NAN, NAN], ["alone", "alone", "none"])
    assert estimator(given).tolist() == [0.0, 0.0, 0.0]
    close(estimator(given, singleton="raw"), [0.8, 0.0, 0.0], atol=1e-6)
    with pytest.raises(ValueError, match=r"^singleton=error needs 2 scored rollouts in every group, got 0$"):
        estimator(given, singleton="error")
    with pytest.raises(ValueError, match=r"^singleton=error needs 2 scored rollouts in every group, got 1$"):
        estimator(scores([0.8, 1.0, 0.0], ["alone", "two", "two"]), singleton="error")
    with pytest.raises(ValueError, match=r"^singleton must be one of zero, raw, error, got one$"):
        estimator(given, singleton="one")


def test_batch_scale_is_one_number_for_all_groups() -> None:
    given = scores([0.0, 2.0, 10.0, 14.0], [0, 0, 1, 1])
    centered = torch.tensor([-1.0, 1.0, -2.0, 2.0], dtype=torch.float64)
    close(group_center_batch_std(given, eps=0.0), centered / given.rewards_N.std())
    close(group_center_batch_std(given, std_of="centered", eps=0.0, recenter=True), centered / centered.std())


def test_token_whitening_weighs_by_length() -> None:
    given = scores([1.0, 0.0, 2.0, 0.0], [0, 0, 1, 1], lengths=[1, 3, 2, 2])
    advantages_N = group_center_token_whiten(given)
    tokens_L = advantages_N.repeat_interleave(given.lengths_N.long())
    close(tokens_L.mean(), 0.0)
    close(tokens_L.std(), 1.0, atol=1e-6)
    assert abs(float(advantages_N[:2].sum())) > 0.1, "a group no longer sums to 0"


def test_whitening_equal_rewards_gives_exactly_0_at_any_size() -> None:
    given = scores([1e6 + 0.1] * 7, range(7), lengths=[3, 2, 7, 1, 5, 2, 9])
    assert reinforce_plus_plus(given).tolist() == reinforce_plus_plus(given, eps=0.0).tolist() == [0.0] * 7


def test_reinforce_plus_plus_whitens_over_tokens_without_groups() -> None:
    given = scores([1.0, 0.0, 2.0], [0, 1, 2], lengths=[1, 3, 2])
    tokens_L = given.rewards_N.repeat_interleave(given.lengths_N.long())
    close(reinforce_plus_plus(given), (given.rewards_N - tokens_L.mean()) / (tokens_L.var() + 1e-8).sqrt())


def test_opo_weighs_the_baseline_by_length() -> None:
    # Baseline (1 * 1 + 0 * 3) / 4.
    close(opo(scores([1.0, 0.0], [0, 0], lengths=[1, 3])), [0.75, -0.25])
    close(opo(scores([1.0, 0.0], [0, 0], lengths=[0, 0])), [0.5, -0.5])


def test_gpg_makes_up_for_groups_without_a_gradient() -> None:
    given = scores([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1])
    close(gpg(given), [1.0, -1.0, 0.0, 0.0])  # 4 rollouts / 2 informative
    close(gpg(given, alpha="nonzero_rewards"), [2 / 3, -2 / 3, 0.0, 0.0])  # 4 / 3 rewards other than 0
    close(gpg(given, f_norm="group_std"), [math.sqrt(2), -math.sqrt(2), 0.0, 0.0])


def test_pairwise_win_rate_counts_wins_and_half_ties() -> None:
    close(pairwise(scores([3.0, 1.0, 1.0], [0, 0, 0])), [0.5, -0.25, -0.25])
    close(pairwise(scores([1.0, 5.0], [0, 1])), [0.0, 0.0])


def test_pairwise_difference_is_leave_one_out() -> None:
    close(pairwise(batch(), form="difference"), leave_one_out(batch()))


def test_pairwise_does_not_see_the_scale_of_rewards() -> None:
    given = batch()
    close(pairwise(replace(given, rewards_N=given.rewards_N.exp() * 1e-6)), pairwise(given))
    spread_N = pairwise(given, post="group_zscore", eps=0.0)[given.groups_N == 1]
    close(spread_N.std(), 1.0)


def test_pairwise_takes_a_judges_matrix() -> None:
    given = scores([0.0, 0.0], [0, 0])
    judged = replace(given, preferences_NN=torch.tensor([[0.5, 0.9], [0.1, 0.5]]))
    close(pairwise(judged, form="matrix"), [0.4, -0.4], atol=1e-7)
    with pytest.raises(ValueError, match=r"^form=matrix needs preferences of shape \(2, 2\), got \(0, 0\)$"):
        pairwise(given, form="matrix")
    with pytest.raises(ValueError, match=r"^preferences must satisfy P_ij \+ P_ji = 1, got a sum off by 0.2$"):
        pairwise(replace(given, preferences_NN=torch.tensor([[0.5, 0.9], [0.3, 0.5]])), form="matrix")


def test_gdpo_gives_each_reward_function_its_own_scale() -> None:
    correct, fluent = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor([300.0, 300.0, 100.0, 100.0])
    given = scores(correct + fluent, [0] * 4, parts=torch.stack([correct, fluent], dim=1))
    advantages_N = gdpo(given, eps=0.0)
    # Both rewards move the advantage by the same amount although one is 200 times larger.
    close(advantages_N[0] - advantages_N[2], float(advantages_N[1] - advantages_N[0]))
    close(advantages_N.std(), 1.0)


def test_a_rollout_that_no_part_applies_to_is_in_no_statistic_of_gdpo() -> None:
    given = scores([1.0, 0.0, 0.5], [0, 0, 0], lengths=[1, 1, 4], parts=[[1.0], [0.0], [NAN]])
    for post in ("batch_zscore", "token_whiten"):
        close(gdpo(given, eps=0.0, post=post), [0.70711, -0.70711, 0.0], atol=1e-4)


def test_gdpo_needs_parts() -> None:
    with pytest.raises(ValueError, match=r"^advantage=gdpo needs rewards with parts, got none;"):
        gdpo(scores([1.0, 0.0], [0, 0]))


def test_maxrl_divides_by_the_mean() -> None:
    close(maxrl(scores([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0, 0, 0, 0, 1, 1])), [3.0, -1.0, -1.0, -1.0, 0.0, 0.0])


def test_maxrl_gives_0_to_a_group_whose_mean_is_not_positive() -> None:
    rewards = [1.0, -0.5, -1.0, 0.5, -2.0, math.nan, 0.5, -0.5]
    close(maxrl(scores(rewards, [0, 0, 1, 1, 2, 2, 3, 3])), [3.0, -3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])


def test_a_role_meets_its_baseline_before_it_moves_it() -> None:
    given = scores([1.0, 1.0, NAN, 2.0], [0, 1, 2, 3], roles=["x", "x", "x", "y"])
    advantages_N, baselines = role_ema_step(given, decay=0.5)
    close(advantages_N, [1.0, 0.5, 0.0, 2.0])
    assert baselines == {"x": 0.75, "y": 1.0}


def test_the_decay_of_a_role_baseline_is_the_share_of_what_was() -> None:
    advantages_N, baselines = role_ema_step(scores([1.0, 1.0], [0, 1], roles=["x", "x"]), decay=0.9)
    close(advantages_N, [1.0, 0.9])
    assert baselines["x"] == pytest.approx(0.19)


def test_role_baselines_carry_over_to_the_next_batch() -> None:
    rewards, roles = [0.2, 0.9, 0.4, 0.1], ["x", "y", "x", "y"]
    whole_N = role_ema(scores(rewards, range(4), roles=roles))
    first_N, baselines = role_ema_step(scores(rewards[:2], range(2), roles=roles[:2]))
    second = replace(scores(rewards[2:], range(2), roles=roles[2:]), baselines=baselines)
    close(torch.cat([first_N, role_ema(second)]), whole_N)


def test_no_baseline_leaves_the_reward() -> None:
    close(none(scores([0.5, NAN], [0, 0])), [0.5, 0.0])


def test_groups_are_told_apart_by_label_in_order_of_appearance() -> None:
    assert scores([1.0, 2.0, 3.0], ["b", "a", "b"]).groups_N.tolist() == [0, 1, 0]
    assert scores([1.0, 2.0, 3.0], torch.tensor([7, 2, 7])).groups_N.tolist() == [0, 1, 0]
