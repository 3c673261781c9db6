"""FlexAttention over packed streams: who sees whom is what the blocks say. Uncompiled here; a GPU compiles it."""

import pytest
import torch
from torch import Tensor

from covey.policy.attention.base import Layout, Rule
from covey.policy.attention.flex import flex_layout, padded_length
from covey.policy.attention.packed import Segment, packed_layout
from covey.policy.logprobs import Scoring
from covey.types import Sampling

from ...support.builders import CPU, logprobs, make, make_policy, random_groups

SEGMENTS = (Segment(0, 5, (3, 0, 7)), Segment(15, 1, (2, 2)), Segment(20, 6, ()), Segment(26, 130, (9, 40)))
NUM_TOKENS = 205


def attended(layout: Layout, window: int | None, num_key_heads: int) -> Tensor:
    """With 4 query heads. Without gradients: on CPUs FlexAttention has none; the preflight compares them on a GPU."""
    draw = torch.Generator().manual_seed(0)
    heads = (4, num_key_heads, num_key_heads)
    inputs = [torch.randn(1, h, NUM_TOKENS, 8, generator=draw, dtype=torch.float64) for h in heads]
    return layout.attend(0, *inputs, Rule(0.3, window))


@pytest.mark.parametrize("num_key_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 4])
def test_outputs_are_those_of_the_blocks(window: int | None, num_key_heads: int) -> None:
    blocks = attended(packed_layout(SEGMENTS, CPU), window, num_key_heads)
    flex = attended(flex_layout(SEGMENTS, CPU), window, num_key_heads)
    assert flex.shape == blocks.shape == (1, 4, NUM_TOKENS, 8)
    assert float((flex - blocks).abs().max()) < 1e-12


@pytest.mark.parametrize("packing", ["shared", "packed"])
@pytest.mark.parametrize("architecture", ["qwen3", "mistral"])
def test_a_model_scores_a_batch_alike(architecture: str, packing: str) -> None:
    policy = make_policy(architecture, torch.float64)
    scoring = Scoring(Sampling(), 0)
    found = [
        logprobs(policy, make(random_groups(), packing, 30, attention=attention).micro_batches, scoring)
        for attention in ("sdpa", "flex")
    ]
    assert len(found[0]) == 43
    assert float((found[0] - found[1]).abs().max()) < 1e-12


def test_a_stretch_of_streams_shares_a_few_lengths_and_padding_adds_an_eighth_at_most() -> None:
    lengths = {padded_length(number) for number in range(1025, 2049)}
    assert len(lengths) == 8
    assert all(number <= padded_length(number) <= number * 9 / 8 + 128 for number in range(1, 5000))
