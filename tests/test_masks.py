import math

import pytest
import torch

from covey.masks import (
    EntropyControl,
    drop_truncated,
    entropy_bonus,
    entropy_of,
    high_entropy_mask,
    high_entropy_threshold,
    policy_token_mask,
    sum_pi_squared,
    token_log_probs,
    update_entropy_control,
)

TRUE_NT = torch.ones(2, 2, dtype=torch.bool)


def test_tokens_of_a_tool_leave_the_mask() -> None:
    written_NT = torch.tensor([[True, False], [True, True]])
    assert policy_token_mask(TRUE_NT, written_NT).tolist() == [[True, False], [True, True]]


def test_a_truncated_completion_leaves_the_mask() -> None:
    assert drop_truncated(TRUE_NT, torch.tensor([True, False])).tolist() == [[False, False], [True, True]]


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


def test_without_tokens_nothing_is_kept() -> None:
    threshold = high_entropy_threshold(torch.zeros(0), 0.2)
    assert not high_entropy_mask(torch.ones(2, 2), ~TRUE_NT, threshold).any()


@pytest.mark.parametrize("fraction", [0.0, 1.2])
def test_a_fraction_outside_0_to_1_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=rf"^high_entropy_fraction must be in \(0, 1\], got {fraction}$"):
        high_entropy_threshold(torch.ones(1), fraction)


def test_entropy_of_equal_logits_is_the_log_of_their_number() -> None:
    entropy = entropy_of(torch.zeros(3, 8, dtype=torch.float64))
    torch.testing.assert_close(entropy, torch.full((3,), math.log(8), dtype=torch.float64))


def test_entropy_ignores_impossible_tokens_in_value_and_gradient() -> None:
    logits = torch.tensor([0.0, 0.0, -math.inf], dtype=torch.float64, requires_grad=True)
    entropy = entropy_of(logits)
    entropy.backward()
    assert float(entropy.detach()) == pytest.approx(math.log(2))
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.float64)
    probabilities = (logits / 0.5).softmax(-1)
    ids = torch.tensor([1])
    torch.testing.assert_close(token_log_probs(logits, ids, 0.5), probabilities[:, 1].log())
    torch.testing.assert_close(sum_pi_squared(logits, 0.5), (probabilities**2).sum(-1))
    torch.testing.assert_close(entropy_of(logits, 0.5), -(probabilities * probabilities.log()).sum(-1))
    with pytest.raises(ValueError, match=r"^temperature must be > 0, got 0$"):
        entropy_of(logits, 0)


def test_bfloat16_logits_are_scored_in_float32() -> None:
    assert entropy_of(torch.zeros(2, 4, dtype=torch.bfloat16)).dtype == torch.float32


def test_entropy_bonuses_of_micro_batches_add_up() -> None:
    entropy_NT = torch.rand(2, 2, generator=torch.Generator().manual_seed(0))
    mask_NT = torch.tensor([[True, True], [True, False]])
    whole = entropy_bonus(entropy_NT, mask_NT, 0.1, 3)
    parts = [entropy_bonus(e[None], m[None], 0.1, 3) for e, m in zip(entropy_NT, mask_NT, strict=True)]
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(whole, -0.1 * entropy_NT[mask_NT].mean())


def test_an_entropy_bonus_over_nothing_is_zero_and_keeps_the_graph() -> None:
    entropy_NT = torch.full((2, 2), math.nan, requires_grad=True)
    loss = entropy_bonus(entropy_NT, ~TRUE_NT, 0.1, 0)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert entropy_NT.grad is not None
    assert entropy_NT.grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_the_entropy_coefficient_rises_below_the_target_and_falls_above_it() -> None:
    control = EntropyControl(coef=0.0, active=False)
    seen = []
    for entropy in (0.1, 0.2, 0.5, 0.5, 0.5, 0.1):
        control = update_entropy_control(control, entropy=entropy, target=0.2)
        seen.append((round(control.coef, 6), round(control.applied, 6)))
    assert seen == [(0.005, 0.005), (0.01, 0.01), (0.005, 0.0), (0.0, 0.0), (0.0, 0.0), (0.005, 0.005)]


def test_the_entropy_coefficient_stays_within_its_bounds() -> None:
    control = EntropyControl(coef=0.998, active=True)
    assert update_entropy_control(control, entropy=0.0, target=0.2).coef == 1.0
