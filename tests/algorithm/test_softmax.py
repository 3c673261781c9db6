"""Log-probs over long vocabularies against float64, in every place that takes them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from covey.algorithm.kl import full_kl
from covey.algorithm.softmax import SLICE, log_softmax
from covey.policy.head import Head, score_rows
from covey.policy.kernels.gpu.softmax import sums
from covey.policy.sampling import chosen_logprobs, filtered_logprobs, sample_same_params
from covey.types import Sampling
from covey_preflight.passes import LiveBytes

NUM_ROWS, NUM_TOKENS = 24, 151_936
ROUNDED = 1e-6
"""Nats: half the distance of two float32 numbers between 16 and 32, where most of these log-probs are. On average over
rows torch's own float32 is off by 5e-6 here, this by 2e-7 to 3e-7."""
TARGET = torch.arange(0, NUM_ROWS * 6000, 6000)


def made_up_logits() -> Tensor:
    """As wide as those of a policy at temperature 1, around a level of their own; the first token is likely."""
    logits = 3 * torch.randn(NUM_ROWS, NUM_TOKENS, generator=torch.Generator().manual_seed(0)) - 20
    logits[:, 0] += 12
    return logits


def by_head(logits: Tensor) -> Tensor:
    """Hidden states that are the logits themselves would take a matrix of 92 GB: one-hot rows choose them instead."""
    layer = nn.Linear(NUM_ROWS, NUM_TOKENS, bias=False)
    layer.weight.data = logits.t()
    return score_rows(Head(layer, torch.float32, 1.0, 10), torch.eye(NUM_ROWS), TARGET)[0].detach()


def by_draw(logits: Tensor) -> Tensor:
    """Of the tokens that are drawn; those of TARGET are not likely enough."""
    uniform = torch.linspace(0, 0.99, NUM_ROWS, dtype=torch.float64)
    token, logprob = sample_same_params(logits, (1.0, 0, 1.0, 0.0), uniform)
    exact = logits.double().log_softmax(-1)
    return exact[:, TARGET].diagonal() + (logprob - exact.gather(1, token[:, None])[:, 0])


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "all of them": lambda logits: log_softmax(logits).gather(1, TARGET[:, None])[:, 0],
    "of a distribution": lambda logits: filtered_logprobs(logits).gather(1, TARGET[:, None])[:, 0],
    "of chosen tokens": lambda logits: chosen_logprobs(logits, TARGET, Sampling()),
    "of a head": by_head,
    "drawn": by_draw,
    "on a GPU": lambda logits: logits.gather(1, TARGET[:, None])[:, 0] - sums(logits, torch.tensor(1.0))[0],
}


@pytest.mark.parametrize("way", WAYS)
def test_log_probs_over_a_long_vocabulary_are_those_of_float64(way: str) -> None:
    logits = made_up_logits()
    exact = logits.double().log_softmax(-1).gather(1, TARGET[:, None])[:, 0]
    error = WAYS[way](logits).double() - exact
    assert error.abs().max() < 2 * ROUNDED  # two roundings of that size
    assert error.mean().abs() < ROUNDED / 2
    theirs = logits.log_softmax(-1).gather(1, TARGET[:, None])[:, 0]
    assert (theirs - exact).abs().mean() > 2 * ROUNDED, "what is guarded against is there on this processor"


def test_the_exact_kl_over_a_long_vocabulary_is_that_of_float64() -> None:
    logits = made_up_logits()
    base = logits + 0.1 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    error = full_kl(logits, base).double() - full_kl(logits.double(), base.double())
    assert error.abs().max() < ROUNDED  # 6e-6 by torch's own


def test_a_row_is_the_same_bits_beside_any_others_on_any_number_of_threads() -> None:
    logits, threads = made_up_logits(), torch.get_num_threads()
    torch.set_num_threads(1)
    together = log_softmax(logits)
    torch.set_num_threads(2)
    try:
        assert torch.equal(torch.cat([log_softmax(row) for row in logits.split(1)]), together)
    finally:
        torch.set_num_threads(threads)


def test_gradients_are_those_of_torch() -> None:
    logits = made_up_logits()[:3, :1500].double().requires_grad_()
    weight = torch.randn(3, 1500, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    both = log_softmax(logits), logits.log_softmax(-1)
    found, expected = (torch.autograd.grad((weight * one).sum(), logits)[0] for one in both)
    assert torch.allclose(found, expected, rtol=0.0, atol=1e-12)


def test_what_a_filter_struck_out_stays_out_and_has_no_gradient() -> None:
    logits = made_up_logits()[:2, :700]
    logits[:, 1::2] = -torch.inf
    logits.requires_grad_()
    found = log_softmax(logits)
    assert torch.equal(found.exp()[:, 1::2], torch.zeros(2, 350))
    assert torch.allclose(found.exp().sum(-1), torch.ones(2))
    (gradient,) = torch.autograd.grad(found[:, 0].sum(), logits)
    assert gradient.isfinite().all()
    assert not gradient[:, 1::2].any()


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_no_number_spoils_its_own_row_alone(wrong: float) -> None:
    logits = made_up_logits()[:3, :700]
    logits[1, 5] = wrong
    found = log_softmax(logits)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()
    assert log_softmax(torch.full((1, 3), -torch.inf)).isnan().all()


def test_half_precision_is_summed_and_returned_in_float32() -> None:
    logits = made_up_logits().bfloat16()
    exact = logits.double().log_softmax(-1)
    assert (log_softmax(logits) - exact).abs().max() < 2e-6  # down to -50: float32 has 4e-6 between two numbers there


def test_it_holds_little_besides_what_it_returns() -> None:
    logits = made_up_logits().requires_grad_()
    size = 4 * logits.numel()
    with LiveBytes() as live:
        found = log_softmax(logits)
    assert live.peak < size + 2.1 * 4 * SLICE["cpu"]
    with LiveBytes() as live:
        found[:, 0].sum().backward()
    assert live.peak <= 3.1 * size  # the gradient that comes, the one that goes, and probabilities
