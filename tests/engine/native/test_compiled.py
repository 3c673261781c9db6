"""Decode attention in C: the numbers of torch's, a row's alone, and never instead of what it is not made for."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from covey.engine.native.cache import Cache, CacheNeed, CacheShape, LayerShape
from covey.engine.native.compiled import CompiledDecodeLayout, sample_same_params
from covey.engine.native.engine import NativeEngine
from covey.engine.native.layouts import DecodeLayout, Grid
from covey.policy import sampling as sampler
from covey.policy.attention.base import Rule
from covey.policy.sampling import random_uniform
from covey.types import Sampling

from ..tiny import tiny_policy
from .test_engine import GENEROUS, PROMPTS, one

CPU = torch.device("cpu")
SHAPES = [
    pytest.param((7, 3, 4, 4, 32, None), id="as many keys as queries"),
    pytest.param((40, 8, 8, 2, 64, None), id="four queries a key"),
    pytest.param((5, 2, 6, 2, 128, 40), id="three queries a key, a window"),
    pytest.param((9, 4, 3, 1, 80, 7), id="a window shorter than some completions"),
    pytest.param((33, 2, 4, 4, 256, 1), id="a window of the token itself"),
    pytest.param((3, 3, 2, 2, 16, 100), id="a group of one row"),
    pytest.param((24, 2, 2, 1, 32, 65), id="a window of a block and one, many rows"),
    pytest.param((16, 2, 4, 1, 64, 129), id="a window that begins in the prompt"),
]


@dataclass(frozen=True)
class Step:
    """One token a row, random, with a cache that is filled at random."""

    cache: Cache
    grid: Grid
    own_lengths: list[int]
    query: Tensor
    key: Tensor
    value: Tensor
    rule: Rule

    def attend(self, layout: type[DecodeLayout] | type[CompiledDecodeLayout]) -> Tensor:
        """(R, H, D)."""
        lengths = [length + 1 for length in self.own_lengths]
        made = layout(self.cache, self.grid, torch.tensor(lengths), min(lengths), max(lengths))
        return made.attend(0, self.query, self.key, self.value, self.rule)[0].transpose(0, 1)


def random_step(shape: tuple[int, int, int, int, int, int | None], dtype: torch.dtype, seed: int = 0) -> Step:
    num_rows, num_groups, heads, key_heads, width, window = shape
    chance = random.Random(seed)
    prompt_lengths = [chance.randint(1, 150) for _ in range(num_groups)]
    group_of_row = [*range(num_groups), *(chance.randrange(num_groups) for _ in range(num_rows - num_groups))]
    own_lengths = [chance.randint(0, 130) for _ in range(num_rows)]
    cache = Cache(CacheShape((LayerShape(key_heads, width, width),), dtype, CPU), 1 << 30)
    cache.fit(CacheNeed(num_groups, max(prompt_lengths), num_rows, max(own_lengths) + 1, 200))
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    for block in (cache.prompts, cache.rows):
        for tensors in (block.keys, block.values):
            tensors[0].copy_(normal(*tensors[0].shape))
    query, key, value = (normal(1, num_rows, n, width).transpose(1, 2) for n in (heads, key_heads, key_heads))
    grid = Grid.of(group_of_row, prompt_lengths, CPU)
    return Step(cache, grid, own_lengths, 3 * query, key, value, Rule(width**-0.5, window))


def only(step: Step, row: int) -> Step:
    """The same with one row of the batch alone."""
    cache, group = Cache(step.cache.shape, 1 << 30), int(step.grid.cell_R[row]) // step.grid.width
    cache.fit(CacheNeed(1, step.cache.prompts.length, 1, step.cache.rows.length, step.cache.rows.length))
    for mine, theirs, index in ((cache.prompts, step.cache.prompts, group), (cache.rows, step.cache.rows, row)):
        mine.keys[0].copy_(theirs.keys[0][index : index + 1])
        mine.values[0].copy_(theirs.values[0][index : index + 1])
    grid = Grid.of([0], [int(step.grid.length_R[row])], CPU)
    query, key, value = (tensor[:, :, row : row + 1] for tensor in (step.query, step.key, step.value))
    return Step(cache, grid, [step.own_lengths[row]], query, key, value, step.rule)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_numbers_are_those_of_torch_and_the_cache_is_written_alike(shape: tuple[int, ...]) -> None:
    exact, plain, compiled = (random_step(shape, dtype) for dtype in (torch.float64, torch.float32, torch.float32))
    expected = exact.attend(DecodeLayout)
    error = (compiled.attend(CompiledDecodeLayout) - expected).abs().max()
    assert error < 1e-5
    assert error <= 3 * (plain.attend(DecodeLayout) - expected).abs().max()
    for mine, theirs in ((compiled.cache.prompts, plain.cache.prompts), (compiled.cache.rows, plain.cache.rows)):
        assert torch.equal(mine.keys[0], theirs.keys[0])
        assert torch.equal(mine.values[0], theirs.values[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_half_precision_cache_computes_with_its_rounded_keys_and_values(
    shape: tuple[int, ...],
) -> None:
    exact, compiled = random_step(shape, torch.float64), random_step(shape, torch.bfloat16)
    for mine, theirs in ((compiled.cache.prompts, exact.cache.prompts), (compiled.cache.rows, exact.cache.rows)):
        theirs.keys[0].copy_(mine.keys[0])
        theirs.values[0].copy_(mine.values[0])
    for mine, theirs in ((compiled.query, exact.query), (compiled.key, exact.key), (compiled.value, exact.value)):
        theirs.copy_(mine)
    found = replace(compiled, query=compiled.query.float()).attend(CompiledDecodeLayout)
    assert found.dtype == torch.float32
    assert (found - exact.attend(DecodeLayout)).abs().max() < 1e-5
    assert torch.equal(compiled.cache.rows.keys[0].double(), exact.cache.rows.keys[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_gets_the_same_bits_alone(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    step = random_step(shape, dtype)
    together = step.attend(CompiledDecodeLayout)
    for row in range(len(step.own_lengths)):
        assert torch.equal(only(step, row).attend(CompiledDecodeLayout)[0], together[row])


def test_the_number_of_threads_changes_no_bit() -> None:
    step, before = random_step((40, 8, 8, 2, 64, None), torch.float32), torch.get_num_threads()
    try:
        outputs = []
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            outputs.append(step.attend(CompiledDecodeLayout))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_what_is_no_number_stays_in_its_row() -> None:
    step = random_step((7, 3, 4, 4, 32, None), torch.float32)
    step.cache.rows.keys[0][2] = torch.nan
    step.own_lengths[2] = 5
    is_nan = step.attend(CompiledDecodeLayout).isnan()
    assert is_nan[2].all()
    assert not is_nan[[0, 1, 3, 4, 5, 6]].any()


def test_loading_the_kernels_does_not_flush_denormals_to_zero() -> None:
    random_step((7, 3, 4, 4, 32, None), torch.float32).attend(CompiledDecodeLayout)
    assert float(torch.tensor(1e-40) * 1.0) > 0.0


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral-window"])
def test_an_engine_samples_the_same_through_c(architecture: str) -> None:
    policy, sampling = tiny_policy(architecture), Sampling(max_tokens=20, seed=3)
    engines = [NativeEngine(policy, GENEROUS, 64, kernels) for kernels in ("torch", "auto")]
    assert [engine.kernels for engine in engines] == ["torch", "compiled"]
    plain, compiled = (one(engine, PROMPTS[1], 4, sampling) for engine in engines)
    for theirs, mine in zip(plain, compiled, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
        assert mine.logprobs != theirs.logprobs


def test_what_it_is_not_made_for_goes_through_torch() -> None:
    exact, narrow = tiny_policy("llama", torch.float64), tiny_policy("qwen2")
    assert NativeEngine(exact, GENEROUS, 8).kernels == "torch"
    assert NativeEngine(narrow, GENEROUS, 8).kernels == "torch"


def drawn(logits: Tensor, temperature: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """One token a row with its log-probability, through C."""
    uniform = random_uniform(torch.full((len(logits),), seed), torch.arange(len(logits)))
    return sample_same_params(logits, (temperature, 0, 1.0, 0.0), uniform)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("num_tokens", [5, 512, 513, 5000, 151_936])
def test_tokens_are_those_of_torch_and_log_probs_those_of_float64(num_tokens: int, temperature: float) -> None:
    num_rows = min(200, 2**22 // num_tokens)
    logits = 3 * torch.randn(num_rows, num_tokens, generator=torch.Generator().manual_seed(1))
    uniform = random_uniform(torch.zeros(num_rows, dtype=torch.int64), torch.arange(num_rows))
    token, logprob = drawn(logits, temperature)
    theirs, _ = sampler.sample_same_params(logits, (temperature, 0, 1.0, 0.0), uniform)
    assert torch.equal(token, theirs)
    # Half the distance of two float32 numbers beyond 16
    exact = (logits.double() / (temperature or 1.0)).log_softmax(dim=-1).gather(1, token[:, None])[:, 0]
    assert torch.allclose(logprob.double(), exact, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [3, 600])
def test_a_token_of_probability_zero_is_not_drawn(num_tokens: int) -> None:
    logits = torch.full((3, num_tokens), -torch.inf)
    logits[:, [1, num_tokens - 2]] = torch.tensor([0.0, 1.0])[: 1 if num_tokens == 3 else 2]
    uniform = torch.tensor([0.0, 0.5, 1.0 - 2.0**-53], dtype=torch.float64)
    token, _ = sample_same_params(logits, (1.0, 0, 1.0, 0.0), uniform)
    assert set(token.tolist()) <= {1, num_tokens - 2}
    assert token[0] == 1
    assert token[2] == num_tokens - 2


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_diverged_policy_has_no_log_prob_and_still_a_token(temperature: float) -> None:
    token, logprob = drawn(torch.full((4, 700), torch.nan), temperature)
    assert logprob.isnan().all()
    assert ((token >= 0) & (token < 700)).all()


def test_the_likeliest_token_is_the_first_of_equal_ones() -> None:
    logits = torch.zeros(3, 1300)
    logits[0, [40, 41, 600]] = logits[1, [513, 1299]] = 2.0
    assert drawn(logits, temperature=0.0)[0].tolist() == [40, 513, 0]


def test_filters_are_torchs() -> None:
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(2))
    uniform = random_uniform(torch.zeros(50, dtype=torch.int64), torch.arange(50))
    for distribution in ((0.0, 3, 1.0, 0.0), (1.0, 3, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (1.0, 0, 1.0, 0.2)):
        mine, theirs = (f(logits, distribution, uniform) for f in (sample_same_params, sampler.sample_same_params))
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])
