"""The distribution that is drawn from, and the draw."""

import math

import pytest
import torch

from covey.policy.sampling import (
    BLOCK,
    chosen_logprobs,
    draw,
    filter_logits,
    filtered_logprobs,
    kept_mask,
    partition,
    random_uniform,
    row_key,
    sample,
)
from covey.types import Sampling

PROBABILITIES = torch.tensor([[0.15, 0.4, 0.05, 0.3, 0.1]], dtype=torch.float64)
LOGITS = PROBABILITIES.log()
CPU = torch.device("cpu")


def kept(**filters: float) -> list[int]:
    mask = kept_mask(LOGITS, **filters)
    assert mask is not None
    return mask[0].nonzero()[:, 0].tolist()


def test_random_numbers_are_splitmix64() -> None:
    # First outputs of splitmix64 seeded with 0, from Vigna's reference implementation.
    outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    uniform = random_uniform(torch.zeros(4, dtype=torch.int64), torch.arange(4))
    assert uniform.tolist() == [(output >> 11) * 2.0**-53 for output in outputs]


def test_random_numbers_do_not_depend_on_their_neighbours() -> None:
    keys = torch.tensor([row_key(3, index) for index in range(64)])
    together = random_uniform(keys, torch.full((64,), 17))
    alone = [random_uniform(keys[i : i + 1], torch.tensor([17])).item() for i in range(64)]
    assert together.tolist() == alone


def test_random_numbers_are_uniform_over_keys_and_over_positions() -> None:
    over_positions = random_uniform(torch.full((20000,), row_key(0, 0)), torch.arange(20000))
    keys = torch.tensor([row_key(seed, index) for seed in range(100) for index in range(200)])
    over_keys = random_uniform(keys, torch.zeros(20000, dtype=torch.int64))
    for uniform in (over_positions, over_keys):
        counts = torch.histc(uniform, bins=20, min=0, max=1)
        chi_squared = ((counts - 1000) ** 2 / 1000).sum().item()
        assert chi_squared < 43.8  # 0.999 quantile at 19 degrees of freedom
        assert 0 <= uniform.min() < uniform.max() < 1


def test_row_keys_are_signed_64_bit_and_differ_for_all_seeds_and_indices() -> None:
    seeds = [0, 1, -1, 2**31, 2**63, 2**64 - 2]
    keys = {row_key(seed, index) for seed in seeds for index in range(100)}
    assert len(keys) == 600
    assert torch.tensor(sorted(keys)).dtype == torch.int64


def test_the_keys_of_seed_0_are_the_first_outputs_of_splitmix64() -> None:
    assert [row_key(0, index) for index in range(3)] == [
        0xE220A8397B1DCDAF - 2**64,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_without_filters_nothing_is_masked_or_sorted() -> None:
    assert kept_mask(LOGITS) is None
    assert kept_mask(LOGITS, 0.5, top_k=5) is None
    assert filter_logits(LOGITS) is LOGITS


def test_top_k_keeps_the_k_most_likely() -> None:
    assert kept(top_k=2) == [1, 3]
    assert filtered_logprobs(LOGITS, top_k=2).exp()[0].tolist() == pytest.approx([0, 4 / 7, 0, 3 / 7, 0])


def test_ties_at_the_top_k_boundary_go_to_the_lowest_token_ids() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    mask = kept_mask(logits, top_k=4)
    assert mask is not None
    assert [row.nonzero()[:, 0].tolist() for row in mask] == [[0, 1, 2, 4], [0, 1, 2, 3]]


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    assert kept(top_p=0.3) == [1]
    assert kept(top_p=0.41) == [1, 3]
    assert kept(top_p=0.69) == [1, 3]
    assert kept(top_p=0.71) == [0, 1, 3]
    assert kept(top_p=0.99) == [0, 1, 2, 3, 4]
    assert kept(top_k=99, top_p=0.69) == [1, 3], "a vocabulary may be shorter than top-k"


def test_top_p_keeps_one_token_at_least_and_no_surplus_ties() -> None:
    assert kept(top_p=1e-9) == [1]
    mask = kept_mask(torch.zeros(1, 8), top_p=0.5)
    assert mask is not None
    assert mask.tolist() == [[True] * 4 + [False] * 4]


def test_with_top_k_no_draw_sorts_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = kept(top_k=4, top_p=0.71)
    monkeypatch.setattr(torch.Tensor, "sort", lambda *given, **how: pytest.fail("it sorts"))
    assert kept(top_k=4, top_p=0.71) == expected == [1, 3]
    with pytest.raises(pytest.fail.Exception, match="it sorts"):
        kept(top_p=0.71)


def test_min_p_is_relative_to_the_most_likely_token() -> None:
    assert kept(min_p=0.3) == [0, 1, 3]
    assert kept(min_p=0.9) == [1]
    assert kept(top_k=4, min_p=0.3) == kept(top_p=0.96, min_p=0.3) == [0, 1, 3]
    assert kept(top_k=2, min_p=0.1) == [1, 3]


def test_filters_apply_in_order_to_the_tempered_distribution() -> None:
    # top-k 3 leaves 0.4, 0.3, 0.15 of 0.85; the first two are 0.82 of that, so top-p 0.8 needs no third.
    assert kept(top_k=3, top_p=0.8) == [1, 3]
    assert kept(top_p=0.8) == [0, 1, 3]
    # At temperature 0.5 probabilities are squared: 0.16, 0.09, 0.0225, 0.01, 0.0025 of 0.285.
    assert kept(temperature=0.5, top_p=0.8) == [1, 3]
    assert kept(temperature=0.5, min_p=0.3) == [1, 3]


def test_filtered_probabilities_sum_to_one_and_keep_their_proportions() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 300, generator=generator, dtype=torch.float64) * 3
    probabilities = filtered_logprobs(logits, 0.7, 40, 0.9, 0.01).exp()
    mask = kept_mask(logits, 0.7, 40, 0.9, 0.01)
    assert mask is not None
    assert probabilities.sum(-1).tolist() == pytest.approx([1.0] * 16)
    assert ((probabilities > 0) == mask).all()
    expected = (logits / 0.7).exp() * mask
    assert torch.allclose(probabilities, expected / expected.sum(-1, keepdim=True))


def test_temperature_zero_gives_the_log_probs_of_temperature_one() -> None:
    assert torch.equal(filtered_logprobs(LOGITS, 0.0), filtered_logprobs(LOGITS, 1.0))


def test_half_precision_logits_are_scored_in_float32() -> None:
    assert filtered_logprobs(LOGITS.bfloat16(), 0.7, top_k=2).dtype == torch.float32


def test_gradients_are_finite_and_zero_outside_the_kept_set() -> None:
    logits = LOGITS.clone().requires_grad_()
    filtered_logprobs(logits, 0.7, top_k=2)[0, 3].backward()
    assert logits.grad is not None
    weight = 0.3 ** (1 / 0.7) / (0.3 ** (1 / 0.7) + 0.4 ** (1 / 0.7))
    slope = (1 - weight) / 0.7
    assert logits.grad[0].tolist() == pytest.approx([0.0, -slope, 0.0, slope, 0.0])


def test_draw_inverts_the_cumulative_distribution() -> None:
    uniform = torch.tensor([0.0, 0.1499, 0.1501, 0.5499, 0.5501, 0.6001, 0.9001, 0.9999], dtype=torch.float64)
    token, logprob = draw(LOGITS.expand(8, -1), uniform)
    assert token.tolist() == [0, 0, 1, 1, 2, 3, 4, 4]
    assert logprob.exp().tolist() == pytest.approx([0.15, 0.15, 0.4, 0.4, 0.05, 0.3, 0.1, 0.1])


@pytest.mark.parametrize("num_tokens", [5, BLOCK, BLOCK + 1, 151936])
def test_a_token_of_probability_zero_is_never_drawn(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, num_tokens, generator=generator)
    logits[:, 0] = logits[:, -1] = logits[:, num_tokens // 2] = -torch.inf
    logits[1, 2:] = -torch.inf
    # 1 is never asked for, but where a number falls within a block is rounded, and may come to it.
    edges = torch.tensor([0.0, 2.0**-53, 0.5, 1 - 2.0**-53, 1.0], dtype=torch.float64)
    for uniform in edges:
        token, logprob = draw(logits.log_softmax(-1), uniform.expand(4))
        assert logprob.isfinite().all()
        assert token[1] == 1


def test_sums_that_are_not_monotone_draw_no_token_of_probability_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    summed = torch.tensor([[0.5, 0.500001, 1.0]], dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda *given, **how: summed)
    token, _ = draw(torch.tensor([[0.5, 0.0, 0.5]]).log(), torch.tensor([0.5000005], dtype=torch.float64))
    assert token.tolist() == [2]


@pytest.mark.long
def test_searching_in_blocks_gives_the_frequencies_of_the_distribution() -> None:
    num_tokens, num_draws = 3 * BLOCK, 200_000
    logits = torch.zeros(num_tokens)
    logits[[7, BLOCK, 2 * BLOCK + 100, num_tokens - 1]] = torch.tensor([7.0, 6.0, 8.0, 6.5])
    logprobs = logits.log_softmax(-1)
    # Evenly spaced numbers: every token's count is its probability times num_draws, to within one.
    uniform = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    counts = torch.zeros(num_tokens)
    for part in uniform.split(2000):
        token, _ = draw(logprobs.expand(len(part), -1), part)
        counts += torch.bincount(token, minlength=num_tokens)
    assert (counts - logprobs.exp() * num_draws).abs().max() <= 1.01


def test_drawn_frequencies_match_the_probabilities() -> None:
    num_draws = 100_000
    keys = torch.tensor([row_key(11, index) for index in range(num_draws)])
    token, _ = draw(LOGITS.expand(num_draws, -1), random_uniform(keys, torch.zeros_like(keys)))
    expected = PROBABILITIES[0] * num_draws
    chi_squared = ((torch.bincount(token, minlength=5) - expected) ** 2 / expected).sum().item()
    assert chi_squared < 18.5  # 0.999 quantile at 4 degrees of freedom


def test_rows_of_one_batch_keep_their_own_settings() -> None:
    settings = [Sampling(), Sampling(temperature=0), Sampling(), Sampling(top_k=1), Sampling(temperature=2.0)]
    parts = partition(settings, CPU)
    assert [(key, rows.tolist()) for key, rows in parts if rows is not None] == [
        ((1.0, 0, 1.0, 0.0), [0, 2]),
        ((0, 0, 1.0, 0.0), [1]),
        ((1.0, 1, 1.0, 0.0), [3]),
        ((2.0, 0, 1.0, 0.0), [4]),
    ]
    uniform = torch.tensor([0.99, 0.99, 0.01, 0.99, 0.01], dtype=torch.float64)
    token, logprob = sample(LOGITS.expand(5, -1), parts, uniform)
    assert token.tolist() == [4, 1, 0, 1, 0]
    flat = PROBABILITIES[0].sqrt()
    expected = [math.log(0.1), math.log(0.4), math.log(0.15), 0.0, math.log(flat[0] / flat.sum())]
    assert logprob.tolist() == pytest.approx(expected)


def test_rows_with_one_distribution_are_not_split_by_seed_stop_or_length() -> None:
    parts = partition([Sampling(seed=1), Sampling(seed=2, max_tokens=3), Sampling(stop=("a",))], CPU)
    assert parts == [((1.0, 0, 1.0, 0.0), None)]


def test_filters_of_an_earlier_policy_stay_though_these_logits_would_leave_others() -> None:
    """The sampler might draw tokens 0 and 1; by now 1 and 2 are the likely ones."""
    logits_LV = torch.tensor([[0.0, 2.0, 3.0]])
    kept_LV = torch.tensor([[True, True, False]])
    target_L, filtered = torch.tensor([1]), Sampling(top_k=2)
    earlier = float(chosen_logprobs(logits_LV, target_L, filtered, kept_LV))
    assert earlier == pytest.approx(-math.log1p(math.exp(-2.0)))
    assert float(chosen_logprobs(logits_LV, target_L, filtered)) == pytest.approx(-math.log1p(math.exp(1.0)))
