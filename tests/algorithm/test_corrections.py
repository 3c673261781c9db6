"""Off-policy weights, rejection, masks, and the interpolated old policy."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from covey.algorithm.corrections import (
    WeightOptions,
    importance_weights,
    m2po_keep,
    mean_weight,
    off_policy_keep,
    parse_rejection,
    rejection_keep,
)

MASK = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
U = torch.log(torch.tensor([[1.0, 4.0, 0.25], [2.0, 0.5, 9.0], [9.0, 9.0, 9.0]], dtype=torch.float64))
"""log pi_old - log pi_sampler; the sequences' products are 1 and 1."""


def weights(**options: Any) -> list[list[float]]:
    return importance_weights(U, torch.zeros_like(U), MASK, WeightOptions(**options)).tolist()


def rows(*expected: list[float]) -> Any:
    return [pytest.approx(row) for row in expected]


def test_truncated_weights_are_clamped() -> None:
    assert weights(max=2.0) == rows([1, 2, 0.25], [2, 0.5, 0], [0, 0, 0])
    assert weights(min=0.5, max=2.0) == rows([1, 2, 0.5], [2, 0.5, 0], [0, 0, 0])


def test_masked_weights_are_0_outside_the_bounds_and_unchanged_inside() -> None:
    assert weights(mode="mask", min=0.4, max=3.0) == rows([1, 0, 0], [2, 0.5, 0], [0, 0, 0])
    assert weights(mode="mask", min=0.25, max=4.0) == rows([1, 4, 0.25], [2, 0.5, 0], [0, 0, 0])  # bounds are inside


def test_log_weights_are_clamped_where_that_is_asked_for() -> None:
    assert weights(max=None, log_ratio_clamp=1.0) == rows([1, math.e, 1 / math.e], [2, 0.5, 0], [0, 0, 0])


def test_a_sequence_weight_is_the_product_of_its_token_weights() -> None:
    assert weights(level="sequence") == rows([1, 1, 1], [1, 1, 0], [0, 0, 0])


def test_a_sequence_mean_weight_is_the_geometric_mean() -> None:
    sampler = torch.zeros(1, 2, dtype=torch.float64)
    old = torch.log(torch.tensor([[4.0, 1.0]], dtype=torch.float64))
    got = importance_weights(old, sampler, torch.ones(1, 2) > 0, WeightOptions(level="sequence_mean", max=None))
    assert got.tolist() == rows([2, 2])


def test_equal_policies_have_weight_1() -> None:
    for level in ("token", "sequence", "sequence_mean"):
        got = importance_weights(U, U, MASK, WeightOptions(level=level))
        assert got.tolist() == MASK.double().tolist()


def test_the_mean_weight_is_over_tokens_or_over_sequences() -> None:
    per_token = torch.tensor([[1.0, 2.0, 3.0], [4.0, 4.0, 0.0], [0.0, 0.0, 0.0]])
    assert mean_weight(per_token, MASK, "token").item() == pytest.approx(14 / 5)
    assert mean_weight(per_token, MASK, "sequence").item() == pytest.approx((2 + 4) / 2)


def test_the_mean_of_no_weights_is_1() -> None:
    assert mean_weight(U, torch.zeros_like(MASK), "token").item() == 1.0
    assert mean_weight(torch.zeros_like(U), MASK, "token").item() == 1.0


def test_weights_carry_no_gradient_and_no_nan() -> None:
    old = torch.where(MASK, U, torch.nan).requires_grad_(True)
    got = importance_weights(old, torch.where(MASK, 0.0, torch.inf).double(), MASK, WeightOptions())
    assert not got.requires_grad
    assert bool(got.isfinite().all())


def keep(criteria: str, thresholds: str) -> list[list[bool]]:
    return rejection_keep(U, torch.zeros_like(U), MASK, parse_rejection(criteria, thresholds)).tolist()


def test_k1_bounds_are_those_of_sampler_over_trainer() -> None:
    # pi_sampler / pi_old is 1, 1/4, 4 and 1/2, 2.
    assert keep("token_k1", "0.2_3") == [[True, True, False], [True, True, False], [False] * 3]
    assert keep("token_k1", "1_3") == [[True, False, False], [False, True, False], [False] * 3]  # bounds are inside


def test_a_sequence_criterion_drops_whole_sequences() -> None:
    assert keep("seq_max_k2", "1.0") == [[True] * 3, [True, True, False], [False] * 3]
    assert keep("seq_max_k2", "0.5") == [[False] * 3, [True, True, False], [False] * 3]


def test_criteria_are_combined_with_and() -> None:
    both = [keep("token_k1, seq_max_k2", "1_3, 0.5"), keep("seq_max_k2, token_k1", "0.5, 1_3")]
    assert both == [[[False] * 3, [False, True, False], [False] * 3]] * 2


def test_equal_policies_reject_nothing() -> None:
    every = ",".join(f"{scope}_k3" for scope in ("token", "seq_sum", "seq_mean", "seq_max"))
    criteria = parse_rejection(every, "0.0,0.0,0.0,0.0")
    assert rejection_keep(U, U, MASK, criteria).tolist() == MASK.tolist()


@pytest.mark.parametrize(
    ("criteria", "thresholds", "message"),
    [
        ("token_k1", None, "rejection=token_k1 needs rejection_thresholds"),
        (None, "0.5", "rejection=None needs rejection_thresholds"),
        ("token_k1,token_k2", "0.5_2", "one threshold for each criterion, got 2 and 1"),
        ("token_k4", "0.5", "got token_k4"),
        ("row_k1", "0.5_2", "got row_k1"),
        ("token_k1", "2", "the rejection threshold of token_k1 must be lo_hi with 0 < lo <= hi, got 2"),
        ("token_k1", "2_0.5", "must be lo_hi with 0 < lo <= hi, got 2_0.5"),
        ("token_k2", "0.1_0.2", "the rejection threshold of token_k2 must be one number >= 0, got 0.1_0.2"),
        ("seq_mean_k3", "-0.02", "the rejection threshold of seq_mean_k3 must be one number >= 0, got -0.02"),
        ("token_k3", "nan", "the rejection threshold of token_k3 must be one number >= 0, got nan"),
        ("token_k3", "much", "must be one number >= 0, got much"),
    ],
)
def test_what_cannot_be_read_is_named(criteria: str | None, thresholds: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        parse_rejection(criteria, thresholds)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min": 3.0, "max": 2.0}, r"correction_max must be >= correction_min, got 2\.0 and 3\.0"),
    ],
)
def test_weights_that_cannot_be_formed_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightOptions(**options)


def far(advantages: list[float], log_probs: Tensor, sampler: Tensor) -> list[bool]:
    advantages_NT = torch.tensor(advantages)[:, None].expand_as(log_probs)
    return off_policy_keep(advantages_NT, log_probs, sampler, torch.ones_like(log_probs) > 0, 0.5).tolist()


def test_only_bad_sequences_that_the_policy_has_left_are_dropped() -> None:
    log_probs = torch.tensor([[-2.0, -1.0], [-2.0, -1.0], [-2.0, -1.0], [-1.0, -1.0], [-1.0, -1.5]])
    sampler = torch.tensor([[-1.0, -0.5]]).expand(5, 2)
    # The last is as far as may be
    assert far([-1.0, 0.0, 1.0, -1.0, -1.0], log_probs, sampler) == [False, True, True, True, True]


def test_the_sign_of_a_sequence_is_that_of_the_mean_over_its_own_tokens() -> None:
    """As turns have advantages of their own: +1 -2 counts as bad, -1 +2 does not, and what is no loss token neither."""
    advantages_NT = torch.tensor([[1.0, -2.0, 9.0], [-1.0, 2.0, -9.0], [-1.0, 1.0, -9.0]])
    mask_NT = torch.tensor([[True, True, False]] * 3)
    log_probs_NT, sampler_NT = torch.full((3, 3), -2.0), torch.full((3, 3), -1.0)
    assert off_policy_keep(advantages_NT, log_probs_NT, sampler_NT, mask_NT, 0.5).tolist() == [False, True, True]
    # So is the distance: -0.2 and 1.0 are 0.4, the masked 9 is none
    sampler_NT = torch.tensor([[-2.2, -1.0, 7.0]] * 3)
    assert off_policy_keep(advantages_NT, log_probs_NT, sampler_NT, mask_NT, 0.41).tolist() == [True] * 3
    assert off_policy_keep(advantages_NT, log_probs_NT, sampler_NT, mask_NT, 0.39).tolist() == [False, True, True]


def test_m2po_drops_the_farthest_tokens_until_the_second_moment_is_small() -> None:
    gaps = torch.tensor([[0.1, -0.9, 0.2, 0.5]])
    everything = torch.ones(1, 4) > 0
    assert m2po_keep(gaps, torch.zeros(1, 4), everything, 0.11).tolist() == [[True, False, True, True]]
    assert m2po_keep(gaps, torch.zeros(1, 4), everything, 1.0).tolist() == [[True] * 4]
    at_threshold = torch.tensor([[0.5, 1.0]])  # with both, the mean of 0.25 and 1 is not below it
    assert m2po_keep(at_threshold, torch.zeros(1, 2), torch.ones(1, 2) > 0, 0.625).tolist() == [[True, False]]


def test_m2po_keeps_one_token_at_least_and_none_of_nothing() -> None:
    gaps = torch.tensor([[3.0, -0.9]])
    assert m2po_keep(gaps, torch.zeros(1, 2), torch.ones(1, 2) > 0, 1e-6).tolist() == [[False, True]]
    assert m2po_keep(gaps, torch.zeros(1, 2), torch.zeros(1, 2) > 0, 1e-6).tolist() == [[False, False]]
