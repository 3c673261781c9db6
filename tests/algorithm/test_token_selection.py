import math
from dataclasses import replace

import pytest
import torch

from covey.algorithm.loss_inputs import LossInputs, loss_inputs
from covey.algorithm.token_selection import (
    high_entropy_mask,
    high_entropy_threshold,
    select_clip_cov,
    select_kl_cov,
    token_covariance,
)

TRUE_NT = torch.ones(2, 2, dtype=torch.bool)


def test_the_threshold_is_the_interpolated_quantile() -> None:
    entropy_L = torch.rand(101, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for fraction in (0.05, 0.2, 0.33, 1.0):
        expected = torch.quantile(entropy_L, 1 - fraction)
        torch.testing.assert_close(high_entropy_threshold(entropy_L, fraction), expected)
    assert float(high_entropy_threshold(torch.tensor([1.0, 2.0]), 0.25)) == 1.75


def test_micro_batches_share_the_threshold_of_the_global_batch() -> None:
    entropy_NT = torch.tensor([[0.1, 0.2], [0.8, 0.9]])
    threshold = high_entropy_threshold(entropy_NT.flatten(), 0.5)
    halves = [high_entropy_mask(row, torch.tensor([True, True]), threshold) for row in entropy_NT]
    assert torch.stack(halves).tolist() == [[False, False], [True, True]]


def test_tokens_at_the_threshold_are_kept() -> None:
    assert high_entropy_mask(torch.ones(2, 2), TRUE_NT, high_entropy_threshold(torch.ones(4), 0.2)).all()


def test_without_tokens_nothing_is_kept() -> None:
    threshold = high_entropy_threshold(torch.zeros(0), 0.2)
    assert not high_entropy_mask(torch.ones(2, 2), ~TRUE_NT, threshold).any()


# ------------------------------------------------------------------------------------------------ covariances


def of_covariances(*covariances: float, num_masked: int = 2) -> LossInputs:
    """One row whose tokens have these covariances of advantage and log-prob, which add up to 0 with their signs."""
    roots = [abs(one) ** 0.5 for one in covariances]
    advantages = [*roots, *(-root for root in roots)]
    log_probs = [root if one > 0 else -root for one, root in zip(covariances, roots, strict=True)]
    log_probs = [*log_probs, *(-one for one in log_probs)]
    mask_NT = torch.tensor([[True] * len(advantages) + [False] * num_masked])
    rows = [torch.tensor([[*values, *([9.0] * num_masked)]]) for values in (advantages, log_probs)]
    return loss_inputs(rows[1], rows[1].clone(), rows[0], mask_NT)


def test_a_covariance_is_of_deviations_from_the_means_of_the_batch() -> None:
    inputs = of_covariances(4.0, 1.0, -9.0)
    assert token_covariance(inputs).tolist() == pytest.approx([4.0, 1.0, -9.0] * 2)
    shifted = replace(inputs, advantages_NT=inputs.advantages_NT + 3, log_probs_NT=inputs.log_probs_NT - 5)
    assert token_covariance(shifted).tolist() == pytest.approx([4.0, 1.0, -9.0] * 2, rel=1e-5)


@pytest.mark.parametrize(("ratio", "drawn"), [(1e-9, 1), (0.25, 3), (0.33, 3), (0.34, 4), (0.5, 6), (1.0, 6)])
def test_a_share_of_all_tokens_is_drawn_among_the_candidates(ratio: float, drawn: int) -> None:
    """Twelve tokens, six of them candidates: covariances at either bound are none, nor are what is clipped."""
    inputs = of_covariances(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    selected_NT = select_clip_cov(inputs, 0, cov_ratio=ratio, cov_low=1.0, cov_high=5.0)
    found = token_covariance(inputs)[selected_NT[inputs.mask_NT]]
    assert int(selected_NT.sum()) == drawn
    assert not selected_NT[~inputs.mask_NT].any()
    assert set(found.round().tolist()) <= {2.0, 3.0, 4.0}
    seeds = [select_clip_cov(inputs, seed, cov_ratio=0.25).tolist() for seed in range(8)]
    assert len({str(one) for one in seeds}) > 1


@pytest.mark.parametrize(("ratio", "chosen"), [(1e-9, [6]), (0.25, [6, 6, 5]), (0.34, [6, 6, 5, 5]), (1.0, None)])
def test_the_largest_covariances_are_penalised(ratio: float, chosen: list[float] | None) -> None:
    inputs = of_covariances(1.0, -2.0, 3.0, 4.0, 5.0, 6.0)
    selected_NT = select_kl_cov(inputs, 0, cov_ratio=ratio)
    found = token_covariance(inputs)[selected_NT[inputs.mask_NT]].round().tolist()
    assert sorted(found, reverse=True) == (chosen or [6, 6, 5, 5, 4, 4, 3, 3, 1, 1, -2, -2])


def test_what_is_clipped_already_is_no_candidate() -> None:
    inputs = of_covariances(2.0, 3.0, 4.0)
    near = replace(inputs, old_log_probs_NT=inputs.log_probs_NT - torch.tensor([math.log(1.27)]))
    far = replace(inputs, old_log_probs_NT=inputs.log_probs_NT - torch.tensor([math.log(1.29)]))
    drawn = [select_clip_cov(one, 0, cov_ratio=1.0)[one.mask_NT] for one in (near, far)]
    assert [flags.tolist() for flags in drawn] == [[True] * 6, [False] * 3 + [True] * 3]
