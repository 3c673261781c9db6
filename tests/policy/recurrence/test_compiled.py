"""The recurrence and the convolution in C: the same bits whatever the threads, and alone as beside others."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from covey.policy.recurrence import compiled
from covey.policy.recurrence.base import Holders

from .forests import (
    FOREST,
    KINDS,
    Kind,
    drawn,
    farthest,
    forest,
    gradients_of,
    scan_by_tokens,
    tensors,
    with_tensors,
)

ROWS_S3 = forest(FOREST)
NUM_TOKENS = int(ROWS_S3[:, 1].sum())


def with_threads(function: Callable[[], list[Tensor]]) -> list[list[Tensor]]:
    before, found = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3, 1):
            torch.set_num_threads(num_threads)
            found.append(function())
    finally:
        torch.set_num_threads(before)
    return found


def are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def gradient_of(kind: Kind) -> Tensor:
    shape = (NUM_TOKENS, kind.key_heads * kind.shared, kind.value_width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def convolved(x: Tensor, rows_S3: Tensor) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    own = [tensor.requires_grad_() for tensor in (x.clone(), *torch.randn(5, 600, generator=draw).split([4, 1]))]
    out = compiled.causal_conv(own[0], own[1].T, own[2][0], rows_S3, silu=True)
    return [out.detach(), *torch.autograd.grad(out, own, torch.randn(out.shape, generator=draw))]


@pytest.mark.parametrize("kind", [*KINDS, Kind(key_heads=1, shared=12)], ids=str)
def test_the_number_of_threads_changes_no_bit_of_the_recurrence(kind: Kind) -> None:
    given, gradient = drawn(kind, NUM_TOKENS), gradient_of(kind)
    first, *others = with_threads(lambda: gradients_of(compiled.gated_scan, given, ROWS_S3, gradient))
    assert all(are_equal(first, other) for other in others)


def test_the_number_of_threads_changes_no_bit_of_the_convolution() -> None:
    x = torch.randn(NUM_TOKENS, 600, generator=torch.Generator().manual_seed(2))
    first, *others = with_threads(lambda: convolved(x, ROWS_S3))
    assert all(are_equal(first, other) for other in others)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_tree_gets_the_same_bits_alone_and_beside_others(kind: Kind) -> None:
    given, gradient, start = drawn(kind, NUM_TOKENS), gradient_of(kind), 0
    together = gradients_of(compiled.gated_scan, given, ROWS_S3, gradient)
    for tree in FOREST:
        rows = forest((tree,))
        tokens = slice(start, start + int(rows[:, 1].sum()))
        mine = with_tensors(given, [tensor[tokens] for tensor in tensors(given)])
        alone = gradients_of(compiled.gated_scan, mine, rows, gradient[tokens])
        assert are_equal([tensor[tokens] for tensor in together], alone)
        start = tokens.stop


def test_inputs_of_a_tree_get_the_same_bits_of_the_convolution_beside_others() -> None:
    x, start = torch.randn(NUM_TOKENS, 600, generator=torch.Generator().manual_seed(2)), 0
    together = convolved(x, ROWS_S3)[0]
    for tree in FOREST:
        rows = forest((tree,))
        tokens = slice(start, start + int(rows[:, 1].sum()))
        assert torch.equal(together[tokens], convolved(x[tokens], rows)[0])
        start = tokens.stop


def test_a_row_of_a_decoding_step_gets_the_same_bits_beside_others() -> None:
    kind = Kind(shared=2, key_width=64, value_width=64)
    given, draw = drawn(kind, 9), torch.Generator().manual_seed(1)
    state = torch.randn(9, 4, 64, 64, generator=draw)
    rows = torch.stack([torch.arange(9), torch.ones(9, dtype=torch.int64), torch.full((9,), -1)], 1)
    held, place_S = state.clone(), torch.arange(9)
    together = compiled.gated_scan(given, rows, Holders(held, place_S, place_S))
    for row in range(9):
        own, zero = state[row : row + 1].clone(), torch.tensor([0])
        taken = with_tensors(given, [tensor[row : row + 1] for tensor in tensors(given)])
        assert torch.equal(compiled.gated_scan(taken, rows[:1], Holders(own, zero, zero))[0], together[row])
        assert torch.equal(own[0], held[row])


@pytest.mark.parametrize(("keys", "values"), [(5, 7), (8, 16), (24, 20), (100, 144), (256, 256), (264, 272)])
def test_heads_of_any_width_are_computed(keys: int, values: int) -> None:
    """Those of values that are no multiple of 16 are filled with zeros."""
    kind = Kind(key_heads=1, key_width=keys, value_width=values)
    rows = forest(((40, (1, (3,)), (33,)),))
    given, gradient = drawn(kind, 77), torch.randn(77, 1, values, generator=torch.Generator().manual_seed(1))
    found = gradients_of(compiled.gated_scan, given, rows, gradient)
    expected = gradients_of(lambda g, r: scan_by_tokens(g, r)[0], given, rows, gradient, torch.float64)
    assert farthest(found, expected) < 1e-6
    state = torch.zeros(4, 1, keys, values)
    compiled.gated_scan(given, rows, Holders(state, torch.full((4,), -1), torch.arange(4)))
    assert farthest([state], [scan_by_tokens(given, rows)[1]]) < 1e-6


def test_a_chain_of_many_segments_is_followed() -> None:
    lengths: tuple = (1,)
    for _ in range(300):
        lengths = (2, lengths)
    kind, rows = Kind(), forest((lengths,))
    given = drawn(kind, 601)
    gradient = torch.randn(601, 2, 16, generator=torch.Generator().manual_seed(1))
    found = gradients_of(compiled.gated_scan, given, rows, gradient)
    expected = gradients_of(compiled.gated_scan, given, torch.tensor([(0, 601, -1)]), gradient)
    assert farthest(found, [tensor.double() for tensor in expected]) < 1e-6
