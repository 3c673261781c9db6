"""The head's softmax in C: scores and gradients of the exact softmax, whatever is beside a row."""

import pytest
import torch
from torch import Tensor

from covey.policy.kernels.elementwise import compiled_gradient_, compiled_scores

from ...support.builders import normal

TYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 37, 512, 1000, 152_000]
ROWS = 5

pytestmark = pytest.mark.usefixtures("own_threads")


def numbers(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (3 * normal(ROWS, width)).to(dtype), torch.arange(ROWS) * 7 % width


def exact(logits: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of all entries, of the targets, and entropies, in float64."""
    all_LV = (logits.double() / temperature).log_softmax(-1)
    return all_LV, all_LV.gather(1, target[:, None])[:, 0], -(all_LV.exp() * all_LV).sum(-1)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_those_of_the_exact_softmax(width: int, dtype: torch.dtype, temperature: float) -> None:
    logits, target = numbers(width, dtype)
    _, logprob, entropy = exact(logits, target, temperature)
    found = compiled_scores(logits, target, temperature)
    for mine, theirs in zip(found, (logprob, entropy), strict=False):
        assert (mine - theirs).abs().max() < 4e-6  # float32 carries a log-prob of -30 to 2e-6


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("through_entropy", [False, True])
def test_gradients_are_those_of_the_exact_softmax(width: int, dtype: torch.dtype, through_entropy: bool) -> None:
    logits, target = numbers(width, dtype)
    coefficient, of_entropy = normal(ROWS, seed=1), normal(ROWS, seed=2) if through_entropy else torch.zeros(ROWS)
    leaf = logits.double().requires_grad_()
    _, logprob, entropy = exact(leaf, target, 0.7)
    ((coefficient * logprob).sum() + (of_entropy * entropy).sum()).backward()
    assert leaf.grad is not None
    _, own_entropy, logsum = compiled_scores(logits, target, 0.7)
    compiled_gradient_(logits, target, coefficient, of_entropy if through_entropy else None, (logsum, own_entropy), 0.7)
    error = float((logits - leaf.grad).norm())
    assert error <= (2e-6 if dtype == torch.float32 else 2**-8) * float(leaf.grad.norm()) + 1e-6


@pytest.mark.parametrize("dtype", TYPES)
def test_a_rows_bits_depend_neither_on_threads_nor_on_rows_beside_it(dtype: torch.dtype) -> None:
    logits, target = numbers(1000, dtype)
    found = []
    for num_threads, chosen in ((1, slice(0, ROWS)), (2, slice(0, ROWS)), (2, slice(1, 3))):
        torch.set_num_threads(num_threads)
        rows = logits[chosen].clone()
        scores = compiled_scores(rows, target[chosen], 1.0)
        compiled_gradient_(rows, target[chosen], torch.ones(len(rows)), None, (scores[2], scores[1]), 1.0)
        found.append([*scores, rows])
    assert all(torch.equal(one, two) for one, two in zip(found[0], found[1], strict=True))
    assert all(torch.equal(one[1:3], three) for one, three in zip(found[0], found[2], strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_stays_none(value: float) -> None:
    logits, target = numbers(100, torch.float32)
    logits[1, 3] = value
    logprob, entropy, _ = compiled_scores(logits, target, 1.0)
    assert [bool(number.isfinite()) for number in logprob] == [True, False, True, True, True]
    assert bool(entropy[1].isnan())


def test_a_token_that_cannot_be_drawn_counts_for_nothing() -> None:
    logits, target = numbers(100, torch.float32)
    target[:] = 0
    expected = compiled_scores(logits[:, :50].contiguous(), target, 1.0)
    logits[:, 50:] = -torch.inf
    for mine, theirs in zip(compiled_scores(logits, target, 1.0), expected, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
