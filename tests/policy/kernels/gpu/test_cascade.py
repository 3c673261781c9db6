"""Prompts that are read once for their group, through Triton's interpreter on a CPU."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from covey.policy.attention.base import Rule, causal_attention
from covey.policy.kernels.gpu import tiles, trials
from covey.policy.kernels.gpu.tiles import Tiles, repeats_much

pytest.importorskip("triton", reason="needs Triton: pip install triton")
from triton.runtime.interpreter import TensorHandle, interpreter_builder

from covey.policy.kernels.gpu import cascade

CPU = torch.device("cpu")
GROUPS = [0, 1, 0, 0, 2, 0, 0, 0, 0, 0, 0, 1]
"""Ten rows of one prompt, which are two tiles, in no order."""
LENGTHS = (130, 300, 7)
OWN = (0, 1, 2, 127, 128, 129, 255, 40, 3, 11, 190, 64)


@pytest.fixture(autouse=True)
def _multiplies_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widen bfloat16 before products: the interpreter keeps it as 16-bit integers, and would multiply those."""
    product = interpreter_builder.create_dot

    def wide(handle: Any) -> Any:
        if str(handle.dtype.scalar) != "bf16":
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), cascade.tl.float32)

    monkeypatch.setattr(interpreter_builder, "create_dot", lambda a, b, *rest: product(wide(a), wide(b), *rest))


def random(*size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


def found_and_wanted(
    dtype: torch.dtype, width: int = 64, window: int | None = None, heads: tuple[int, int] = (2, 3)
) -> tuple[Tensor, Tensor]:
    """Through the kernels, and in float64 row by row."""
    num_heads, queries = heads
    shared = [random(3, num_heads, 300, width, dtype=dtype) + i for i in range(2)]
    own = [random(12, num_heads, 560, width, dtype=dtype) + i for i in range(2)]
    query, rule = random(16, num_heads * queries, width, dtype=dtype), Rule(width**-0.5, window)
    tables = Tiles(16, CPU)
    tables.write([(group, LENGTHS[group]) for group in GROUPS])
    position = torch.tensor([LENGTHS[g] + n for g, n in zip(GROUPS, OWN, strict=True)] + [0] * 4)
    own = [torch.cat((each, each[:4]), dim=0) for each in own]  # four rows that idle
    found = tables.attend(query, (shared[0], shared[1]), (own[0], own[1]), position, rule)
    wanted = []
    for row, (group, count) in enumerate(zip(GROUPS, OWN, strict=True)):
        end = LENGTHS[group] + count + 1
        start = max(0, end - window) if window else 0
        keys, values = (
            torch.cat((of[group, :, : LENGTHS[group]], mine[row, :, LENGTHS[group] : end]), dim=1)[None, :, start:]
            for of, mine in zip(shared, own, strict=True)
        )
        given = (query[row : row + 1, :, None].double(), keys.double(), values.double())
        wanted.append(causal_attention(*given, Rule(rule.scaling, None))[0, :, 0])
    assert found[12:].isfinite().all()
    return found[:12].double(), torch.stack(wanted)


@pytest.mark.parametrize(("width", "window"), [(16, None), (64, 50), (80, 200), (128, None)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 0.02), (torch.float16, 3e-3)])
def test_prompts_read_once_give_plain_attention(
    dtype: torch.dtype, tolerance: float, width: int, window: int | None
) -> None:
    found, wanted = found_and_wanted(dtype, width, window)
    assert (found - wanted).abs().max() < tolerance


@pytest.mark.parametrize("heads", [(1, 1), (2, 7), (1, 16)])
def test_any_number_of_query_heads_shares_keys(heads: tuple[int, int]) -> None:
    found, wanted = found_and_wanted(torch.float32, 16, heads=heads)
    assert (found - wanted).abs().max() < 2e-6


def test_a_row_has_the_same_bits_with_others_of_its_group_and_alone() -> None:
    shared, own = random(2, 2, 140, 16, dtype=torch.float32), random(4, 2, 400, 16, dtype=torch.float32)
    query, rule = random(4, 6, 16, dtype=torch.float32), Rule(0.25, None)

    def row_0(groups: list[int]) -> Tensor:
        tables = Tiles(4, CPU)
        tables.write([(group, 140) for group in groups])
        position = torch.tensor([300, 150, 160, 399])
        return tables.attend(query, (shared, shared), (own, own), position, rule)[0]

    assert torch.equal(row_0([0, 0, 0, 0]), row_0([0, 1, 1, 1]))


def test_chunks_are_short_where_programs_are_few() -> None:
    assert [cascade.chunk_of(n) for n in (2, 511, 512, 1024)] == [128, 128, 512, 512]


def test_the_trial_finds_a_kernel_that_forgets_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = torch.float16, 2, 3, 64
    trials.computes.cache_clear()
    assert trials.computes("cascade", CPU, *shape)
    assert not trials.computes("cascade", CPU, torch.float16, 1, 17, 64), "queries that do not fit"
    monkeypatch.setattr(
        tiles.Tiles, "write", lambda self, prompts, real=Tiles.write: real(self, [(0, 3) for _ in prompts])
    )
    assert trials.try_cascade(CPU, *shape) > trials.TOLERANCE
    trials.computes.cache_clear()


@pytest.mark.parametrize(
    ("prompt", "most", "groups", "expected"),
    [(300, 1024, [0] * 8, True), (300, 1024, [0, 1, 2, 3], False), (20, 1024, [0] * 8, False), (0, 0, [0], False)],
)
def test_prompts_are_shared_where_an_eighth_of_all_is_read_again(
    prompt: int, most: int, groups: list[int], expected: bool
) -> None:
    assert repeats_much([(prompt, most, group) for group in groups]) is expected
