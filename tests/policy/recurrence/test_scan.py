"""The gated recurrence over forests of segments: token by token in float64, and as transformers compute it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from covey.policy.recurrence import compiled, plain
from covey.policy.recurrence.base import Holders, Recurrence

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
    with_decay,
    with_tensors,
)

Scan = Callable[..., Tensor]
SCANS: dict[str, Scan] = {"plain": plain.gated_scan, "compiled": compiled.gated_scan}
ROWS_S3 = forest(FOREST)
NUM_TOKENS = int(ROWS_S3[:, 1].sum())
ROUNDING = 1e-6
"""Of sums over chunks in float32, relative to the length of all numbers: 3e-7 was measured."""

pytestmark = pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)


def gradient_of(kind: Kind, num_tokens: int) -> Tensor:
    shape = (num_tokens, kind.key_heads * kind.shared, kind.value_width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def outputs_by_tokens(given: Recurrence, rows_S3: Tensor) -> Tensor:
    return scan_by_tokens(given, rows_S3)[0]


def places(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_outputs_and_gradients_are_those_of_the_formula(scan: Scan, kind: Kind) -> None:
    given, gradient = drawn(kind, NUM_TOKENS), gradient_of(kind, NUM_TOKENS)
    found = gradients_of(scan, given, ROWS_S3, gradient)
    expected = gradients_of(outputs_by_tokens, given, ROWS_S3, gradient, torch.float64)
    assert found[0].dtype == torch.float32
    assert farthest(found, expected) < ROUNDING


@pytest.mark.parametrize("by_channel", [False, True])
def test_decays_that_forget_all_or_nothing_are_exact(scan: Scan, by_channel: bool) -> None:
    kind = Kind(by_channel=by_channel)
    given, gradient = drawn(kind, NUM_TOKENS), gradient_of(kind, NUM_TOKENS)
    draw = torch.Generator().manual_seed(2)
    choice = torch.randint(4, given.decay_THX.shape, generator=draw)
    given = with_decay(given, torch.tensor([-50.0, 0.0, 0.0, -1e-3])[choice])
    given.beta_TH.copy_(torch.randint(2, given.beta_TH.shape, generator=draw))
    found = gradients_of(scan, given, ROWS_S3, gradient)
    expected = gradients_of(outputs_by_tokens, given, ROWS_S3, gradient, torch.float64)
    assert farthest(found, expected) < ROUNDING


@pytest.mark.parametrize("by_channel", [False, True])
def test_a_decay_to_nothing_forgets_all_before(scan: Scan, by_channel: bool) -> None:
    given = drawn(Kind(by_channel=by_channel), 80)
    given.decay_THX[40] = -torch.inf
    found = gradients_of(scan, given, places(0, 80, -1)[None], gradient_of(Kind(), 80))
    assert all(bool(tensor.isfinite().all()) for tensor in found)
    rest = with_tensors(given, [tensor[40:] for tensor in tensors(given)])
    assert farthest([found[0][40:]], [outputs_by_tokens(rest, places(0, 40, -1)[None])]) < ROUNDING


@pytest.mark.parametrize("by_channel", [False, True])
def test_half_precision_is_computed_in_float32(scan: Scan, by_channel: bool) -> None:
    kind = Kind(shared=2, key_width=32, value_width=32, by_channel=by_channel)
    halves, gradient = drawn(kind, NUM_TOKENS, dtype=torch.bfloat16), gradient_of(kind, NUM_TOKENS)
    found = gradients_of(scan, halves, ROWS_S3, gradient)
    expected = gradients_of(scan, halves, ROWS_S3, gradient, torch.float32)
    assert found[0].dtype == torch.float32
    assert torch.equal(found[0], expected[0])
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert mine.dtype == torch.bfloat16
        assert torch.equal(mine, theirs.bfloat16())


@pytest.mark.parametrize("by_channel", [False, True])
def test_autocast_leaves_states_and_sums_in_float32(scan: Scan, by_channel: bool) -> None:
    kind = Kind(by_channel=by_channel)
    given, gradient = drawn(kind, NUM_TOKENS), gradient_of(kind, NUM_TOKENS)
    expected = gradients_of(scan, given, ROWS_S3, gradient)
    found = gradients_of(torch.autocast("cpu", dtype=torch.bfloat16)(scan), given, ROWS_S3, gradient)
    assert all(torch.equal(got, want) for got, want in zip(found, expected, strict=True))


def test_inputs_of_any_strides_are_taken(scan: Scan) -> None:
    kind = Kind(shared=2, by_channel=True)
    given, gradient = drawn(kind, NUM_TOKENS), gradient_of(kind, NUM_TOKENS)
    expected = gradients_of(scan, given, ROWS_S3, gradient)
    wide = [torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]] for tensor in tensors(given)]
    turned = [tensor.transpose(0, -1).contiguous().transpose(0, -1) for tensor in tensors(given)]
    other_gradient = gradient.transpose(0, 2).contiguous().transpose(0, 2)
    for others in (wide, turned):
        found = gradients_of(scan, with_tensors(given, others), ROWS_S3, other_gradient)
        assert all(torch.equal(got, want) for got, want in zip(found, expected, strict=True))


# ------------------------------------------------------------------------------------------------ holders


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_steps_of_one_token_in_place_make_one_long_segment(scan: Scan, kind: Kind) -> None:
    given, num_rows = drawn(kind, 150), 3
    heads = kind.key_heads * kind.shared
    state = torch.full((5, heads, kind.key_width, kind.value_width), 7.0)
    kept = places(4, 0, 2)
    starts = torch.stack([places(0, 50, 100), places(50, 50, 50), places(-1, -1, -1)], 1)
    outs = []
    for step in range(50):
        holders = Holders(state, kept if step else places(-1, -1, -1), kept)
        taken = with_tensors(given, [tensor[starts[:, 0] + step] for tensor in tensors(given)])
        rows = torch.stack([torch.arange(num_rows), places(1, 1, 1), places(-1, -1, -1)], 1)
        outs.append(scan(taken, rows, holders))
    expected, finals = scan_by_tokens(given, starts)
    assert farthest([torch.stack(outs, 1).flatten(0, 1), state[kept]], [expected, finals]) < ROUNDING
    assert bool((state[[1, 3]] == 7.0).all())


@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_states_are_held_between_passes_over_forests(scan: Scan, kind: Kind) -> None:
    """One holder is read by several segments while one of them writes it; a child may read a holder as well."""
    lengths, draw = [30, 40, 1, 70, 1], torch.Generator().manual_seed(3)
    heads = kind.key_heads * kind.shared
    state = torch.randn(4, heads, kind.key_width, kind.value_width, generator=draw)
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    rows = torch.stack([starts, torch.tensor(lengths), places(-1, 0, 0, -1, 3)], 1)
    given, before = drawn(kind, 142), state.clone()
    read, write = places(1, -1, 2, 1, 1), places(1, 0, -1, 3, 2)
    out = scan(given, rows, Holders(state, read, write))
    expected, finals = scan_by_tokens(given, rows, [before[place] if place >= 0 else None for place in read.tolist()])
    assert farthest([out, state], [expected, finals[[1, 0, 4, 3]]]) < ROUNDING


# ------------------------------------------------------------------------------------------------ others


@pytest.mark.parametrize("by_channel", [False, True])
def test_keys_that_repeat_overwrite_what_they_hold(scan: Scan, by_channel: bool) -> None:
    """With beta = 1 and no decay a state holds the last value of a key; with beta = 2 it swings around it."""
    kind = Kind(key_heads=1, by_channel=by_channel)
    given = with_decay(drawn(kind, 200), torch.zeros(200, 1, 16 if by_channel else 1))
    given.key_TKN.copy_(given.key_TKN[:1].expand_as(given.key_TKN))
    given.query_TKN.copy_(given.key_TKN)
    given.beta_TH.fill_(1.0)
    rows = places(0, 200, -1)[None]
    assert farthest([scan(given, rows)], [given.value_THP.double()]) < 3e-6
    given.beta_TH.fill_(2.0)
    assert farthest([scan(given, rows)], [outputs_by_tokens(given, rows)]) < 1e-4


@pytest.mark.parametrize("by_channel", [False, True])
def test_what_is_no_number_stays_in_its_segment_and_its_children(scan: Scan, by_channel: bool) -> None:
    kind = Kind(by_channel=by_channel)
    rows = forest(((40, (3, (20,)), (35,)), (33, (5,))))
    given = drawn(kind, 136)
    own = [tensor.requires_grad_() for tensor in tensors(given)]
    with torch.no_grad():
        own[2][41] = torch.nan
    out = scan(with_tensors(given, own), rows)
    assert bool(out[42:63].isnan().all())
    assert not out[:40].isnan().any()
    assert not out[63:].isnan().any()
    gradients = torch.autograd.grad(out, own, gradient_of(kind, 136))
    assert not any(gradient[63:].isnan().any() for gradient in gradients)


@pytest.mark.parametrize("shared", [1, 4])
def test_gated_delta_nets_are_computed_as_transformers_do(scan: Scan, shared: int) -> None:
    kind = Kind(shared=shared, key_width=32, value_width=48)
    given, gradient = drawn(kind, 100), gradient_of(kind, 100)
    draw = torch.Generator().manual_seed(5)
    own = [torch.randn(given.query_TKN.shape, generator=draw).requires_grad_() for _ in range(2)]
    rest = [tensor.requires_grad_() for tensor in tensors(given)[2:]]
    query, key = (functional.normalize(tensor, dim=-1) for tensor in own)
    mine = scan(Recurrence(query * 32**-0.5, key, *rest), places(0, 100, -1)[None])
    value, decay, beta = rest
    theirs, _ = torch_chunk_gated_delta_rule(
        *(tensor[None] for tensor in (*own, value, decay[..., 0], beta)), use_qk_l2norm_in_kernel=True
    )
    found, expected = (torch.autograd.grad(out, (*own, *rest), gradient) for out in (mine, theirs[0]))
    assert farthest([mine, *found], [theirs[0], *expected]) < 3e-6


def test_kimi_delta_attention_is_computed_as_transformers_do(scan: Scan) -> None:
    kind = Kind(key_width=32, value_width=32, by_channel=True)
    given, gradient = drawn(kind, 100), gradient_of(kind, 100)
    own = [tensor.requires_grad_() for tensor in tensors(given)]
    mine = scan(with_tensors(given, own), places(0, 100, -1)[None])
    query, *rest = own
    theirs, _ = chunk_kimi_delta_attention(*(tensor[None] for tensor in (query * 32**0.5, *rest)))
    found, expected = (torch.autograd.grad(out, own, gradient) for out in (mine, theirs[0]))
    assert farthest([mine, *found], [theirs[0], *expected]) < 3e-6


def test_state_spaces_are_computed_as_transformers_do(scan: Scan) -> None:
    draw, rows = torch.Generator().manual_seed(6), places(0, 100, -1)[None]
    hidden = torch.randn(100, 8, 32, generator=draw).requires_grad_()
    key, query = (torch.randn(100, 2, 64, generator=draw).requires_grad_() for _ in range(2))
    rate = torch.rand(100, 8, generator=draw).requires_grad_()
    scale = -torch.linspace(0.1, 8, 8).requires_grad_()
    mine = scan(Recurrence(query, key, hidden * rate[..., None], (scale * rate)[..., None]), rows)
    theirs = mamba2_chunk_scan(hidden[None], rate[None], scale, key[None], query[None], chunk_size=64)[0]
    gradient = torch.randn(mine.shape, generator=draw)
    found, expected = (torch.autograd.grad(out, (hidden, key, query, rate, scale), gradient) for out in (mine, theirs))
    assert farthest([mine, *found], [theirs, *expected]) < 3e-6
