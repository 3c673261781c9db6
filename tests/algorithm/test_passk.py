"""The best-of-k estimators against brute force over all k-subsets, and the identities between them."""

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor

from covey.algorithm.credit.advantages import group_zscore, leave_one_out, scores
from covey.algorithm.credit.passk import (
    best_minus_second,
    best_with,
    best_without,
    expected_best,
    passk,
    pkpo,
    subset_weights,
)

REWARDS = [0.3, -1.2, 0.8, 0.3, 2.5, 0.0, 0.8]
SIZES = [(n, k) for n in range(1, 8) for k in range(1, n + 1)]


def one_group(rewards: list[float]) -> Tensor:
    return torch.tensor(rewards, dtype=torch.float64)


def best_over(rewards: list[float], subsets: list[tuple[int, ...]]) -> float:
    return sum(max(rewards[i] for i in subset) for subset in subsets) / len(subsets)


def close(actual: Tensor, expected: object, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=atol)


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_means_over_subsets_equal_enumeration(n: int, k: int) -> None:
    rewards = sorted(REWARDS[:n])
    subsets = list(combinations(range(n), k))
    close(expected_best(one_group(rewards), k), best_over(rewards, subsets))
    close(best_with(one_group(rewards), k), [best_over(rewards, [s for s in subsets if i in s]) for i in range(n)])
    if k < n:
        left_out = [best_over(rewards, [s for s in subsets if i not in s]) for i in range(n)]
        close(best_without(one_group(rewards), k), left_out)


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_passk_is_the_mean_zscore_of_the_subsets_that_contain_a_rollout(n: int, k: int) -> None:
    rewards = REWARDS[:n]
    subsets = list(combinations(range(n), k))
    best = one_group([max(rewards[i] for i in s) for s in subsets])
    zscore = (best - best.mean()) / (best.std(correction=0) + 1e-6)
    expected = [float(zscore[[i in s for s in subsets]].mean()) for i in range(n)]
    close(passk(scores(rewards, [0] * n), k=k), expected, atol=1e-9)


def test_subset_weights_sum_to_one_for_a_group_of_thousands() -> None:
    weights_M = subset_weights(5000, 2500, torch.zeros(1, dtype=torch.float64))
    assert weights_M.isfinite().all()
    close(weights_M.sum(), 1.0)
    assert float(weights_M[-1]) == 0.5


def test_passk_of_binary_rewards_has_the_closed_form() -> None:
    # 2 correct of 5, k = 2: rho = 1 - C(3,2)/C(5,2) = 0.7, sigma = sqrt(0.21), C(2,1)/C(4,1) = 0.5.
    sigma = math.sqrt(0.21) + 1e-6
    right, wrong = (1 - 0.7) / sigma, (1 - 0.7 - 0.5) / sigma
    close(passk(scores([1, 0, 0, 1, 0], [0] * 5), k=2), [right, wrong, wrong, right, wrong])


def test_passk_with_k_1_is_the_population_zscore() -> None:
    given = scores(REWARDS, [0] * 7)
    close(passk(given, k=1), group_zscore(given, ddof=0))


def test_passk_with_k_equal_to_the_group_size_gives_nothing() -> None:
    assert passk(scores(REWARDS, [0] * 7), k=7).tolist() == [0.0] * 7


@pytest.mark.parametrize("rewards", [[0.0] * 5, [1.0] * 5, [0.7] * 5, [0.3, 0.3, 0.3, 0.3, 0.1]])
def test_passk_is_zero_where_every_subset_has_the_same_best(rewards: list[float]) -> None:
    assert passk(scores(rewards, [0] * 5), k=2, eps=0.0).tolist() == [0.0] * 5


def test_passk_gives_ties_the_same_and_sums_to_zero() -> None:
    advantages_N = passk(scores(REWARDS, [0] * 7), k=3)
    close(advantages_N[0], float(advantages_N[3]))
    close(advantages_N[2], float(advantages_N[6]))
    close(advantages_N.sum(), 0.0)


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_passk_is_pkpo_without_baseline_standardised(k: int) -> None:
    given = scores(REWARDS, [0] * 7)
    ascending_M = one_group(sorted(REWARDS))
    mean = expected_best(ascending_M, k)
    std = (subset_weights(7, k, ascending_M) @ (ascending_M - mean) ** 2).sqrt()
    rewards_N = pkpo(given, k=k, variant="none", scale="sum")
    close(passk(given, k=k, eps=0.0), (7 / k * rewards_N - mean) / std)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_pkpo_equals_enumeration(k: int) -> None:
    n, subsets = 7, list(combinations(range(7), k))
    smaller = list(combinations(range(7), k - 1))
    given = scores(REWARDS, [0] * n)
    member = [best_over(REWARDS, [s for s in subsets if i in s]) for i in range(n)]
    without = [best_over(REWARDS, [s for s in subsets if i not in s]) for i in range(n)]
    close(pkpo(given, k=k, variant="none"), [k * m for m in member])
    matched = [k * (m - w) for m, w in zip(member, without, strict=True)]
    close(pkpo(given, k=k, variant="loo"), matched)
    published = [k * (m / n - w / (n - 1)) for m, w in zip(member, without, strict=True)]
    close(pkpo(given, k=k, variant="loo", loo_scale="published", scale="sum"), published)
    if k > 1:
        fewer = [best_over(REWARDS, [s for s in smaller if i not in s]) for i in range(n)]
        close(pkpo(given, k=k), [k * (m - f) for m, f in zip(member, fewer, strict=True)])


def test_pkpo_with_k_1_is_leave_one_out() -> None:
    given = scores(REWARDS, [0, 1, 0, 1, 0, 1, 0])
    for loo_scale in ("matched", "published"):
        close(pkpo(given, k=1, loo_scale=loo_scale), leave_one_out(given))


def test_published_leave_one_out_leaves_a_remainder_on_equal_rewards() -> None:
    given = scores([2.0] * 5, [0] * 5)
    close(pkpo(given, k=2, variant="loo"), [0.0] * 5)
    close(pkpo(given, k=2, variant="loo", loo_scale="published", scale="sum"), [-2 * 2.0 / (5 * 4)] * 5)


def test_best_minus_second_is_pkpo_with_k_equal_to_the_group_size() -> None:
    given = scores(REWARDS, [0] * 7)
    close(best_minus_second(given, scale="none"), pkpo(given, k=7, scale="sum"))
    close(best_minus_second(given, scale="none"), [0, 0, 0, 0, 1.7, 0, 0])


def test_best_minus_second_is_scaled_by_the_groups_standard_deviation() -> None:
    close(best_minus_second(scores([0.0, 1.0, 3.0], [0, 0, 0]), eps=0.0), [0, 0, 2 / math.sqrt(7 / 3)])


def test_a_tie_for_the_best_gives_nothing() -> None:
    assert best_minus_second(scores([1.0, 0.0, 1.0], [0, 0, 0])).tolist() == [0.0, 0.0, 0.0]


def test_a_k_beyond_the_group_size_is_refused() -> None:
    uneven = scores(REWARDS, [0, 0, 0, 0, 1, 1, 1])
    for k, bound in ((0, "k must be >= 1, got 0"), (4, "k must be <= group_size = 3, got 4")):
        for estimator in (passk, pkpo):
            with pytest.raises(ValueError, match=f"^{bound}$"):
                estimator(uneven, k=k)
    with pytest.raises(ValueError, match=r"^k must be <= group_size - 1 = 2, got 3$"):
        pkpo(uneven, k=3, variant="loo")
    with pytest.raises(ValueError, match=r"^group_size must be >= 2 for best_minus_second, got 1$"):
        best_minus_second(scores([1.0, 0.0, 2.0], [0, 0, 1]))


def test_a_group_with_too_few_scored_rollouts_gives_nothing() -> None:
    given = scores([1.0, math.nan, math.nan, 0.0, 1.0, 2.0], [0, 0, 0, 1, 1, 1])
    for advantages_N in (passk(given, k=2), pkpo(given, k=2), best_minus_second(given)):
        assert advantages_N[:3].tolist() == [0.0, 0.0, 0.0]
        assert float(advantages_N[5]) > 0
