"""Attention over varying lengths: who sees whom is what the blocks say, and what it gives is what they give."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor

from covey.policy.attention import varlen
from covey.policy.attention.base import Heads, Layout, Rule, masked_attention
from covey.policy.attention.choice import choose_attention
from covey.policy.attention.packed import StreamSegment, packed_layout, star
from covey.policy.attention.varlen import varlen_layout

from ...support.builders import CPU
from ...support.flash import flash_forward

SEGMENTS = (*star(0, 5, (3, 0, 7)), *star(15, 1, (2, 2)), *star(20, 6), *star(26, 30, (9, 40)))
NUM_TOKENS = 105
ROOT = StreamSegment(0, 7)
UPPER = StreamSegment(7, 20, ROOT)
LOWER = StreamSegment(30, 6, UPPER)
ENDS = (StreamSegment(36, 9, LOWER), StreamSegment(45, 12, ROOT), StreamSegment(57, 48))
TREE = (ROOT, UPPER, StreamSegment(27, 3, UPPER), LOWER, *ENDS)
"""Four levels, a branch beside them, and another sequence."""


def attended(layout: Layout, window: int | None, num_key_heads: int) -> list[Tensor]:
    """The outputs with 4 query heads, and the gradients of queries, keys and values."""
    draw = torch.Generator().manual_seed(0)
    heads = (4, num_key_heads, num_key_heads)
    given = [torch.randn(1, h, NUM_TOKENS, 8, generator=draw, dtype=torch.float64).requires_grad_() for h in heads]
    out = layout.attend(0, *given, Rule(0.3, window))
    return [out, *torch.autograd.grad((out * torch.randn(out.shape, generator=draw, dtype=out.dtype)).sum(), given)]


@pytest.mark.parametrize("segments", [SEGMENTS, TREE], ids=["flat", "tree"])
@pytest.mark.parametrize("num_key_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 4])
def test_outputs_and_gradients_are_those_of_the_blocks(
    window: int | None, num_key_heads: int, segments: Sequence[StreamSegment]
) -> None:
    blocks = attended(packed_layout(segments, CPU), window, num_key_heads)
    varlen = attended(varlen_layout(segments, CPU), window, num_key_heads)
    for expected, found in zip(blocks, varlen, strict=True):
        assert found.shape == expected.shape
        assert float((found - expected).detach().abs().max()) < 1e-12


@dataclass(frozen=True)
class Hiding:
    """All scores of a tree, most of them hidden."""

    segments: Sequence[StreamSegment]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        seen_TT = torch.zeros(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool)
        for segment in self.segments:
            places = [place for start, length in segment.stretches for place in range(start, start + length)]
            for index in range(len(places) - segment.length, len(places)):
                seen_TT[places[index], places[max(0, index + 1 - (rule.window or NUM_TOKENS)) : index + 1]] = True
        return masked_attention(query, key, value, rule, seen_TT)


@pytest.mark.parametrize("window", [None, 4])
def test_a_segment_of_a_tree_sees_all_that_it_continues_and_nothing_beside_it(window: int | None) -> None:
    for expected, found in zip(
        attended(Hiding(TREE), window, 2), attended(packed_layout(TREE, CPU), window, 2), strict=True
    ):
        assert float((found - expected).detach().abs().max()) < 1e-12


def test_each_subsequence_is_one_sequence_of_queries_behind_its_prefix() -> None:
    layout = varlen_layout((*star(0, 3, (2, 0, 1)), *star(6, 2)), CPU)
    assert layout.lengths.query_end_N.tolist() == [0, 3, 5, 6, 8]
    assert layout.lengths.key_end_N.tolist() == [0, 3, 8, 12, 14]
    assert layout.key_place_S.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7]
    assert (layout.lengths.longest_query, layout.lengths.longest_key) == (3, 5)
    assert layout.lengths.query_end_N.dtype == torch.int32


GPU = [Heads(torch.float32, "cuda", 128, 128), Heads(torch.bfloat16, "cuda", 128, 128)]
"""Under autocast over float32 weights."""
OBSTACLES = {
    "needs model.precision=bfloat16 or float16 on a GPU": GPU[0],
    "needs heads of 8, 16, ... 256, got 320": Heads(torch.bfloat16, "cuda", 320, 320),
    "needs keys as wide as values": Heads(torch.bfloat16, "cuda", 192, 128),
    "knows neither attention sinks nor soft caps": Heads(torch.bfloat16, "cuda", 128, 128, is_plain=False),
}


def test_half_precision_on_a_gpu_takes_it_by_itself() -> None:
    assert choose_attention("auto", "auto", GPU) == choose_attention("auto", "torch", GPU) == "varlen"


@pytest.mark.parametrize("reason", OBSTACLES)
def test_what_flash_attention_cannot_compute_is_left_to_torch_or_refused(reason: str) -> None:
    heads = [OBSTACLES[reason]]
    assert choose_attention("auto", "auto", heads) == "sdpa"
    with pytest.raises(ValueError) as refused:
        choose_attention("varlen", "auto", heads)
    assert str(refused.value) == f"model.attention=varlen {reason}; take model.attention=sdpa"


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("num_key_heads", [1, 2])
def test_cached_rows_are_read_where_they_lie_and_no_further_than_they_are_long(
    num_key_heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(0)
    num_rows, group, num_slots, width = 5, 3, 16, 8
    size = (num_rows + 3, num_key_heads, num_slots, width)  # the block may hold more rows than are decoded
    keys, values = (torch.randn(size, generator=draw, dtype=torch.float64) for _ in range(2))
    query = torch.randn(num_rows, num_key_heads * group, width, generator=draw, dtype=torch.float64)
    lengths = torch.tensor([1, 4, num_slots, 7, 9])
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    rows = varlen.cached_rows(lengths, num_key_heads, num_slots)
    found = varlen.flash_rows(query, keys, values, rows, Rule(0.3, window))
    for row, length in enumerate(lengths.tolist()):
        seen = [cached[row : row + 1, :, :length] for cached in (keys, values)]
        one = masked_attention(query[row][None, :, None], *seen, Rule(0.3, None), within_window(length, window))
        torch.testing.assert_close(found[row], one[0, :, 0], rtol=0, atol=1e-12)


def within_window(length: int, window: int | None) -> Tensor:
    """What the last of so many tokens sees, (1, length)."""
    return (torch.arange(length, 0, -1) <= (window or length))[None]


@pytest.mark.parametrize("asks", [True, False], ids=["torch 2.13", "torch 2.11"])
def test_grouped_heads_are_named_only_where_torch_asks_for_it(asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def old(query: Tensor, *rest: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
        given.update(scale=scale, window_size=window_size)
        return query

    def new(query: Tensor, *rest: Any, enable_gqa: bool = False, **named: Any) -> Tensor:
        given.update(named, enable_gqa=enable_gqa)
        return query

    new.__signature__ = inspect.signature(
        old
    ).replace(  # type: ignore[attr-defined]
        parameters=[*inspect.signature(old).parameters.values(), *list(inspect.signature(new).parameters.values())[2:3]]
    )
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", new if asks else old)
    varlen._parameters.cache_clear()
    try:
        assert varlen.is_there()
        end = torch.tensor([0, 2], dtype=torch.int32)
        heads = torch.zeros(2, 4, 8)
        varlen.flash(heads, heads[:, :2], heads[:, :2], varlen.Lengths(end, end, 2, 2), Rule(0.5, 4))
    finally:
        varlen._parameters.cache_clear()
    assert given == {"scale": 0.5, "window_size": (3, 0)} | ({"enable_gqa": True} if asks else {})


def test_a_gpu_before_ampere_goes_through_sdpa_and_varlen_by_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = [Heads(torch.float16, "cuda", 64, 64)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, chosen in (((7, 5), "sdpa"), ((8, 0), "varlen"), ((12, 0), "varlen")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        assert choose_attention("auto", "auto", heads) == chosen
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    wanted = (
        "^model.attention=varlen needs a GPU of compute capability 8.0 or higher, got 7.5; take model.attention=sdpa$"
    )
    with pytest.raises(ValueError, match=wanted):
        choose_attention("varlen", "auto", heads)
