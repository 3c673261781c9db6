"""Attention over packed streams in C: the formula's numbers and gradients, a segment's alone, whatever the threads."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor

from covey.policy.attention.base import Heads, Rule
from covey.policy.attention.choice import choose_attention
from covey.policy.attention.compiled import compiled_layout
from covey.policy.attention.packed import PackedLayout, StreamSegment, star
from covey.policy.kernels.compiler import compiler_version, load
from covey.policy.kernels.support import unsupported_reason
from covey.policy.logprobs import Scoring
from covey.types import Sampling

from ...support.builders import CPU, logprobs, make, make_policy, nano, random_groups

LENGTHS = ((5, (3, 0, 7)), (1, (2, 2)), (6, ()), (130, (9, 40, 1)), (64, (64, 65)), (0, (4,)), (300, (290, 1)))
"""Prefix and branches of each segment; a tile has 64 keys, a chunk of the forward pass 256 tokens."""
MANY_BRANCHES = ((70, (100,) * 12),)
"""Of which five and more make a chunk of the backward pass."""
HEADS = [(4, 4), (4, 2), (3, 1)]
WIDTHS = [16, 32, 64, 80, 128, 256]


def starts_of(lengths: Sequence[tuple[int, tuple[int, ...]]]) -> list[int]:
    return list(accumulate((prefix + sum(branches) for prefix, branches in lengths), initial=0))


def segments_of(lengths: Sequence[tuple[int, tuple[int, ...]]]) -> list[StreamSegment]:
    return [one for start, each in zip(starts_of(lengths), lengths, strict=False) for one in star(start, *each)]


def visible(segments: Sequence[StreamSegment], window: int | None) -> Tensor:
    """Who sees whom, token by token."""
    num_tokens = sum(segment.length for segment in segments)
    seen_TT = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for segment in segments:
        places = [place for start, length in segment.stretches for place in range(start, start + length)]
        for index in range(len(places) - segment.length, len(places)):
            seen_TT[places[index], places[max(0, index + 1 - (window or num_tokens)) : index + 1]] = True
    return seen_TT


def dense(segments: Sequence[StreamSegment], query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
    """All scores, most of them hidden."""
    shared = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(shared, dim=1) for tensor in (key, value))
    scores = (query @ key.transpose(2, 3) * rule.scaling).masked_fill(~visible(segments, rule.window), -torch.inf)
    return scores.softmax(-1) @ value


def drawn(segments: Sequence[StreamSegment], heads: tuple[int, int], width: int) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values, heads within tokens as layers give them; and a gradient of outputs."""
    num_tokens = sum(segment.length for segment in segments)
    draw = torch.Generator().manual_seed(0)
    query, key, value, gradient = (
        torch.randn(1, num_tokens, num_heads, width, generator=draw).transpose(1, 2)
        for num_heads in (heads[0], heads[1], heads[1], heads[0])
    )
    return [query, key, value], gradient


def compiled(segments: Sequence[StreamSegment], inputs: Sequence[Tensor], gradient: Tensor, rule: Rule) -> list[Tensor]:
    """The output and the gradients of queries, keys and values."""
    own = [tensor.detach().requires_grad_() for tensor in inputs]
    out = compiled_layout(segments, CPU).attend(0, own[0], own[1], own[2], rule)
    return [out.detach(), *torch.autograd.grad(out, own, gradient)]


def exact(segments: Sequence[StreamSegment], inputs: Sequence[Tensor], gradient: Tensor, rule: Rule) -> list[Tensor]:
    """The same in float64 by the formula."""
    own = [tensor.double().requires_grad_() for tensor in inputs]
    out = dense(segments, own[0], own[1], own[2], rule)
    return [out.detach(), *torch.autograd.grad(out, own, gradient.double())]


def farthest(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative distance; where nothing is expected, as queries and keys have no gradient where a window
    shows one token, in parts of the output."""
    sizes = [float(want.norm()) or float(expected[0].norm()) for want in expected]
    return max(float((got - want).norm()) / size for got, want, size in zip(found, expected, sizes, strict=True))


@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize(
    ("heads", "width"),
    [
        pytest.param(heads, width, marks=[] if heads == (4, 2) or width == 80 else pytest.mark.slow)
        for heads in HEADS
        for width in WIDTHS
    ],
)
def test_outputs_and_gradients_are_those_of_the_formula(heads: tuple[int, int], width: int, window: int | None) -> None:
    segments, rule = segments_of(LENGTHS), Rule(2.0 * width**-0.5, window)
    inputs, gradient = drawn(segments, heads, width)
    assert farthest(compiled(segments, inputs, gradient, rule), exact(segments, inputs, gradient, rule)) < 2e-6


@pytest.mark.parametrize("window", [2, 63, 64, 65, 66, 100, 127, 128, 129, 200, 290])
def test_a_window_of_any_size_begins_where_the_formula_says(window: int) -> None:
    """Beside a tile of 64 keys and over several: rows of one tile see different first keys."""
    segments, rule = segments_of(((130, (9, 40, 1)), (300, (290, 1)), (70, ()))), Rule(0.5, window)
    inputs, gradient = drawn(segments, (2, 1), 16)
    assert farthest(compiled(segments, inputs, gradient, rule), exact(segments, inputs, gradient, rule)) < 2e-6


def test_many_branches_add_up_what_they_give_to_their_prefix() -> None:
    segments, rule = segments_of(MANY_BRANCHES), Rule(0.2, None)
    inputs, gradient = drawn(segments, (2, 1), 32)
    assert len(compiled_layout(segments, CPU).backward.rows) == 3
    assert farthest(compiled(segments, inputs, gradient, rule), exact(segments, inputs, gradient, rule)) < 2e-6


def test_trees_that_are_not_flat_are_attended_the_torch_way() -> None:
    root = StreamSegment(0, 70)
    upper = StreamSegment(70, 5, root)
    tree, rule = [root, upper, StreamSegment(75, 3, upper), StreamSegment(78, 4, root)], Rule(0.2, None)
    inputs, gradient = drawn(tree, (2, 1), 32)
    assert isinstance(compiled_layout(tree, CPU), PackedLayout)
    assert not isinstance(compiled_layout(tree[:2], CPU), PackedLayout)
    assert farthest(compiled(tree, inputs, gradient, rule), exact(tree, inputs, gradient, rule)) < 2e-6


def test_large_scores_and_those_that_vanish_are_computed_too() -> None:
    segments, rule = segments_of(LENGTHS), Rule(30.0, None)
    inputs, gradient = drawn(segments, (2, 2), 64)
    assert farthest(compiled(segments, inputs, gradient, rule), exact(segments, inputs, gradient, rule)) < 1e-3


def test_tensors_of_any_strides_are_taken() -> None:
    segments, rule = segments_of(LENGTHS), Rule(0.3, None)
    inputs, gradient = drawn(segments, (2, 1), 32)
    expected = compiled(segments, inputs, gradient, rule)
    turned = [tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in (*inputs, gradient)]
    found = compiled(segments, turned[:3], turned[3], rule)
    assert all(torch.equal(got, want) for got, want in zip(found, expected, strict=True))


def test_the_number_of_threads_changes_no_bit() -> None:
    segments, rule, before = segments_of((*LENGTHS, *MANY_BRANCHES)), Rule(0.2, None), torch.get_num_threads()
    inputs, gradient = drawn(segments, (4, 2), 64)
    try:
        found = []
        for num_threads in (1, 2, 3, 1):
            torch.set_num_threads(num_threads)
            found.append(compiled(segments, inputs, gradient, rule))
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(first, other) for first, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize("window", [None, 30])
def test_a_segment_gets_the_same_bits_alone_and_beside_others(window: int | None) -> None:
    rule, lengths = Rule(0.2, window), (*LENGTHS, *MANY_BRANCHES)
    segments = segments_of(lengths)
    inputs, gradient = drawn(segments, (4, 2), 64)
    together = compiled(segments, inputs, gradient, rule)
    for start, own in zip(starts_of(lengths), lengths, strict=False):
        tokens = slice(start, start + own[0] + sum(own[1]))
        mine = [tensor[:, :, tokens] for tensor in inputs]
        alone = compiled(segments_of([own]), mine, gradient[:, :, tokens], rule)
        assert all(torch.equal(all_of[:, :, tokens], one) for all_of, one in zip(together, alone, strict=True))


def test_what_is_no_number_shows_and_stays_in_its_segment() -> None:
    segments = segments_of(((70, (5, 5)), (70, (5, 5))))
    inputs, gradient = drawn(segments, (2, 2), 32)
    inputs[1][:, :, 3] = torch.nan
    found = compiled(segments, inputs, gradient, Rule(0.2, None))
    assert all(tensor[:, :, 3:80].isnan().any() for tensor in found)
    assert bool(found[0][:, :, 70:80].isnan().all())
    assert not any(tensor[:, :, 80:].isnan().any() for tensor in found)


def test_a_pass_without_gradient_has_the_same_outputs_and_keeps_nothing() -> None:
    segments, rule = segments_of(LENGTHS), Rule(0.2, None)
    inputs, gradient = drawn(segments, (4, 2), 32)
    with torch.no_grad():
        out = compiled_layout(segments, CPU).attend(0, inputs[0], inputs[1], inputs[2], rule)
    assert out.grad_fn is None
    assert torch.equal(out, compiled(segments, inputs, gradient, rule)[0])


@pytest.mark.parametrize("packing", ["shared", "packed"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral"])
def test_a_model_scores_a_batch_alike(architecture: str, packing: str) -> None:
    policy, scoring = make_policy(architecture), Scoring(Sampling(), 0)
    blocks, found = (
        logprobs(policy, make(random_groups(), packing, 30, attention=attention).micro_batches, scoring)
        for attention in ("sdpa", "compiled")
    )
    assert len(found) == 43
    assert float((found - blocks).abs().max()) < 1e-4
    assert not torch.equal(found, blocks)


def test_in_half_precision_it_is_the_same_in_float32_rounded_once() -> None:
    segments = segments_of([(20, (9, 12)), (0, (30,))])
    inputs, gradient = drawn(segments, (4, 2), 32)
    rounded = [tensor.bfloat16() for tensor in inputs]
    rule = Rule(32**-0.5, None)
    found = compiled(segments, rounded, gradient.bfloat16(), rule)
    expected = compiled(segments, [tensor.float() for tensor in rounded], gradient.bfloat16().float(), rule)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.bfloat16
        assert torch.equal(mine, theirs.bfloat16())


# ------------------------------------------------------------------------------------------------ the choice

PLAIN = Heads(torch.float32, "cpu", 64, 64)
POSSIBLE = [PLAIN, Heads(torch.float32, "cpu", 16, 16), Heads(torch.bfloat16, "cpu", 256, 256)]
OBSTACLES = {
    "it computes float32 and bfloat16 on a CPU, got float64 on cpu": Heads(torch.float64, "cpu", 64, 64),
    "it computes float32 and bfloat16 on a CPU, got float16 on cpu": Heads(torch.float16, "cpu", 64, 64),
    "it computes float32 and bfloat16 on a CPU, got float32 on cuda": Heads(torch.float32, "cuda", 64, 64),
    "heads must be 16, 32, ... 256 wide, got 8": Heads(torch.float32, "cpu", 8, 8),
    "heads must be 16, 32, ... 256 wide, got 272": Heads(torch.float32, "cpu", 272, 272),
    "heads must be 16, 32, ... 256 wide, got keys of 192 with values of 128": Heads(torch.float32, "cpu", 192, 128),
}


def test_auto_is_compiled_where_that_can_be() -> None:
    assert [choose_attention("auto", "auto", [heads]) for heads in POSSIBLE] == ["compiled"] * 3
    assert choose_attention("auto", "torch", POSSIBLE) == "sdpa"
    assert [choose_attention(choice, "auto", POSSIBLE) for choice in ("sdpa", "varlen")] == ["sdpa", "varlen"]


@pytest.mark.parametrize("reason", OBSTACLES)
def test_what_it_is_not_made_for_goes_through_torch(reason: str) -> None:
    heads = [PLAIN, OBSTACLES[reason]]
    assert choose_attention("auto", "auto", heads) == "sdpa"
    tensors, widths = [(h.dtype, h.device_type) for h in heads], [(h.key_width, h.value_width) for h in heads]
    assert unsupported_reason("attention", tensors, widths) == reason


@pytest.fixture(name="no_compiler")
def _no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """None is on the PATH, and what was loaded before is forgotten, here and after."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for found in (load, compiler_version):
        found.cache_clear()
    yield
    for found in (load, compiler_version):
        found.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_packed_streams_attend_through_torch() -> None:
    assert nano().attention == "sdpa"
    reason = "none of gcc, cc, clang is on the PATH"
    assert unsupported_reason("attention", [(torch.float32, "cpu")], [(64, 64)]) == reason


@pytest.mark.long
def test_a_policy_knows_how_it_attends_once_it_is_loaded() -> None:
    assert nano().attention == "compiled"
    assert nano(attention="sdpa").attention == nano(kernels="torch").attention == "sdpa"
    assert nano(precision="bfloat16").attention == "compiled"
    assert nano(precision="float64").attention == "sdpa"
    assert nano(nano_num_heads=4).attention == "sdpa"
    assert nano(name="nano-masked", kind="masked", nano_architecture="bert").attention == "sdpa"
