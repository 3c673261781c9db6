import pytest
import torch

from covey.algorithm.token_selection import high_entropy_mask, high_entropy_threshold

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


@pytest.mark.parametrize("fraction", [0.0, 1.2])
def test_a_fraction_outside_0_to_1_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=rf"^high_entropy_fraction must be in \(0, 1\], got {fraction}$"):
        high_entropy_threshold(torch.ones(1), fraction)
