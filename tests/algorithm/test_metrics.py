import math
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor

from covey.algorithm.credit.scores import scores
from covey.algorithm.credit.selection import zero_std
from covey.algorithm.intervals import pass_at_k
from covey.algorithm.loss_inputs import RatioOptions, loss_inputs
from covey.algorithm.metrics import (
    Average,
    Update,
    event_sums,
    group_metrics,
    largest_gap,
    largest_weight,
    mean_over,
    merge,
    off_policy,
    over_updates,
    summarise,
    value,
    weight_sums,
)
from covey.types import UNREWARDED

NAN = math.nan


def log_probs(seed: int) -> Tensor:
    return -torch.rand(6, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


MASK_NT = (
    torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 1, 0, 1, 0], [1, 1, 1, 0, 0], [0, 1, 0, 0, 1]])
    > 0
)


def values(metrics: dict[str, Average]) -> dict[str, float]:
    return {name: value(average) for name, average in metrics.items()}


def test_micro_batches_merge_to_the_metrics_of_the_whole() -> None:
    policy, sampler = log_probs(0), log_probs(1)
    whole = off_policy(policy, sampler, MASK_NT)
    parts = [off_policy(policy[rows], sampler[rows], MASK_NT[rows]) for rows in (slice(0, 1), slice(1, 3), slice(3, 6))]
    assert values(merge(parts)) == pytest.approx(values(whole))
    naive = sum(value(part["kl_k1"]) for part in parts) / 3
    assert abs(naive - value(whole["kl_k1"])) > 1e-3, "the mean of means is another number"


def test_the_same_policy_is_not_off_policy() -> None:
    metrics = values(off_policy(log_probs(0), log_probs(0), MASK_NT))
    ppl = metrics.pop("ppl")
    assert metrics.pop("behaviour_ppl") == ppl
    assert metrics.pop("weight_mean") == 1.0
    assert set(metrics.values()) == {0.0}


def test_off_policy_metrics_of_two_tokens() -> None:
    policy, sampler = torch.tensor([[-1.0, -2.0, NAN]]), torch.tensor([[-1.5, -1.0, NAN]])
    metrics = values(off_policy(policy, sampler, torch.tensor([[True, True, False]])))
    first, second = math.exp(0.5), math.exp(-1.0)
    assert metrics == pytest.approx(
        {
            "kl_k1": 0.25,
            "kl_k3": ((first - 1.5) + second) / 2,
            "weight_mean": (first + second) / 2,
            "chi2_token": (first**2 + second**2) / 2 - 1,
            "chi2_sequence": math.exp(-1.0) - 1,
            "ppl": math.exp(1.5),
            "behaviour_ppl": math.exp(1.25),
            "log_ppl_abs_diff": 0.25,
        },
        rel=1e-5,
    )


def test_one_absurd_sequence_leaves_the_mean_perplexity_finite() -> None:
    policy, sampler = torch.tensor([[-800.0]]), torch.tensor([[-1.0]])
    metrics = values(off_policy(policy, sampler, torch.tensor([[True]])))
    assert metrics["ppl"] == pytest.approx(math.exp(20.0))
    assert metrics["behaviour_ppl"] == pytest.approx(math.e)


def test_rewards_that_stand_for_none_are_in_no_metric_of_rewards() -> None:
    given = scores([0.0, 0.0, 1.0, 0.5, NAN], list("aabbb"), parts=[[0.0], [0.0], [NAN], [NAN], [NAN]])
    found = values(group_metrics(replace(given, part_names=(UNREWARDED,))))
    assert (found["reward_mean"], found["zero_std_fraction"], found["all_wrong_fraction"]) == (0.75, 0.0, 0.0)
    assert found["unscored_fraction"] == 0.2
    alone = replace(scores([0.0, 0.0], "aa", parts=[[0.0], [0.0]]), part_names=(UNREWARDED,))
    assert {name for name, number in values(group_metrics(alone)).items() if number is not None} == {
        "unscored_fraction"
    }


def test_nothing_to_average_has_no_mean() -> None:
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    unknown = torch.full((2, 3), NAN)
    assert set(values(off_policy(unknown, unknown, nothing)).values()) == {None}
    assert float(largest_gap(unknown, unknown, nothing)) == 0.0
    assert float(largest_weight(torch.zeros(0), torch.zeros(0, dtype=torch.bool))) == 0.0
    assert set(values(group_metrics(scores([], []))).values()) == {None}


def test_a_mean_carries_no_gradient() -> None:
    average = mean_over(torch.ones(2, requires_grad=True), torch.tensor([True, False]))
    assert not average.numerator.requires_grad
    assert value(average) == 1.0


def test_extremes_are_taken_over_the_mask() -> None:
    mask = torch.tensor([True, True, False])
    gap = torch.tensor([0.5, -2.0, 7.0])
    assert float(largest_gap(gap, torch.zeros(3), mask)) == 2.0
    assert float(largest_weight(gap, mask)) == pytest.approx(math.exp(0.5))
    assert float(largest_weight(torch.tensor([800.0]), mask[:1])) == pytest.approx(math.exp(20.0))  # and not inf


def test_several_updates_on_a_batch_are_one_row_of_metrics() -> None:
    def update(loss: float, ratios: list[float], largest: float, skipped: float) -> Update:
        ratio = torch.tensor(ratios)
        sums = {"loss": Average(torch.tensor(loss), torch.tensor(1.0)), "ratio": mean_over(ratio, ratio > 0)}
        return Update(sums, summarise(sums) | {"ratio_max": largest, "skipped": skipped, "grad_norm": 2 * loss})

    row = over_updates([update(1.0, [1.0, 1.0, 1.0], 3.0, 1.0), update(2.0, [5.0], 2.0, 1.0)])
    assert {name: value for name, value in row.items() if "/" not in name} == {
        "loss": 1.5,
        "ratio": 2.0,
        "ratio_max": 3.0,
        "skipped": 2.0,
        "grad_norm": 3.0,
    }
    assert (row["first_update/ratio"], row["last_update/ratio"], row["last_update/ratio_max"]) == (1.0, 5.0, 2.0)


def test_the_effective_sample_size_falls_from_update_to_update_on_a_batch() -> None:
    sampler, mask = torch.zeros(1, 4), torch.tensor([[True, True, True, False]])

    def update(shift: float) -> Update:
        now = torch.tensor([[shift, -shift, 0.0, NAN]])
        sums = weight_sums(now, sampler, mask)
        return Update(sums, summarise(sums) | {"skipped": 0.0})

    row = over_updates([update(0.0), update(1.0)])
    e = math.e
    assert row["first_update/ess_fraction"] == 1.0
    assert row["last_update/ess_fraction"] == pytest.approx((e + 1 / e + 1) ** 2 / 3 / (e**2 + e**-2 + 1))
    assert row["ess_fraction"] == pytest.approx((e + 1 / e + 4) ** 2 / 6 / (e**2 + e**-2 + 4))
    assert "current_weight" not in row


def test_rewards_that_differ_by_just_the_tolerance_are_equal() -> None:
    given = scores([0.25, 0.0], [0, 0])
    for atol, share in ((0.25, 1.0), (0.24, 0.0)):
        assert value(group_metrics(given, atol=atol)["zero_std_fraction"]) == share
        assert zero_std(given.rewards_N, atol=atol) == (share == 0.0)


@pytest.mark.parametrize("n", [1, 4, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations([1] * c + [0] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(max, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_k_of_many_samples_neither_overflows_nor_rounds() -> None:
    assert pass_at_k(10_000, 1, 5_000) == 0.5
    assert pass_at_k(10_000, 5_001, 5_000) == 1.0


@pytest.mark.parametrize(
    ("n", "c", "k", "message"),
    [
        (4, 1, 5, r"k must be in \[1, num_samples=4\], got 5"),
        (4, 1, 0, r"k must be in \[1, num_samples=4\], got 0"),
        (4, 5, 1, r"num_correct must be in \[0, num_samples=4\], got 5"),
    ],
)
def test_an_impossible_pass_at_k_is_refused(n: int, c: int, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        pass_at_k(n, c, k)


def test_group_metrics_count_a_group_of_any_size_once() -> None:
    rewards = [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, NAN, 0.0, 1.0, NAN, NAN, 0.5]
    given = scores(rewards, ["right"] * 4 + ["wrong"] * 3 + ["mixed"] * 2 + ["lost"] * 2 + ["alone"])
    assert values(group_metrics(given)) == pytest.approx(
        {
            "reward_mean": 5.5 / 9,
            "mean_group_std": math.sqrt(0.5) / 3,
            "zero_std_fraction": 3 / 4,
            "all_correct_fraction": 1 / 4,
            "all_wrong_fraction": 1 / 4,
            "unscored_fraction": 3 / 12,
        }
    )


@pytest.mark.parametrize(
    ("level", "share"),
    [("token", 1 / 4), ("sequence", 1 / 2), ("sequence_mean", 1 / 2), ("sequence_mean_token", 1 / 2)],
)
def test_what_happens_to_a_ratio_of_sequences_is_counted_in_sequences(level: str, share: float) -> None:
    """One token of one sequence, three of another: the event is the first one's, and that of a masked token."""
    mask_NT = torch.tensor([[True, False, False], [True, True, True]])
    nothing = torch.zeros(2, 3)
    inputs = loss_inputs(nothing, nothing, nothing, mask_NT, ratio_options=RatioOptions(level))
    event_NT = torch.tensor([[True, True, True], [False, False, False]])
    assert values(event_sums({"clip_fraction": event_NT.float()}, inputs)) == {"clip_fraction": share}


def test_group_metrics_of_ranks_merge_to_those_of_the_batch() -> None:
    first, second = scores([1.0, 0.0, 1.0], [0, 0, 0]), scores([1.0, 1.0, 0.0, 0.4], [0, 0, 1, 1])
    whole = scores([1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.4], [0, 0, 0, 1, 1, 2, 2])
    merged = merge([group_metrics(first), group_metrics(second)])
    assert values(merged) == pytest.approx(values(group_metrics(whole)))
